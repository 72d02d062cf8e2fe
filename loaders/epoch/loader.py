"""The base class of loaders whose order is a function of seed and epoch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.common import DataInfo, limits_explained
from loaders.epoch.sampler import SAMPLE, EpochSampler


class LoadedBatch(NamedTuple):
    """A batch as a Dataset of rows loads it."""

    rows: np.ndarray
    content: Any
    """What was loaded; meaningless if any sample is bad."""
    bad: dict[int, str]
    """Reasons why samples cannot be loaded."""


class EpochLoader:
    """Base class of loaders: the position in the epoch, and the bad samples; see `loaders.Loader`.

    A subclass implements `finished_batches()`.

    Attributes:
        sampler: sampler of this rank's rows.
        info: facts about the samples.
        batch_size: number of samples in a batch of this rank.
        samplers: samplers of all splits, this loader's first.
        position: number of rows of the epoch that all ranks together have used.
        last_rows: rows of the batch that was yielded last.
    """

    def __init__(self, sampler: EpochSampler, info: DataInfo) -> None:
        self.sampler, self.info = sampler, info
        self.samplers = [sampler]
        self.batch_size = sampler.global_batch_size // sampler.world_size
        self.position = 0
        self.last_rows = np.zeros(0, SAMPLE)

    def finished_batches(self) -> Iterator[tuple[np.ndarray, tuple[Any, Any]]]:
        """Yield the rows of each batch, and its inputs and targets on the device."""
        raise NotImplementedError

    def good_batches(
        self, batches: Iterable[LoadedBatch], load: Callable[[np.ndarray], LoadedBatch]
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield rows and content of batches; those with bad samples are loaded again, by `load`,
        with these replaced or left out."""
        for batch in batches:
            while batch.bad:
                self.sampler.set_aside(batch.bad)
                batch = load(self.sampler.without_bad(batch.rows))
            if len(batch.rows):
                yield batch.rows, batch.content

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def batches_done(self) -> int:
        """Number of batches of the current size already consumed in the epoch."""
        return min(-(-self.position // self.sampler.global_batch_size), self.max_batches)

    @property
    def max_batches(self) -> int:
        return self.sampler.max_batches

    @property
    def in_channels(self) -> int:
        return self.info.in_channels

    @property
    def last_samples(self) -> Sequence[int]:
        return self.last_rows["sample"].tolist()

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)
            self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, for any number of ranks, and what its order depends on."""
        return {
            "epoch": self.sampler.epoch,
            "position": self.position,
            "plan": self.sampler.description(),
            "bad": [dict(sampler.bad) for sampler in self.samplers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, on any number of ranks."""
        self.sampler.set_epoch(state["epoch"])
        self.position = state["position"]
        self._add_bad(state.get("bad", []))

    def share_bad_samples(self, gather: Callable[[Any], list[Any]]) -> dict[str, int]:
        """Exchange bad samples, see `loaders.Loader`; raises as `EpochSampler.check_limit`."""
        for bad in gather([sampler.bad for sampler in self.samplers]):
            self._add_bad(bad)
        return {s.name.rpartition("/")[2]: s.num_bad for s in self.samplers}

    def _add_bad(self, found: list[dict[int, str]]) -> None:
        for sampler, bad in zip(self.samplers, found, strict=False):
            sampler.bad |= bad
            sampler.check_limit()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self.batches_done == self.max_batches:
            self.position = 0
        self.sampler.start_row = self.position
        with limits_explained():
            for rows, batch in self.finished_batches():
                self.last_rows = rows
                # Before the batch is yielded: a checkpoint written in the loop's body comes after
                # the step that used it.
                self.position += self.sampler.global_batch_size
                yield batch
        self.position = self.sampler.count  # the epoch is finished for any batch size
