"""Your own Datasets (`data=own data.name=NAME`), in the order of the plan."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from loaders.info import DataInfo
from loaders.loader import Loader
from loaders.order import stream_key, uniform
from loaders.plan import Plan, Samples
from loaders.targets import Target
from loaders.workers import data_loader

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


class OwnSamples(Samples, Dataset[Batch]):
    """A Dataset's samples, whose rows have a seed each, and the batches of rows.

    The seed is set in Python, NumPy and torch before a sample is loaded, so ordinary random
    transforms draw the same numbers in any process. A `BadFileError` of the Dataset is a bad
    sample; other errors are not caught: their traceback shows the line.
    """

    def __init__(self, name: str, data: OwnData, cfg: Config, train: bool) -> None:
        self.name, self.data, self.train = name, data, train
        self.seed, self.skips = cfg.seed, cfg.data.on_error == "skip"

    def __len__(self) -> int:
        return len(self.data.dataset)

    def rows(self, positions: np.ndarray, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Return rows of dtype `ROW`."""
        rows = np.zeros(len(positions), ROW)
        rows["position"], rows["epoch"], rows["sample"] = positions, epoch, samples
        numbers = uniform(samples, stream_key("own", self.seed, epoch), 1)
        rows["seed"] = (numbers[:, 0] * 2**32).astype(np.uint32)
        return rows

    def __getitems__(self, rows: np.ndarray) -> Batch:
        rows, bad = rows.copy(), dict[int, str]()
        with _generators_kept():
            try:
                items = [self.load(rows, n, self._item, bad) for n in range(len(rows))]
            except UserError as error:
                return Batch(rows, None, error=error)
            is_good = ~np.isin(rows["sample"], [*bad])
            items = [item for item, good in zip(items, is_good, strict=True) if good]
            return Batch(rows[is_good], self.data.collate_fn(items) if items else None, bad)

    def _item(self, number: int, row: np.void) -> Any:
        sample, seed = int(row["sample"]), int(row["seed"])
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
        try:
            return self.data.dataset[sample]
        except BadFileError as error:
            raise BadFileError(
                f"{self.name}: sample {sample} cannot be loaded ({error})"
            ) from error


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the generators of the process, which draw dropout masks, as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader; see `loaders.build_loaders()`."""
    train, val = (own_loader(split, cfg, device, rank, world_size) for split in ("train", "val"))
    line = f"{cfg.data.name}: {train.info.num_samples:,} training and {val.info.num_samples:,} "
    line += "validation samples"
    if train.info.target:
        line += f", {train.info.target.describe()}"
    train.info.description = (line, *train.info.description)
    return train, val


def own_loader(split: str, cfg: Config, device: torch.device, rank: int, world_size: int) -> Loader:
    """Build the loader of a split: `train`, `val`, `test` or, for `predict.py data.root=...`,
    `new`. Without worker processes, this process loads its batches when they are asked for.

    Raises:
        UserError: there is no such split, or its samples do not fit the configuration.
    """
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
            f"data.name={name} has no split={split}: its function returned {type(data).__name__}; "
            "return OwnData(dataset), or use split=val"
        )
    samples = OwnSamples(f"{name}/{split}", data, cfg, split == "train")
    plan = Plan(samples, cfg, rank, world_size)
    workers = cfg.loader.num_workers or 0, cfg.loader.prefetch_factor
    batches = data_loader(samples, plan, *workers, device.type == "cuda")

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(device, non_blocking=True)
        if cfg.loader.channels_last and value.ndim == 4 and value.is_floating_point():
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def to_device(batch: Batch) -> tuple[Any, Any]:
        inputs, targets = batch.content
        if data.target is not None and data.target.kind == "labels":
            _check_labels(samples.name, batch.rows, targets, len(data.target.classes))
        return map_leaves(move, inputs), map_leaves(move, targets)

    return Loader(plan, batches, to_device, _info(plan, samples), device)


def _check_labels(name: str, rows: np.ndarray, labels: Tensor, num_classes: int) -> None:
    """Raise UserError for labels (B,) that are no classes: a GPU would not name the sample."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if labels.dtype != torch.int64 or len(wrong):
        number = wrong[0] if len(wrong) else 0
        raise UserError(
            f"{name}: sample {rows['sample'][number]} has the label {labels[number].item()} of "
            f"{labels.dtype}; return int64 from 0 to {num_classes - 1}"
        )


def _info(plan: Plan, samples: OwnSamples) -> DataInfo:
    """Return the facts that follow from the first sample.

    Raises:
        UserError: it is not a pair of inputs and targets, or models do not take its inputs.
    """
    batch = samples.__getitems__(plan.rows(np.arange(1), 0))
    if batch.error is not None:
        raise batch.error
    if not isinstance(batch.content, tuple | list) or len(batch.content) != 2:
        raise UserError(
            f"{samples.name}: an item is {type(batch.content).__name__}, not a pair; return "
            "(inputs, targets) from __getitem__ or collate_fn"
        )
    inputs, target = batch.content[0], samples.data.target
    tensors = tensors_of(inputs)
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        raise UserError(
            f"{samples.name}: inputs are float64, which models do not take; return float32, such "
            "as array.astype('float32')"
        )
    first = tensors[0] if tensors else torch.zeros(0)
    shapes = ", ".join(f"{[*each.shape[1:]]} {each.dtype}" for each in tensors)
    return DataInfo(
        description=(f"inputs: {shapes} of the first sample",),
        target=target,
        in_channels=first.shape[1] if first.ndim == 4 else 1,
        dtype=str(first.dtype).removeprefix("torch."),
        num_samples=len(samples),
        num_dropped=len(samples) - plan.num_rows,
        example=inputs,
        name_of=samples.data.name_of,
        pictures=pictures,
        class_counts=lambda: target.class_counts() if target and len(target.values) else None,
    )


def pictures(inputs: Any) -> Tensor | None:
    """Scale the first tensor of the inputs to [0, 1]; None unless it is (B, 1 or 3, H, W)."""
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim != 4 or tensors[0].shape[1] not in (1, 3):
        return None
    first = tensors[0].float()
    low, high = first.amin(), first.amax()
    return (first - low) / (high - low).clamp(min=1e-6)
