"""Your own Datasets (`data=own data.name=NAME`), in the order of the plan."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from conf.errors import UserError, told
from conf.names import find
from conf.schema import Config
from loaders.batch import Batch, map_leaves, tensors_of
from loaders.index import BadFileError
from loaders.loader import DataInfo, Loader
from loaders.order import Order
from loaders.plan import Plan, Samples
from loaders.targets import Target, check_rounding
from loaders.workers import data_loader


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


class OwnSamples(Samples, Dataset[Batch]):
    """A Dataset's samples, and the batches of rows.

    Python, NumPy and torch are seeded by (seed, pass, sample) before a sample is loaded, so random
    transforms draw the same numbers in any process. A `BadFileError` of the Dataset is a bad
    sample; the traceback of other errors shows the line.
    """

    def __init__(self, name: str, data: OwnData, cfg: Config, train: bool) -> None:
        super().__init__(name, Order(), cfg, train)
        # Without the targets, of which worker processes have no need.
        self.dataset, self.collate_fn = data.dataset, data.collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: np.ndarray) -> Batch:
        # The generators of this process draw dropout masks, too.
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        rows, bad = rows.copy(), dict[int, str]()
        try:
            items = [self.load(rows, number, self._item, bad) for number in range(len(rows))]
            is_good = ~np.isin(rows["sample"], [*bad])
            items = [item for item, good in zip(items, is_good, strict=True) if good]
            return Batch(rows[is_good], self.collate_fn(items) if items else None, bad)
        except UserError as error:
            return Batch(rows, None, error=error)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def _item(self, number: int, row: np.void) -> Any:
        sample = int(row["sample"])
        sequence = np.random.SeedSequence((self.seed, int(row["pass"]), sample))
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
        try:
            return self.dataset[sample]
        except BadFileError as error:
            raise BadFileError(
                f"{self.name}: sample {sample} cannot be loaded ({error})"
            ) from error


class OwnLoader(Loader):
    """The loader of a split: `train`, `val`, `test` or, for `predict.py data.root=...`, `new`.
    Without worker processes, this process loads its batches when they are asked for.

    Raises:
        UserError: there is no such split, or its samples do not fit the configuration.
    """

    def __init__(
        self, cfg: Config, split: str, device: torch.device, rank: int, world_size: int
    ) -> None:
        name = str(cfg.data.name)
        if cfg.loader.name != "pytorch":
            raise UserError(
                f"loader.name={cfg.loader.name} is for images; with data=own use loader=pytorch"
            )
        function = find("loaders.own", name, "data.name")
        try:
            data = function(cfg.data, split)
        except FileNotFoundError as error:
            raise UserError(f"data.name={name} data.root={cfg.data.root}: {told(error)}") from error
        if not isinstance(data, OwnData):
            raise UserError(
                f"data.name={name} has no split={split}: its function returned "
                f"{type(data).__name__}; return OwnData(dataset), or use split=val"
            )
        if data.target is not None and split == "train":
            check_rounding(data.target)
        samples = OwnSamples(f"{name}/{split}", data, cfg, split == "train")
        plan = Plan(samples, cfg, rank, world_size)
        batches = data_loader(samples, plan, cfg.loader.num_workers or 0, cfg, device)

        def to_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(device, non_blocking=True)
            if cfg.loader.channels_last and value.ndim == 4 and value.is_floating_point():
                return value.contiguous(memory_format=torch.channels_last)
            return value

        def transform(batch: Batch) -> tuple[Any, Any]:
            inputs, targets = batch.content
            if data.target is not None and data.target.kind == "labels":
                _check_labels(samples.name, batch.rows, targets, len(data.target.classes))
            return map_leaves(to_device, inputs), map_leaves(to_device, targets)

        super().__init__(plan, batches, transform, _info(plan, data, split), device)


def _check_labels(name: str, rows: np.ndarray, labels: Tensor, num_classes: int) -> None:
    """Raise UserError for labels (B,) that are no classes: a GPU would not name the sample."""
    is_wrong = (labels < 0) | (labels >= num_classes) | (labels.dtype != torch.int64)
    if is_wrong.any():
        place = tuple(is_wrong.nonzero()[0].tolist())
        raise UserError(
            f"{name}: sample {rows['sample'][place[0]]} has the label {labels[place].item()} of "
            f"{labels.dtype}; return int64 from 0 to {num_classes - 1}"
        )


def _info(plan: Plan, data: OwnData, split: str) -> DataInfo:
    """Return the facts that follow from the first good sample; raise UserError if it is no pair."""
    samples: Any = copy.copy(plan.samples)
    samples.train = True  # the next sample takes the place of a bad one
    first = np.zeros(1, np.int64)
    batch = samples.__getitems__(samples.rows(0, first, first))
    if batch.error is not None and split != "new":  # of which bad samples are part of the result
        raise batch.error
    pair = (None, None) if batch.error is not None else batch.content
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(
            f"{samples.name}: an item is {type(pair).__name__}, not a pair; return (inputs, "
            "targets) from __getitem__ or collate_fn"
        )
    inputs, target = pair[0], data.target
    tensors = tensors_of(inputs)
    image = tensors[0] if tensors else torch.zeros(0)
    shapes = ", ".join(f"{[*each.shape[1:]]} {each.dtype}" for each in tensors)
    return DataInfo(
        description=(f"inputs: {shapes} of the first sample",) if split == "train" else (),
        target=target,
        in_channels=image.shape[1] if image.ndim == 4 else 1,
        dtype=str(image.dtype).removeprefix("torch."),
        num_samples=len(samples),
        num_dropped=len(samples) - plan.num_rows,
        example=inputs,
        name_of=data.name_of,
        pictures=pictures,
        class_counts=lambda: target.class_counts() if target else None,
    )


def pictures(inputs: Any) -> Tensor | None:
    """Scale the first tensor of the inputs to [0, 1]; None unless it is (B, 1 or 3, H, W)."""
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim != 4 or tensors[0].shape[1] not in (1, 3):
        return None
    first = tensors[0].float()
    low, high = first.amin(), first.amax()
    return (first - low) / (high - low).clamp(min=1e-6)
