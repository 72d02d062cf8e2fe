"""The limits of all that decode on this CPU: nothing but reading, decoding and resizing, on every core."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import simplejpeg
import tifffile
import torch
from PIL import Image
from torch.nn.functional import interpolate

T = TypeVar("T")
U = TypeVar("U")


def decode(path: str) -> np.ndarray:
    """The whole image (H, W, C), in uint8 or what the file holds."""
    if path.lower().endswith((".jpg", ".jpeg")):
        return simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB")
    if path.lower().endswith((".tif", ".tiff")):
        return tifffile.imread(path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def resize(path: str, shorter_side: int, crop: tuple[int, int]) -> np.ndarray:
    """The `crop` (height, width) from the centre of the decoded image, resized with antialiasing."""
    image = decode(path)
    factor = min(image.shape[:2]) / shorter_side
    height, width = (round(factor * length) for length in crop)
    y, x = max(0, image.shape[0] - height) // 2, max(0, image.shape[1] - width) // 2
    pixels = torch.from_numpy(image)[None, y : y + height, x : x + width].permute(0, 3, 1, 2)
    resized = interpolate(pixels, crop, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def read(path: str) -> np.ndarray:
    """The bytes of the file."""
    return np.fromfile(path, np.uint8)


class Batches:
    """Lists of arrays; nothing is resized, stacked or converted."""

    def __init__(
        self,
        files: Sequence[str],
        batch_size: int,
        num_threads: int,
        function: Callable[[str], np.ndarray],
    ) -> None:
        self.files, self.batch_size, self.function = list(files), batch_size, function
        self.pool = ThreadPoolExecutor(
            num_threads, initializer=torch.set_num_threads, initargs=(1,)
        )

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        chunks = [
            self.files[start : start + self.batch_size]
            for start in range(0, len(self.files), self.batch_size)
        ]
        yield from ahead(self.pool, self.function, chunks)


def ahead(
    pool: ThreadPoolExecutor,
    function: Callable[[T], U],
    chunks: Iterable[Sequence[T]],
    depth: int = 3,
) -> Iterator[list[U]]:
    """The function's results, chunk by chunk, `depth` chunks of work being handed out in advance."""
    waiting: deque[list[Future[U]]] = deque()
    for chunk in chunks:
        waiting.append([pool.submit(function, item) for item in chunk])
        if len(waiting) == depth:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]


def batches(
    files: Sequence[str],
    batch_size: int,
    num_threads: int,
    function: Callable[[str], np.ndarray] = decode,
) -> Batches:
    """Decode JPEGs by libjpeg-turbo, TIFFs by tifffile and all else by Pillow, on threads.

    With `function=read` the files are only read; see also `resize`.
    """
    return Batches(files, batch_size, num_threads, function)
