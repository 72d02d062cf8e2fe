"""Your own Datasets (`data=own data.name=NAME`), in the order of the plan."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.data.own import OwnConfig
from conf.errors import UserError, told
from conf.names import find
from conf.schema import Config
from loaders.batch import Batch, map_leaves, tensors_of
from loaders.info import DataInfo
from loaders.limits import limits_explained
from loaders.loader import Loader
from loaders.own_dataset import OwnData, OwnSamples, SeededDataset
from loaders.plan import Plan
from loaders.targets import Target
from loaders.workers import data_loader


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader; see `loaders.build_loaders()`."""
    train, val = _split_of(cfg, "train"), _split_of(cfg, "val")
    train_loader = own_loader("train", train, cfg, device, rank, world_size)
    val_loader = own_loader("val", val, cfg, device, rank, world_size)
    line = f"{_name(cfg)}: {len(train.dataset):,} training and {len(val.dataset):,} validation "
    line += "samples" + (f", {train.target.describe()}" if train.target else "")
    train_loader.info.description = (line, *train_loader.info.description)
    return train_loader, val_loader


def open_split(cfg: Config, split: str) -> OwnData | None:
    """Return a split of the Datasets of `data.name`: `train`, `val`, `test` or, of `predict.py
    data.root=...`, `new`; None if there is none.

    Raises:
        UserError: the function is missing, finds no files or returns something else.
    """
    if cfg.loader.name != "pytorch":
        raise UserError(
            f"loader.name={cfg.loader.name} is for images; with data=own use loader=pytorch"
        )
    function = find("loaders.own", _name(cfg), "data.name")
    try:
        with limits_explained():
            data = function(cfg.data, split)
    except FileNotFoundError as error:
        raise UserError(
            f"data.name={_name(cfg)} data.root={cfg.data.root}: {told(error)}"
        ) from error
    if data is not None and not isinstance(data, OwnData):
        raise UserError(
            f"the function of data.name={_name(cfg)} returned {type(data).__name__} for "
            f"split={split}; return OwnData(dataset), or None if there is no such split"
        )
    return data


def _split_of(cfg: Config, split: str) -> OwnData:
    data = open_split(cfg, split)
    if data is None:
        raise UserError(
            f"the function of data.name={_name(cfg)} returned None for split={split}; return "
            "OwnData(dataset) for train and val"
        )
    return data


def own_loader(
    split: str, data: OwnData, cfg: Config, device: torch.device, rank: int, world_size: int
) -> Loader:
    """Build the loader of a split; without worker processes, this process loads its batches when
    they are asked for."""
    name = f"{_name(cfg)}/{split}"
    samples = OwnSamples(name, len(data.dataset), cfg.seed, split == "train")
    plan = Plan(samples, cfg, rank, world_size)
    dataset = SeededDataset(data, samples, cfg.data.on_error == "skip")
    workers = cfg.loader.num_workers or 0, cfg.loader.prefetch_factor
    batches = data_loader(dataset, plan, *workers, device.type == "cuda")
    transform = partial(_on_device, name=name, target=data.target, cfg=cfg, device=device)
    return Loader(plan, batches, transform, _info(plan, dataset, data), device)


def _on_device(
    batch: Batch, name: str, target: Target | None, cfg: Config, device: torch.device
) -> tuple[Any, Any]:
    """Move a batch to the device."""
    if target is not None and target.kind == "labels":
        _check_labels(name, batch.rows, batch.content[1], len(target.classes))
    inputs, targets = map_leaves(partial(_moved, device=device), batch.content)
    if cfg.loader.channels_last:
        inputs = map_leaves(_channels_last, inputs)
    return inputs, targets


def _info(plan: Plan, dataset: SeededDataset, data: OwnData) -> DataInfo:
    """Return the facts that follow from the first sample.

    Raises:
        UserError: it is not a pair of inputs and targets that can be split and moved to a device.
    """
    name = dataset.name
    batch = dataset.__getitems__(plan.rows(np.arange(1), 0))
    if batch.error is not None:
        raise batch.error
    if not isinstance(batch.content, tuple | list) or len(batch.content) != 2:
        raise UserError(
            f"{name}: an item is {type(batch.content).__name__}, not a pair; return (inputs, "
            "targets) from __getitem__ or collate_fn"
        )
    inputs = batch.content[0]
    if any(x.dtype == torch.float64 for x in tensors_of(inputs)):
        raise UserError(
            f"{name}: the inputs of sample {batch.rows['sample'][0]} are float64, which models do "
            "not take; return float32, such as array.astype('float32')"
        )
    first = next(tensors_of(inputs), torch.zeros(0))
    shapes = [
        f"{'x'.join(map(str, each.shape[1:]))} {str(each.dtype).removeprefix('torch.')}".strip()
        for each in tensors_of(inputs)
    ]
    counts = None
    if data.target is not None and len(data.target.values):
        counts = data.target.class_counts()
    return DataInfo(
        description=(f"inputs: {', '.join(shapes)} of the first sample",),
        target=data.target,
        in_channels=first.shape[1] if first.ndim == 4 else 1,
        dtype=str(first.dtype).removeprefix("torch."),
        num_samples=len(plan.samples),
        num_dropped=len(plan.samples) - plan.num_rows,
        example=inputs,
        name_of=data.name_of,
        pictures=pictures,
        class_counts=None if counts is None else lambda: counts,
    )


def pictures(inputs: Any) -> Tensor | None:
    """Scale the first tensor of the inputs to [0, 1]; None unless it is (B, 1 or 3, H, W)."""
    first = next(tensors_of(inputs), torch.zeros(0))
    if first.ndim != 4 or first.shape[1] not in (1, 3):
        return None
    first = first.float()
    low, high = first.amin(), first.amax()
    return (first - low) / (high - low).clamp(min=1e-6)


def _check_labels(name: str, rows: np.ndarray, labels: Any, num_classes: int) -> None:
    """Raise UserError for labels (B,) that are no classes: a GPU would not name the sample."""
    if not isinstance(labels, Tensor) or labels.ndim != 1:
        return
    wrong = (labels < 0) | (labels >= num_classes)
    if labels.dtype != torch.int64 or wrong.any():
        number = int(wrong.int().argmax())
        raise UserError(
            f"{name}: sample {rows['sample'][number]} has the label {labels[number].item()} of "
            f"{str(labels.dtype).removeprefix('torch.')}; return int64 from 0 to {num_classes - 1}"
        )


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()
    return value.to(memory_format=torch.channels_last) if is_image else value


def _name(cfg: Config) -> str:
    assert isinstance(cfg.data, OwnConfig)
    return str(cfg.data.name)
