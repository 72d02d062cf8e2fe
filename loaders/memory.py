"""Memory of batches on the CPU, which is used again."""

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor


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

    def empty(self, shape: tuple[int, ...], memory_format: torch.memory_format) -> Tensor:
        """Return a tensor (B, C, H, W), whose memory returns to the pool when neither it nor a view
        of it is left."""
        count = math.prod(shape)
        try:
            piece = self.unused[count].pop()
        except IndexError:
            piece = np.empty(count, np.float32)  # unlike torch, NumPy asks Linux for huge pages
        lent = piece.view()
        weakref.finalize(lent, self.unused[count].append, piece).atexit = False
        if memory_format == torch.contiguous_format:
            return torch.from_numpy(lent).view(shape)
        batch, channels, height, width = shape
        return torch.from_numpy(lent).view(batch, height, width, channels).permute(0, 3, 1, 2)
