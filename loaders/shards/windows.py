"""The order of an epoch that needs few shards at a time (`data.shuffle=window`): the shards are
shuffled, then the samples within windows of them. The memory is O(number of shards)."""

from functools import lru_cache

import numpy as np

from loaders.epoch import random_permutation, stream_key
from loaders.shards.files import Shards


def block_shuffle(
    positions: np.ndarray, shards: Shards, num_shards: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the samples at these positions of an epoch, (len(positions),) int64.

    Args:
        positions: each in [0, number of samples), in any order.
        shards: shards of the samples.
        num_shards: number of shards in a window; the last window may have fewer.
        seed, epoch: choose the order.
    """
    shard_order, begins, windows = _shard_order(shards, num_shards, seed, epoch)
    window_of = np.searchsorted(windows, positions, side="right") - 1
    mixed = np.empty(len(positions), np.int64)
    for window in np.unique(window_of).tolist():
        inside, first = window_of == window, windows[window]
        key, count = stream_key("window", seed, epoch, window), int(windows[window + 1] - first)
        mixed[inside] = first + random_permutation(positions[inside] - first, count, key)
    place = np.searchsorted(begins, mixed, side="right") - 1
    return shards.order[shards.starts[shard_order[place]] + mixed - begins[place]]


def next_shards(position: int, shards: Shards, num_shards: int, seed: int, epoch: int) -> list[int]:
    """Return the shards of the next window to fetch now: the same share of it as is used of the
    current window."""
    shard_order, _, windows = _shard_order(shards, num_shards, seed, epoch)
    window = int(np.searchsorted(windows, position, side="right")) - 1
    share = (position - windows[window]) / (windows[window + 1] - windows[window])
    following = shard_order[num_shards * (window + 1) :][:num_shards]
    return following[: int(np.ceil(share * len(following)))].tolist()


@lru_cache(maxsize=4)
def _shard_order(
    shards: Shards, num_shards: int, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the S shards in the epoch's order, and the positions at which each of them and each
    window begins, both with the end."""
    count = len(shards.starts) - 1
    shard_order = random_permutation(np.arange(count), count, stream_key("shard", seed, epoch))
    begins = np.concatenate([[0], np.cumsum(np.diff(shards.starts)[shard_order])])
    return shard_order, begins, np.append(begins[:-1:num_shards], begins[-1])
