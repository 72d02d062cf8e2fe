"""The contract that every backend fulfils."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.limits import limits_explained
from loaders.overlap import Finished
from loaders.pixels import Pixels
from loaders.plan import ROW
from loaders.sampler import PlanSampler
from loaders.storage import StorageError
from loaders.targets import NoTarget

HELD_BACK = 2
"""Batches that are ready when the storage of the training data is found to stay away: ranks agree on what to do
one step late, and each of them needs a batch for that step."""


class Loader:
    """Iterates over this rank's batches of one split.

    A batch is `(inputs, targets)` on `device`: float32 inputs of shape (B, C, H, W), and targets as
    `target` says, see `loaders.targets.Target`; with `data.mixup` or `data.cutmix`, labels of training batches
    are (B, classes) float32 probabilities. A backend only implements `finished_batches()`.

    Attributes:
        index: the split's samples.
        device: where the batches lie.
        in_channels: C of the inputs.
        batch_size: B, on this device.
        target: what the targets are; of samples to be predicted, what the model was trained on.
        classes: names of the classes; empty if the targets have none.
        max_batches: batches of the rank that has most of them in a whole epoch; others have one less.
        dropped_per_epoch: samples of the tail of each epoch that training leaves out.
        samplers: of all splits, this loader's first; their bad samples are part of its state.
        description: of training loaders: data set, numbers of samples, classes; for the log.
        failed: why a backend's batches have ended early: the storage of the data stays away.
        last_rows: the rows of the batch that was yielded last.
        read_size: (height, width) of the images that the backend delivers. This is the size of the
            inputs, but where every row enlarges a rectangle of the same size, that size: the enlarging
            is then done for the whole batch on the device, and fewer bytes travel. Masks have the
            inputs' size.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        self.sampler, self.cfg, self.device, self.index = sampler, cfg, device, sampler.index
        target = self.index.target
        self.target = target.predicted if isinstance(target, NoTarget) else target
        self.in_channels = self.index.channels
        self.classes: tuple[str, ...] = getattr(self.target, "classes", ())
        self.batch_size = sampler.global_batch_size // sampler.world_size
        self.max_batches = sampler.max_batches
        self.dropped_per_epoch = len(self.index) - sampler.num_rows
        self.samplers = [sampler]
        self.description = ""
        self.position = 0
        self.failed: StorageError | None = None
        self.last_rows = np.zeros(0, ROW)
        self.read_size = self.output_size = sampler.output_size
        shapes = sampler.distinct_shapes
        if (
            shapes is not None
            and (shapes == shapes[0]).all()
            and (shapes <= self.output_size).all()
        ):
            self.read_size = int(shapes[0, 0]), int(shapes[0, 1])
        self.pixels = Pixels(self.index, self.output_size, cfg, device)

    def finished_batches(self) -> Iterator[Finished]:
        """The sampler's rows, batch by batch, with inputs and targets; they end where `failed` is set."""
        raise NotImplementedError

    def read_sizes(self) -> dict[int, tuple[int, int]]:
        """For each side, (height, width) of the images that the backend delivers."""
        return {
            number: self.output_size
            if side.interpolation == "nearest"
            else (side.size_factor * self.read_size[0], side.size_factor * self.read_size[1])
            for number, side in enumerate(self.index.sides)
        }

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        """The epoch whose plan is followed."""
        return self.sampler.epoch

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that were already yielded; had they another size, so many that with those
        that are left they make a whole epoch."""
        return min(-(-self.position // self.sampler.global_batch_size), self.max_batches)

    @property
    def epoch_is_finished(self) -> bool:
        return self.batches_done == self.max_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's plan. The same epoch again keeps a position that was loaded."""
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: the epoch, how many of its rows all ranks together have used, and what
        the plan of these rows depends on."""
        return {
            "epoch": self.sampler.epoch,
            "position": self.position,
            "plan": self.sampler.description(),
            "bad": self.bad_samples(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken, on any number of ranks."""
        self.sampler.set_epoch(state["epoch"])
        self.position = state["position"]
        self.add_bad_samples(state.get("bad", []))

    def bad_samples(self) -> list[dict[int, str]]:
        """For each split the samples that this rank knows to be undecodable, with the reasons."""
        return [dict(sampler.bad) for sampler in self.samplers]

    def add_bad_samples(self, found: list[dict[int, str]]) -> None:
        """Those that other ranks or an earlier part of the run have found.

        Raises:
            BadFileError: there are more than `data.max_bad_samples` of a split now.
        """
        for sampler, bad in zip(self.samplers, found, strict=False):
            sampler.bad |= bad
            sampler.check_limit()

    def num_bad_samples(self) -> dict[str, int]:
        """By split, how many samples were left out or replaced."""
        return {s.index.name.rpartition("/")[2]: s.num_bad for s in self.samplers}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.epoch_is_finished:
            self.position = 0
        self.sampler.start_row = self.position
        with limits_explained():
            for rows, batch in self._held_back():
                self.last_rows = rows
                # Counted before the batch is handed out: a checkpoint written in the loop's body
                # holds a step that has already used it.
                self.position += self.sampler.global_batch_size
                yield batch
        self.position = len(self.index)  # at which the epoch is finished with batches of any size

    def _held_back(self) -> Iterator[Finished]:
        """The finished batches; of a storage that may stay away, some stay behind until it has done so."""
        count = HELD_BACK if self.sampler.train and self.index.is_remote else 0
        self.failed = None
        ready: deque[Finished] = deque()
        for finished in self.finished_batches():
            ready.append(finished)
            if len(ready) > count:
                yield ready.popleft()
        yield from ready
        if self.failed is not None:
            raise self.failed

    def names(self, rows: np.ndarray) -> list[str]:
        """The (input) files of these rows, or `sample 12` where there are no files."""
        return [self.index.name_of(sample) for sample in rows["sample"].tolist()]

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Inputs of shape (B, C, H, W) as pictures: 1 or 3 channels with values in [0, 1]."""
        return self.pixels.denormalize(inputs)
