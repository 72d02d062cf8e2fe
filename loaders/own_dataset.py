"""Your own Datasets as samples of the plan: what a function in `loaders/own/` returns, and the
Dataset that reads its rows, whose random numbers depend on seed, epoch and sample alone."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from conf.errors import UserError, told
from loaders.batch import Batch, map_leaves
from loaders.index import BadFileError
from loaders.order import stream_key, uniform
from loaders.plan import MOST_BAD, Samples
from loaders.targets import Target

ROW = np.dtype(
    [
        ("position", "i8"),  # in the epoch, from 0
        ("epoch", "i8"),  # whose random numbers these are
        ("sample", "i8"),  # position in the Dataset
        ("seed", "u4"),  # of the sample's own random numbers in this epoch
    ]
)


def collate(items: Sequence[Any]) -> Any:
    """Collate by `default_collate`; tuples stay tuples, since a list has one entry per sample."""
    first = items[0]
    if isinstance(first, dict):
        return {key: collate([item[key] for item in items]) for key in first}
    if isinstance(first, str | bytes):
        return list(items)
    if isinstance(first, tuple | list):
        values = map(collate, zip(*items, strict=True))
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    return default_collate(list(items))


class OwnData(NamedTuple):
    """A split of your own data, which a function in `loaders/own/` returns."""

    dataset: Any
    """Map-style Dataset, whose items are `(inputs, targets)`: tensors, numbers, texts, or dicts and
    tuples of these."""

    target: Target | None = None
    """Kind of the targets; None: the task has to say its number of outputs itself."""

    collate_fn: Callable[[Sequence[Any]], Any] = collate
    """Makes `(inputs, targets)` of a batch of a list of items."""

    name_of: Callable[[int], str] = "sample {}".format
    """Name of a sample, for messages and tables."""


class OwnSamples(Samples):
    """The samples of a Dataset; a row has the seed of a sample's random numbers."""

    def __init__(self, name: str, count: int, seed: int, train: bool) -> None:
        self.name, self.count, self.seed, self.train = name, count, seed, train

    def __len__(self) -> int:
        return self.count

    def rows(self, positions: np.ndarray, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Return rows of dtype `ROW`."""
        rows = np.zeros(len(positions), ROW)
        rows["position"], rows["epoch"], rows["sample"] = positions, epoch, samples
        numbers = uniform(samples, stream_key("own", self.seed, epoch), 1)
        rows["seed"] = (numbers[:, 0] * 2**32).astype(np.uint32)
        return rows


class SeededDataset(Dataset[Batch]):
    """Dataset whose items are batches of rows; each row's seed is set in Python, NumPy and torch.

    So ordinary random transforms draw the same numbers in any process. The generators of the
    calling process, which draw dropout masks, are left as they were. A `BadFileError` of the
    Dataset is a bad sample; other errors are not caught: their traceback shows the line.
    """

    def __init__(self, data: OwnData, samples: OwnSamples, skips: bool) -> None:
        self.data, self.samples, self.skips, self.name = data, samples, skips, samples.name

    def __getitems__(self, rows: np.ndarray) -> Batch:
        """Load a batch. A bad sample ends the run or, with `data.on_error=skip`, is replaced by the
        next one of the Dataset; in evaluation it is left out."""
        rows, items, good = rows.copy(), [], np.ones(len(rows), bool)
        bad: dict[int, str] = {}
        with _generators_kept():
            try:
                for number in range(len(rows)):
                    try:
                        items.append(self._item(rows, number, bad))
                    except BadFileError:
                        if not self.skips or self.samples.train:
                            raise
                        good[number] = False
            except BadFileError as error:
                return Batch(rows, None, error=error)
            rows = rows[good]
            try:
                return Batch(rows, self.data.collate_fn(items) if items else None, bad)
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                shapes = self._shapes(rows["sample"].tolist(), items)
                misfit = UserError(
                    f"{self.name}: the samples do not form a batch ({told(error)}): {shapes}; "
                    "return dicts, tuples and tensors of the same shape, or a collate_fn"
                )
                return Batch(rows, None, error=misfit)

    def _item(self, rows: np.ndarray, number: int, bad: dict[int, str]) -> Any:
        """Return the item of a row; of a training sample that is bad, that of the next good one,
        which becomes the row.

        Raises:
            BadFileError: it is bad, and not replaced.
        """
        tries = min(MOST_BAD, len(self.samples)) if self.skips and self.samples.train else 1
        while True:
            row = rows[number]
            sample, seed = int(row["sample"]), int(row["seed"])
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
            try:
                return self.data.dataset[sample]
            except BadFileError as error:
                tries -= 1
                bad[sample] = f"{self.name}: sample {sample} cannot be loaded ({error})"
                if tries == 0:
                    raise BadFileError(bad[sample]) from error
                rows[number] = self.samples.substitute(row)

    def _shapes(self, samples: list[int], items: list[Any]) -> str:
        """Describe the first sample, and the first that has another shape."""
        shapes = [str(map_leaves(_shape_of, item)) for item in items]
        other = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), 0)
        described = f"sample {samples[0]} is {shapes[0]}"
        if other:
            described += f", sample {samples[other]} is {shapes[other]}"
        return described


def _shape_of(value: Any) -> str:
    """Return `float32 (3, 32, 32)` of a tensor or an array, else the name of the type."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
