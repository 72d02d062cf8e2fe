"""What no loader on these cores can beat: reading, decoding, resizing or copying, and nothing else."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import simplejpeg
import tifffile
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

T = TypeVar("T")
U = TypeVar("U")


def read(path: str) -> np.ndarray:
    """The bytes of the file."""
    return np.fromfile(path, np.uint8)


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


def on_threads(
    function: Callable[[T], U], items: Iterable[T], batch_size: int, num_threads: int
) -> Iterator[list[U]]:
    """The function's results, batch by batch, three batches of work being handed out in advance."""
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[list[Future[U]]] = deque([[]])
        for item in items:
            if len(waiting[-1]) == batch_size:
                waiting.append([])
            if len(waiting) > 3:
                yield [future.result() for future in waiting.popleft()]
            waiting[-1].append(pool.submit(function, item))
        for futures in waiting:
            yield [future.result() for future in futures]


def write_pixels(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    """A memory-mapped file of uint8 noise of that shape; an existing one of the same size is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = int(np.prod(shape))
    if not path.exists() or path.stat().st_size != size:
        random = np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(shape[0]):
                file.write(random.integers(0, 256, size // shape[0], np.uint8).tobytes())
    return np.memmap(path, np.uint8, "r", shape=shape)


def copies(
    pixels: np.ndarray, crop: tuple[int, int], batch_size: int, num_threads: int, as_float: bool
) -> Iterator[list[Tensor]]:
    """Random crops of memory-mapped uint8 images (N, H, W, C), copied into a part of a batch per thread.

    The parts are uint8 (n, height, width, C), the bytes that any loader of decoded pixels has to touch, or
    with `as_float` float32 (n, C, height, width) as a model takes it.
    """
    random = np.random.default_rng(0)
    count, height, width, channels = pixels.shape
    size = -(-batch_size // num_threads)
    order = random.permutation(count)
    y, x = (random.integers(n + 1, size=count) for n in (height - crop[0], width - crop[1]))

    def copy(start: int) -> Tensor:
        part = np.empty((min(size, count - start), *crop, channels), np.uint8)
        for place, number in enumerate(order[start : start + size]):
            top, left = y[number], x[number]
            part[place] = pixels[number, top : top + crop[0], left : left + crop[1]]
        images = torch.from_numpy(part)
        return images.permute(0, 3, 1, 2).contiguous().to(torch.float32) if as_float else images

    return on_threads(copy, itertools.cycle(range(0, count, size)), num_threads, num_threads)
