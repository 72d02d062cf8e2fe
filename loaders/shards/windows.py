"""The order of an epoch that needs few shards at a time (`data.shuffle=window`): the shards are
shuffled, then the samples within windows of them. The memory is O(number of shards)."""

import numpy as np

from loaders.order import random_permutation, stream_key


class Windows:
    """The S shards of a split in the order of an epoch, in windows of `size`; the last one may have
    fewer.

    Args:
        starts: (S + 1,) int64: number of samples stored before each shard, and of all.
        size: number of shards in a window.
        seed, epoch: choose the order.
        train: shuffle; else the shards are read as they are stored.
    """

    def __init__(
        self, starts: np.ndarray, size: int, seed: int, epoch: int, train: bool = True
    ) -> None:
        self.starts, self.size, self.seed, self.epoch = starts, size, seed, epoch
        count = len(starts) - 1
        self.shards = np.arange(count)
        if train:
            key = stream_key("shard", seed, epoch)
            self.shards = random_permutation(self.shards, count, key)
        # Positions in the epoch at which each shard and each window begins, and the end.
        self.begins = np.concatenate([[0], np.cumsum(np.diff(starts)[self.shards])])
        self.bounds = np.append(self.begins[:-1:size], self.begins[-1])

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the window of each position."""
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def between(self, first: int, end: int) -> list[int]:
        """Return the shards of the windows from `first` on, before `end`."""
        return self.shards[self.size * max(0, first) : self.size * end].tolist()

    def shuffled(self, positions: np.ndarray) -> np.ndarray:
        """Return how many samples are stored before those at these positions of the epoch."""
        window_of = self.at(positions)
        mixed = np.empty(len(positions), np.int64)
        for window in np.unique(window_of).tolist():
            inside = window_of == window
            first, end = self.bounds[window : window + 2].tolist()
            key = stream_key("window", self.seed, self.epoch, window)
            mixed[inside] = first + random_permutation(positions[inside] - first, end - first, key)
        place = np.searchsorted(self.begins, mixed, side="right") - 1
        return self.starts[self.shards[place]] + mixed - self.begins[place]
