"""The limit of all that read decoded pixels: copying crops out of a memory-mapped file."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines.decode_only import ahead


class Batches:
    """Batches cut out at random positions by threads."""

    def __init__(
        self,
        pixels: np.ndarray,
        crop: tuple[int, int],
        batch_size: int,
        num_threads: int,
        seed: int,
        as_float: bool,
    ) -> None:
        self.pixels, self.crop, self.batch_size, self.as_float = pixels, crop, batch_size, as_float
        self.random = np.random.default_rng(seed)
        self.pool = ThreadPoolExecutor(num_threads)

    def __iter__(self) -> Iterator[Tensor]:
        count, height, width, channels = self.pixels.shape
        order = self.random.permutation(count)
        y = self.random.integers(height - self.crop[0] + 1, size=count)
        x = self.random.integers(width - self.crop[1] + 1, size=count)

        def fill(job: tuple[np.ndarray, int]) -> None:
            batch, start = job
            for place, number in enumerate(order[start : start + len(batch)]):
                top, left = y[number], x[number]
                batch[place] = self.pixels[
                    number, top : top + self.crop[0], left : left + self.crop[1]
                ]

        def jobs() -> Iterator[list[tuple[np.ndarray, int]]]:
            for start in range(0, count, self.batch_size):
                size = min(self.batch_size, count - start)
                batch = np.empty((size, *self.crop, channels), np.uint8)
                pending.append(batch)
                step = -(-size // self.pool._max_workers)
                yield [(batch[part : part + step], start + part) for part in range(0, size, step)]

        pending: list[np.ndarray] = []
        for _ in ahead(self.pool, fill, jobs()):
            images = torch.from_numpy(pending.pop(0))
            if self.as_float:
                images = images.permute(0, 3, 1, 2).contiguous().to(torch.float32)
            yield images


def write_pixels(path: Path, shape: tuple[int, int, int, int], seed: int = 0) -> np.ndarray:
    """A memory-mapped file of uint8 noise of that shape; an existing one of the same size is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = int(np.prod(shape))
    if not path.exists() or path.stat().st_size != size:
        random = np.random.default_rng(seed)
        with path.open("wb") as file:
            for _ in range(shape[0]):
                file.write(random.integers(0, 256, size // shape[0], np.uint8).tobytes())
    return np.memmap(path, np.uint8, "r", shape=shape)


def batches(
    pixels: np.ndarray,
    crop: tuple[int, int],
    batch_size: int,
    num_threads: int,
    seed: int = 0,
    as_float: bool = False,
) -> Batches:
    """Random crops of memory-mapped uint8 images (N, H, W, C), copied into batches.

    Args:
        pixels: of the images.
        crop: height and width in pixels.
        batch_size: images per batch.
        num_threads: threads that copy.
        seed: decides the order and the crops.
        as_float: float32 (B, C, height, width) as a model takes it; otherwise the batches stay uint8
            (B, height, width, C): the bytes that any loader of decoded pixels has to touch.
    """
    return Batches(pixels, crop, batch_size, num_threads, seed, as_float)
