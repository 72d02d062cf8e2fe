"""Batches that worker processes read from a server: with each of them comes which later ones to begin."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from loaders.ahead import Begun, begin, in_window
from loaders.execute import Executed, PlannedImages
from loaders.sampler import PlanSampler


class Turn(NamedTuple):
    """What a worker gets for a batch."""

    number: int
    """Of the batch in the walk through the epoch."""
    rows: np.ndarray
    to_begin: dict[int, np.ndarray]
    """By number, the rows of the batches, perhaps this one, that the worker begins to read before."""


class TurnSampler:
    """Batch sampler of a DataLoader, which gives batch k to worker k % `num_workers`.

    All workers together ask for as much ahead as `loaders.ahead` allows, but each for its next batch at least.
    """

    def __init__(self, sampler: PlanSampler, num_workers: int) -> None:
        self.sampler, self.num_workers = sampler, num_workers

    def __iter__(self) -> Iterator[Turn]:
        to_begin: list[dict[int, np.ndarray]] = [{} for _ in range(self.num_workers)]

        def note(number: int, rows: np.ndarray) -> None:
            to_begin[number % self.num_workers][number] = rows

        window = in_window(self.sampler, self.sampler.index, note, self.num_workers)
        for number, (rows, _) in enumerate(window):
            worker = number % self.num_workers
            yield Turn(number, rows, to_begin[worker])
            to_begin[worker] = {}


class TurnDataset(Dataset[Executed]):
    """Item `turn` is the batch of its rows, whose content is on its way while earlier ones are decoded."""

    def __init__(self, images: PlannedImages) -> None:
        self.images = images
        self.begun: dict[int, Begun] = {}
        """By number, of batches whose turn comes later."""

    def __getitems__(self, turn: Turn) -> Executed:
        if turn.number in turn.to_begin:
            self.begun.clear()  # what an epoch that was left early has begun
        for number, rows in turn.to_begin.items():
            self.begun[number] = begin(rows, self.images.index, self.images.sizes)
        return self.images.__getitems__(turn.rows, self.begun.pop(turn.number))
