"""Memory of batches on the CPU: a pool for reuse, and parts that fit into the cache."""

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 4 << 20


class BatchMemory:
    """Pool of uninitialised float32 tensors, for any number of threads.

    New memory costs a page fault for each page, and malloc returns pieces above 32 MB to the system
    at once. With the pool, loading 5-channel TIFFs enlarged to 220x220 (batches of 124 MB) is 1.9
    times as fast, by the template's `python -m benchmarks alternatives cases=cells`.

    Args:
        max_unused: number of unused pieces of each size that are kept.
    """

    def __init__(self, max_unused: int) -> None:
        self.unused: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=max_unused))

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return a contiguous tensor, whose memory returns to the pool when neither it nor a view
        of it is left."""
        count = math.prod(shape)
        try:
            piece = self.unused[count].pop()
        except IndexError:
            piece = np.empty(count, np.float32)  # unlike torch, NumPy asks Linux for huge pages
        lent = piece.view()
        weakref.finalize(lent, self.unused[count].append, piece).atexit = False
        return torch.from_numpy(lent).view(shape)


def parts(images: Tensor) -> list[slice]:
    """Return the slices that make up a batch.

    On a GPU it is one slice. On a CPU each has few enough images that intermediate results stay in
    the cache and below 32 MB, from which on malloc asks the system for memory each time.
    """
    size = len(images)
    if images.is_cpu:
        size = max(1, PART_BYTES * size // images.nbytes)
    return [slice(start, start + size) for start in range(0, len(images), size)]
