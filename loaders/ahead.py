"""Content that is on its way while earlier batches are decoded."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from loaders.index import Content, Index

SAMPLES_AHEAD = 512
"""Asked for ahead of decoding where content comes from a server: at 100 ms, enough for 5,000 a second."""

BYTES_AHEAD = 256 << 20
"""Of large files fewer are asked for."""

T = TypeVar("T")

Begun = Sequence[dict[int, Content]]
"""Of each row of a batch, by side, its content; empty if nothing has begun."""


def begin(rows: np.ndarray, index: Index, sides: Iterable[int]) -> Begun:
    """Begin to read what the rows need of these sides; empty if it lies on this machine."""
    if not index.is_remote:
        return []
    samples, sides = rows["sample"].tolist(), list(sides)
    return [{side: index.begin(sample, side) for side in sides} for sample in samples]


def begun_ahead(
    batches: Iterable[np.ndarray], index: Index, sides: Iterable[int]
) -> Iterator[tuple[np.ndarray, Begun]]:
    """The batches of rows with their content."""
    return in_window(batches, index, lambda _, rows: begin(rows, index, sides))


def in_window(
    batches: Iterable[np.ndarray],
    index: Index,
    enter: Callable[[int, np.ndarray], T],
    num_behind: int = 0,
) -> Iterator[tuple[np.ndarray, T]]:
    """The batches of rows, each with what `enter` made of its number and rows when it could be asked for.

    Where content comes from a server, `num_behind` further batches or more have entered by then, unless they
    are too large.
    """
    waiting: deque[tuple[np.ndarray, T]] = deque()
    for number, rows in enumerate(batches):
        waiting.append((rows, enter(number, rows)))
        while waiting and _are_enough([rows["sample"] for rows, _ in waiting], index, num_behind):
            yield waiting.popleft()
    yield from waiting


def _are_enough(batches: list[np.ndarray], index: Index, num_behind: int) -> bool:
    """Whether no further samples are to be asked for before the first of these batches is decoded."""
    if not index.is_remote:
        return True
    samples = np.concatenate(batches)
    num_bytes = sum(int(headers["num_bytes"][samples].sum()) for headers in index.headers)
    are_many = len(samples) > SAMPLES_AHEAD and len(batches) > num_behind
    return are_many or num_bytes > BYTES_AHEAD
