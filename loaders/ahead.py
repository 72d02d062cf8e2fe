"""Content that is on its way while earlier batches are decoded."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from loaders.index import Content, Index

SAMPLES_AHEAD = 512
"""Asked for ahead of decoding where content comes from a server: at 100 ms, enough for 5,000 a second."""

Begun = list[dict[int, Content]]
"""Of each row of a batch, by side, its content."""


def begin(rows: np.ndarray, index: Index, sides: Iterable[int]) -> Begun:
    """Begin to read what the rows need of these sides; empty if the images are in memory already."""
    if not index.files:
        return []
    samples, sides = rows["sample"].tolist(), list(sides)
    return [{side: index.begin(sample, side) for side in sides} for sample in samples]


def begun_ahead(
    batches: Iterable[np.ndarray], index: Index, sides: Iterable[int]
) -> Iterator[tuple[np.ndarray, Begun]]:
    """The batches of rows with their content."""
    waiting: deque[tuple[np.ndarray, Begun]] = deque()
    for rows in batches:
        waiting.append((rows, begin(rows, index, sides)))
        if not index.is_remote or len(waiting) * len(rows) > SAMPLES_AHEAD:
            yield waiting.popleft()
    yield from waiting
