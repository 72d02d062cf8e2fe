"""Memory of batches on the CPU, which later batches use again."""

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor


class BatchMemory:
    """Pool of uninitialised float32 tensors, for any number of threads.

    New memory costs a page fault for each page, and malloc returns pieces above 32 MB to the system at once. With
    the pool, loading 5-channel TIFFs enlarged to 220x220 (batches of 124 MB) is 1.9 times as fast, by the template's
    `python -m benchmarks alternatives cases=cells`.

    Args:
        max_unused: pieces of each size that are kept for later batches.
    """

    def __init__(self, max_unused: int) -> None:
        self.unused: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=max_unused))

    def empty(self, *shape: int) -> Tensor:
        """Contiguous tensor, whose memory returns to the pool when neither it nor a view of it is left."""
        count = math.prod(shape)
        try:
            piece = self.unused[count].pop()
        except IndexError:
            piece = np.empty(count, np.float32)  # unlike torch, NumPy asks Linux for huge pages
        lent = piece.view()
        weakref.finalize(lent, self.unused[count].append, piece).atexit = False
        return torch.from_numpy(lent).view(shape)
