"""A stream with a loader of its own: `data=own data.layout=stream` in `loaders/layouts/`.

Each rank reads the whole stream and keeps its share of each batch. So the state is equal on all
ranks, and a run can be resumed in mid-epoch on any number of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from conf.errors import UserError
from conf.schema import Config
from loaders import DataInfo
from loaders.targets import Target


class Noise(IterableDataset):
    """Dark and bright images, in another order in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.done = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.done = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while self.done < self.count:
            self.done += 1
            random = torch.Generator().manual_seed(self.count * self.epoch + self.done)
            image = torch.rand(1, 28, 28, generator=random) * torch.rand(1, generator=random)
            yield image, int(image.mean() > 0.25)
        self.done = 0


class Stream:
    info = DataInfo(target=Target("labels", names=("dark", "bright")))
    in_channels, last_samples = 1, ()

    def __init__(
        self, cfg: Config, split: str, device: torch.device, rank: int, world_size: int
    ) -> None:
        if split == "test":
            raise UserError("data.layout=stream has no split=test; use split=val")
        self.data = Noise(256 if split == "train" else 64)
        self.size, self.device = cfg.global_batch_size, device
        self.share, self.max_batches = slice(rank, None, world_size), self.data.count // self.size
        self.epoch = self.batches_done = 0

    def __len__(self) -> int:
        return self.max_batches

    @property
    def steps_done(self) -> int:
        return self.epoch * len(self) + self.batches_done

    @property
    def is_finished(self) -> bool:
        return self.batches_done >= len(self)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.batches_done = epoch, 0
            self.data.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        names = ("epoch", "batches_done")
        return {"data": self.data.state_dict()} | {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        self.data.load_state_dict(state["data"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.batches_done %= self.max_batches
        items = []
        for item in self.data:
            items.append(item)
            if len(items) == self.size:
                inputs, targets = default_collate(items[self.share])
                items = []
                self.batches_done += 1
                yield inputs.to(self.device), targets.to(self.device)
