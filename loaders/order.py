"""Random numbers and orders by position: any slice of them, at a cost in proportion to its length.

They mix a counter with a key as SplitMix64 does (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"): no number depends on how many were drawn before it.
"""

import zlib
from functools import lru_cache

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)
HALF_ROUNDS = 16  # with fewer, the orders of five samples are not equally likely


@lru_cache(maxsize=64)
def stream_key(name: str, *numbers: int) -> np.uint64:
    """Return the key of the random stream of a name and numbers (each 0 or more)."""
    sequence = np.random.SeedSequence([zlib.crc32(name.encode()), *numbers])
    return np.uint64(sequence.generate_state(1, np.uint64)[0])


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash values, (...) uint64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(positions: np.ndarray, key: np.uint64, num: int) -> np.ndarray:
    """Return random numbers in [0, 1) for each position, (len(positions), num) float64."""
    columns = np.arange(num, dtype=np.uint64)
    counters = positions.astype(np.uint64)[:, None] * np.uint64(num) + columns
    return (_mix(key + counters * GAMMA) >> np.uint64(11)) * 2.0**-53


def random_permutation(positions: np.ndarray, count: int, key: np.uint64) -> np.ndarray:
    """Return the values at these positions of a permutation of range(count), (len(positions),)
    int64.

    A Feistel network permutes a rectangle of at least `count` cells, whose sides need not be powers
    of two; values outside of [0, count) are permuted again (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains").
    """
    side = np.uint64(max(1, int(np.ceil(np.sqrt(count)))))
    other = np.uint64(-(-count // int(side)))
    keys = _mix(key + np.arange(1, HALF_ROUNDS + 1, dtype=np.uint64) * GAMMA)
    places = positions.astype(np.uint64)
    outside = np.arange(len(places))
    while len(outside):
        left, right = np.divmod(places[outside], other)
        for half_round in range(0, HALF_ROUNDS, 2):
            left = (left + _mix(keys[half_round] ^ right) % side) % side
            right = (right + _mix(keys[half_round + 1] ^ left) % other) % other
        places[outside] = left * other + right
        outside = outside[places[outside] >= count]
    return places.astype(np.int64)


class Order:
    """The order of the samples of a split in training; `order_name` changes with it, and is in
    checkpoints: one with another order cannot resume within an epoch."""

    order_name = f"shuffled() of {HALF_ROUNDS} half rounds"

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at these positions of an epoch of `count` samples."""
        return random_permutation(positions, count, stream_key("sample", seed, epoch))

    def following(self, sample: int, count: int) -> int:
        """Return the sample that stands in for one that cannot be decoded."""
        return (sample + 1) % count

    def fetch(self, rows: np.ndarray, seed: int, train: bool) -> None:
        """Wait until the samples of rows can be read, and begin to fetch what follows them."""
