"""A shuffled order that needs few shards at a time: shards are shuffled, then samples within windows of them.

Like `randomness.shuffled`, it is a function of a position. What is kept of an epoch is as large as the number
of shards.
"""

from functools import lru_cache

import numpy as np

from loaders.randomness import key_of, shuffled
from loaders.shards import Shards


def in_windows(
    positions: np.ndarray, shards: Shards, num_shards: int, seed: int, epoch: int
) -> np.ndarray:
    """(len(positions),) int64: the samples at these positions of an epoch.

    Args:
        positions: each in [0, number of samples), in any order.
        shards: in which the samples lie.
        num_shards: of a window; the last one has the rest.
        seed, epoch: with the position, all that the order depends on.
    """
    turns, begins = _turns(shards, seed, epoch)
    windows = _windows(begins, num_shards)
    window_of = np.searchsorted(windows, positions, side="right") - 1
    mixed = np.empty(len(positions), np.int64)
    for window in np.unique(window_of).tolist():
        inside, first = window_of == window, windows[window]
        key, count = key_of("window", seed, epoch, window), int(windows[window + 1] - first)
        mixed[inside] = first + shuffled(positions[inside] - first, count, key)
    turn = np.searchsorted(begins, mixed, side="right") - 1
    return np.asarray(shards.order[shards.starts[turns[turn]] + mixed - begins[turn]])


def fetch_ahead(position: int, shards: Shards, num_shards: int, seed: int, epoch: int) -> None:
    """Let the cache fetch as much of the window behind that of a position as of this one is used."""
    turns, begins = _turns(shards, seed, epoch)
    windows = _windows(begins, num_shards)
    window = int(np.searchsorted(windows, position, side="right")) - 1
    share = (position - windows[window]) / (windows[window + 1] - windows[window])
    following = turns[num_shards * (window + 1) :][:num_shards]
    for shard in following[: int(np.ceil(share * len(following)))]:
        shards.fetch(int(shard))


def _windows(begins: np.ndarray, num_shards: int) -> np.ndarray:
    """The positions at which each window begins, and the end."""
    return np.append(begins[:-1:num_shards], begins[-1])


@lru_cache(maxsize=4)
def _turns(shards: Shards, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(S,) the shards in the epoch's order; (S + 1,) the positions at which each begins, and the end."""
    count = len(shards.starts) - 1
    turns = shuffled(np.arange(count), count, key_of("shard", seed, epoch))
    return turns, np.concatenate([[0], np.cumsum(np.diff(shards.starts)[turns])])
