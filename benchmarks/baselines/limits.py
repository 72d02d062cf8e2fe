"""Upper limits of any pipeline on these cores: only reading, decoding, or decoding and resizing.

Unlike the other baselines, these yield lists of arrays of different sizes, endlessly.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import simplejpeg
import torch
from torch.nn.functional import interpolate

from benchmarks.baselines import Job

T = TypeVar("T")
U = TypeVar("U")


def read(job: Job) -> Iterator[Any]:
    return of_files(job, read_file)


def decode(job: Job) -> Iterator[Any]:
    return of_files(job, decode_file)


def decode_by_torchcodec(job: Job) -> Iterator[Any]:
    from torchcodec.decoders import decode_image

    return of_files(job, decode_image)


def resize(job: Job) -> Iterator[Any]:
    size: Any = job.recipe.resize
    crop: Any = job.recipe.crop
    return of_files(job, partial(resize_file, shorter_side=size, crop=crop))


def of_files(job: Job, function: Callable[[str], Any]) -> Iterator[tuple[list[Any], ...]]:
    """Results of `function` for each file in batches, targets apart from inputs."""
    columns = [job.files, job.targets] if job.targets else [job.files]
    paths = itertools.cycle([path for sample in zip(*columns, strict=True) for path in sample])
    for results in on_threads(function, paths, len(columns) * job.batch_size, job.parallel):
        yield tuple(results[place :: len(columns)] for place in range(len(columns)))


def read_file(path: str) -> np.ndarray:
    """Bytes of a file."""
    return np.fromfile(path, np.uint8)


def decode_file(path: str) -> np.ndarray:
    """JPEG decoded to uint8 (H, W, 3)."""
    return simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB")


def resize_file(path: str, shorter_side: int, crop: tuple[int, int]) -> np.ndarray:
    """Center crop of the decoded image, resized to `crop` (height, width) with antialiasing."""
    image = decode_file(path)
    factor = min(image.shape[:2]) / shorter_side
    height, width = (round(factor * length) for length in crop)
    y, x = max(0, image.shape[0] - height) // 2, max(0, image.shape[1] - width) // 2
    pixels = torch.from_numpy(image)[None, y : y + height, x : x + width].permute(0, 3, 1, 2)
    resized = interpolate(pixels, crop, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def on_threads(
    function: Callable[[T], U], items: Iterable[T], batch_size: int, num_threads: int
) -> Iterator[list[U]]:
    """Results of `function` in batches; three batches are computed ahead by a pool of threads."""
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
