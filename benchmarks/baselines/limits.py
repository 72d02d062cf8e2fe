"""Upper limit of any pipeline on these cores: decoding alone, by threads.

Unlike the other baselines, it yields lists of arrays of different sizes, endlessly.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg

from benchmarks.baselines import Job


def decode(job: Job) -> Iterator[tuple[list[np.ndarray], ...]]:
    """Decoded files in batches, targets apart from inputs; an epoch is decoded ahead."""
    columns = [job.files, job.targets] if job.targets else [job.files]
    with ThreadPoolExecutor(job.parallel) as pool:
        while True:
            samples = pool.map(decode_files, zip(*columns, strict=True))
            for _ in range(len(job.files) // job.batch_size):
                batch = itertools.islice(samples, job.batch_size)
                yield tuple(list(column) for column in zip(*batch, strict=True))


def decode_files(paths: tuple[str, ...]) -> list[np.ndarray]:
    """JPEGs decoded to uint8 (H, W, 3)."""
    return [simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB") for path in paths]
