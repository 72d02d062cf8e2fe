"""Batches of ordinary Datasets, in the order of `EpochSampler`."""

from collections.abc import Iterator
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from conf.errors import UserError
from conf.schema import Config
from loaders.common import DataInfo, map_leaves, tensors_of
from loaders.datasets.seeded import SeededDataset
from loaders.epoch import EpochSampler, LoadedBatch, Loader, prefetched, worker_loader
from loaders.targets import Labels, Target


class OwnLoader(Loader):
    """Iterates over this rank's batches of a Dataset: its `(inputs, targets)`, on the device.

    `loader.num_workers` processes load them; without worker processes, the training process does.
    """

    def __init__(
        self,
        data: Any,
        target: Target | None,
        sampler: EpochSampler,
        cfg: Config,
        device: torch.device,
    ) -> None:
        self.cfg, self.device = cfg, device
        self.dataset = SeededDataset(data, sampler.name)
        super().__init__(sampler, self._info(sampler, target))
        self.data_loader: DataLoader[LoadedBatch] | None = None
        if cfg.loader.num_workers:
            workers = cfg.loader.num_workers, cfg.loader.prefetch_factor, device.type == "cuda"
            self.data_loader = worker_loader(self.dataset, sampler, *workers)

    def finished_batches(self) -> Iterator[tuple[np.ndarray, tuple[Any, Any]]]:
        loaded = self.data_loader or map(self.dataset.__getitems__, self.sampler)
        batches = self.sampler.good_batches(loaded, self.dataset.__getitems__)
        if self.device.type == "cuda":
            return prefetched(batches, self._on_device, self.device)
        return starmap(self._on_device, batches)

    def _on_device(self, rows: np.ndarray, batch: Any) -> tuple[np.ndarray, tuple[Any, Any]]:
        if isinstance(batch, UserError):
            raise batch
        if isinstance(self.info.target, Labels):
            _check_labels(self.sampler.name, rows, batch[1], len(self.info.target.classes))
        inputs, targets = map_leaves(partial(_moved, device=self.device), batch)
        if self.cfg.loader.channels_last:
            inputs = map_leaves(_channels_last, inputs)
        return rows, (inputs, targets)

    def _info(self, sampler: EpochSampler, target: Target | None) -> DataInfo:
        """Return the facts that follow from the first good sample.

        Raises:
            UserError: it is not a pair of inputs and targets that can be split and moved to a
                device, or there is none.
        """
        single = (self.dataset.__getitems__(row) for rows in sampler for row in rows[:, None])
        found = next(sampler.good_batches(single, self.dataset.__getitems__), None)
        if found is None:
            raise UserError(f"all samples of {sampler.name} on rank {sampler.rank} are bad")
        rows, batch = found
        if isinstance(batch, UserError):
            raise batch
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError(
                f"{sampler.name}: an item is {type(batch).__name__}, not a pair; return "
                "(inputs, targets) from __getitem__ or collate_fn"
            )
        inputs = batch[0]
        if any(x.dtype == torch.float64 for x in tensors_of(inputs)):
            raise UserError(
                f"{sampler.name}: the inputs of sample {rows['sample'][0]} are float64, which "
                "models do not take; return float32, such as array.astype('float32')"
            )
        first = next(tensors_of(inputs), torch.zeros(0))
        shapes = [
            f"{'x'.join(map(str, each.shape[1:]))} {str(each.dtype).removeprefix('torch.')}".strip()
            for each in tensors_of(inputs)
        ]
        counts = target.class_counts() if target and len(target.values) else None
        return DataInfo(
            description=(f"inputs: {', '.join(shapes)} of the first sample",),
            target=target,
            in_channels=first.shape[1] if first.ndim == 4 else 1,
            dtype=str(first.dtype).removeprefix("torch."),
            num_samples=sampler.count,
            num_dropped=sampler.count - sampler.num_rows,
            example=inputs,
            name_of=getattr(self.dataset.data, "name_of", DataInfo.name_of),
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
