"""Which rows of the plan a rank executes, batch by batch."""

import logging
from collections.abc import Iterator

import numpy as np

from conf.schema import DataConfig
from loaders.augment import AUGMENTATIONS
from loaders.index import BadFileError, Index
from loaders.plan import distinct_shapes, has_random_shapes, output_size, plan
from loaders.randomness import HALF_ROUNDS
from loaders.window import fetch_ahead

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 8192
"""Planned in one go, which costs less per row than batch by batch."""
ORDER = f"shuffled() of {HALF_ROUNDS} half rounds"
"""Which function makes the plan: a checkpoint of another one cannot go on within an epoch."""


class PlanSampler:
    """Walks the plan of the current epoch: yields, batch by batch, the rows of this rank.

    What `torch.utils.data.DistributedSampler` is for positions, this is for rows of the plan: every
    `world_size`-th one from `rank` on, in an order that `set_epoch` changes alike on every rank. It is
    no subclass, because it yields batches of rows, starts at any row, and pads nothing: in training
    every rank gets the same number of batches and the tail of the epoch that does not fill a global
    batch is dropped, also where an epoch goes on that was begun with other batches; in evaluation every
    row is yielded exactly once over all ranks, so that the last batches can be smaller and a rank can have
    one batch less.

    A sample that turns out to be undecodable joins `bad` (sample: reason). In training the next row of
    this rank in the epoch whose sample is good takes the place of its row, in evaluation the row is left
    out. This follows from the plan and the files alone: when the sample was found does not matter.

    Attributes:
        epoch: whose plan is walked.
        start_row: of the plan, at which the next walk begins.
        output_size: (height, width) in pixels of the images that the rows make.
        distinct_shapes: (M, 2) height and width in pixels of the rectangles that inputs of the sizes
            `index.distinct_sizes` have; None: random ones.

    Raises:
        ValueError: the split has fewer samples than a global batch (training) or than ranks, images are
            smaller than the crop, or an augmentation does not fit targets or batches.
    """

    def __init__(
        self,
        index: Index,
        data: DataConfig,
        seed: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        train: bool,
    ) -> None:
        needed = global_batch_size if train else world_size
        if len(index) < needed:
            raise ValueError(
                f"{index.name} has {len(index)} samples, fewer than "
                + (f"global_batch_size={needed}" if train else f"world_size={needed}")
                + "; use a smaller value or more data"
            )
        if train and data.shuffle == "window" and index.shards is None:
            raise ValueError(
                f"data.shuffle=window goes through shards, and {index.name} has none; use data.shuffle=full, "
                "or write shards with python -m loaders.pack format=shards"
            )
        for augmentation in AUGMENTATIONS if train else ():
            augmentation.check(data, index.target, global_batch_size, world_size)
        self.index, self.data, self.seed, self.train = index, data, seed, train
        self.global_batch_size, self.rank, self.world_size = global_batch_size, rank, world_size
        self.output_size = output_size(data, index)
        self.distinct_shapes = (
            None if has_random_shapes(data, train) else distinct_shapes(index, data)
        )
        self.epoch = self.start_row = 0
        self.bad: dict[int, str] = {}
        if index.left_out and rank == 0:
            log.warning(
                "%s: %d files are left out, because their headers cannot be used (data.max_bad_samples="
                "%d; python -m loaders.check tells why): %s",
                *(index.name, len(index.left_out), data.max_bad_samples),
                f"{', '.join(index.left_out[:10])}{' ...' if len(index.left_out) > 10 else ''}",
            )
        self.check_limit()

    def set_epoch(self, epoch: int) -> None:
        """Walk the plan of another epoch."""
        self.epoch = epoch

    def plan(self, positions: np.ndarray) -> np.ndarray:
        """These rows of the current epoch's table, which all ranks share."""
        return plan(self.index, self.data, self.seed, self.epoch, self.train, positions)

    def description(self) -> dict[str, str]:
        """All that the plan of an epoch depends on: equal descriptions give equal plans."""
        keys = ("resize", "crop", *(key for a in AUGMENTATIONS for key in a.keys))
        settings = {f"data.{key}": str(getattr(self.data, key)) for key in keys}
        order, shards = ORDER, self.index.shards
        if self.train and self.data.shuffle == "window" and shards is not None:
            order += f", windows of {self.data.shuffle_window} shards of {shards.fingerprint}"
        files = self.index.fingerprint
        return {"files": files, "seed": str(self.seed), "order": order} | settings

    @property
    def num_rows(self) -> int:
        """Rows of the plan that are used: all, less the dropped tail in training."""
        count = len(self.index)
        return count - count % self.global_batch_size if self.train else count

    @property
    def max_batches(self) -> int:
        """Batches of the rank that has most of them in a whole epoch, which is rank 0."""
        return -(-self.num_rows // self.global_batch_size)

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_rows, self.global_batch_size)
        return full + (rest > self.rank)

    def __iter__(self) -> Iterator[np.ndarray]:
        batch = self.global_batch_size // self.world_size
        num_rows = max(1, ROWS_AT_ONCE // batch) * self.global_batch_size
        stop = self.num_rows
        if self.train:
            stop -= (stop - self.start_row) % self.global_batch_size
        for start in range(self.start_row, stop, num_rows):
            end = min(start + num_rows, stop)
            rows = self.plan(np.arange(start + self.rank, end, self.world_size))
            for first in range(0, len(rows), batch):
                self._fetch_ahead(int(rows["position"][first]))
                if len(shard := self.without_bad(rows[first : first + batch])):
                    yield shard

    def _fetch_ahead(self, position: int) -> None:
        """Let a cache of shards fetch those of the next window, if there is one."""
        shards = self.index.shards
        if self.train and self.data.shuffle == "window" and shards and shards.is_cached:
            fetch_ahead(position, shards, self.data.shuffle_window, self.seed, self.epoch)

    def set_aside(self, failed: dict[int, str]) -> None:
        """Add samples to `bad`, with the reasons.

        Raises:
            BadFileError: `data.on_error` is `raise`, or there are more than `data.max_bad_samples` now.
        """
        for sample, reason in failed.items():
            if self.data.on_error == "raise":
                raise BadFileError(f"{reason}, or leave out bad files with data.on_error=skip")
            if sample not in self.bad:
                self.bad[sample] = reason
                log.warning(
                    "%s (%s; bad sample %d, data.max_bad_samples=%d)",
                    *(reason, "replaced" if self.train else "left out"),
                    *(self.num_bad, self.data.max_bad_samples),
                )
        self.check_limit()

    @property
    def num_bad(self) -> int:
        """Samples of the split that are left out or replaced, as far as this rank knows."""
        return len(self.index.left_out) + len(self.bad)

    def check_limit(self) -> None:
        """Raises BadFileError if more than `data.max_bad_samples` samples are bad."""
        if self.num_bad > self.data.max_bad_samples:
            last = [*self.index.left_out, *self.bad.values()][-1]
            raise BadFileError(
                f"{self.num_bad} samples of {self.index.name} are bad, more than data.max_bad_samples="
                f"{self.data.max_bad_samples}, the last one: {last}; python -m loaders.check lists all of "
                "them"
            )

    def without_bad(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this rank, those of `bad` samples replaced or left out.

        Raises:
            BadFileError: no good sample is left to replace one.
        """
        if not self.bad:
            return rows
        bad = np.array(list(self.bad), np.int64)
        is_bad = np.isin(rows["sample"], bad)
        if not self.train or not is_bad.any():
            return rows[~is_bad]
        rows = rows.copy()
        for number in np.flatnonzero(is_bad):
            # All rows of this rank from there on around the end, but no more than can be bad.
            num_tried = min(len(bad) + 1, self.num_rows // self.world_size)
            following = rows["position"][number] + self.world_size * np.arange(num_tried)
            candidates = self.plan(following % self.num_rows)
            is_good = ~np.isin(candidates["sample"], bad)
            if not is_good.any():
                raise BadFileError(f"all samples of {self.index.name} on rank {self.rank} are bad")
            rows[number] = candidates[is_good.argmax()]
        return rows
