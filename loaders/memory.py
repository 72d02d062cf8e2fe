"""Memory of batches that nobody uses any more, used again for later ones on the CPU.

Untouched memory costs a page fault every 4 KB, and malloc never keeps pieces above 32 MB. Used again,
they make `loader=pytorch` 1.1 to 1.2 times as fast on two cores, side by side on the data of the template's
`benchmarks alternatives cases=cells global_batch_size=256`, whose batches take 250 MB; below 32 MB, nothing.
"""

import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor


class BatchMemory:
    """Hands out uninitialised tensors; several threads may ask for some.

    A tensor's memory comes back when no tensor refers to it any more, views and those that autograd
    saved included: all of these hold on to the array that the tensor was made of.

    Args:
        most_kept: unused pieces of each size that are kept.
    """

    def __init__(self, most_kept: int) -> None:
        self.unused: dict[int, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=most_kept))

    def empty(self, shape: tuple[int, ...], memory_format: torch.memory_format) -> Tensor:
        """Float32 of shape (B, C, H, W)."""
        batch, channels, height, width = shape
        count = batch * channels * height * width
        try:
            piece = self.unused[count].pop()
        except IndexError:
            piece = np.empty(count, np.float32)  # NumPy asks for large pages
        lent = piece.view()
        weakref.finalize(lent, self.unused[count].append, piece).atexit = False
        if memory_format == torch.contiguous_format:
            return torch.from_numpy(lent).view(shape)
        return torch.from_numpy(lent).view(batch, height, width, channels).permute(0, 3, 1, 2)
