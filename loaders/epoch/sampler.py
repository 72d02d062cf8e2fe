"""The batch sampler: the samples that a rank reads, batch by batch, and which of them are bad."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from conf.check import check_batch_size
from conf.errors import UserError, counted
from conf.schema import Config
from loaders.epoch.order import ORDER, shuffled, stream_key, uniform

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 8192
"""Planned at once, which costs less per row than batch by batch."""

SAMPLE = np.dtype(
    [
        ("position", "i8"),  # in the epoch, from 0
        ("sample", "i8"),  # position in the data set
        ("seed", "u4"),  # of the sample's own random numbers in this epoch
    ]
)


class BadFileError(UserError, OSError):
    """A file or sample that cannot be read; the message names it and the reason."""


class LoadedBatch(NamedTuple):
    """A batch as a Dataset of rows loads it."""

    rows: np.ndarray
    content: Any
    """What was loaded; meaningless if any sample is bad."""
    bad: dict[int, str]
    """Reasons why samples cannot be loaded."""


class EpochSampler:
    """Yields this rank's rows, batch by batch; a row is a sample at a position of the epoch.

    Of all rows of the epoch, which every rank can compute, a rank has every `world_size`-th one
    from `rank` on, as with `torch.utils.data.DistributedSampler`. In training, every rank has the
    same number of batches, and the tail of the epoch that does not fill a global batch is dropped,
    also after a resume with another batch size. In evaluation every row is yielded once over all
    ranks: the last batches may be smaller, and a rank may have one less.

    A subclass may override `plan`, `description` and `fetch`.

    Args:
        name: name of the data set and split, such as `photos/train`.
        count: number of samples.
        cfg: `cfg.data`, `cfg.seed` and `cfg.global_batch_size` are used.
        rank, world_size: rank of this process and number of ranks.
        train: shuffle, and drop the tail.
        left_out: paths of files that are not in the split because their headers are bad; they count
            for `data.max_bad_samples`.

    Attributes:
        epoch: current epoch.
        start_row: row of the epoch at which the next iteration starts.
        batch_size: number of samples in a batch of this rank.
        bad: reasons by sample why samples cannot be loaded.

    Raises:
        UserError: ranks cannot share a batch, or the split is too small for a batch or all ranks.
        BadFileError: too many files are left out.
    """

    advice = ""
    """End of the message that there are too many bad samples."""

    def __init__(
        self,
        name: str,
        count: int,
        cfg: Config,
        rank: int,
        world_size: int,
        train: bool,
        left_out: Iterable[str] = (),
    ) -> None:
        check_batch_size(cfg.global_batch_size, world_size=world_size)
        needed = cfg.global_batch_size if train else world_size
        if count < needed:
            raise UserError(
                f"the data set {name} has {counted(count, 'sample')}, fewer than "
                + (f"global_batch_size={needed}" if train else f"world_size={needed}")
                + "; use a smaller value or more data"
            )
        self.name, self.count, self.rank, self.world_size = name, count, rank, world_size
        self.data, self.seed, self.train = cfg.data, cfg.seed, train
        self.global_batch_size = cfg.global_batch_size
        self.batch_size = cfg.global_batch_size // world_size
        self.epoch = self.start_row = 0
        self.left_out = tuple(left_out)
        self.bad: dict[int, str] = {}
        self.check_limit()

    def plan(self, positions: np.ndarray) -> np.ndarray:
        """Return rows of the epoch, which all ranks share, (len(positions),) of dtype `SAMPLE`."""
        rows = np.zeros(len(positions), SAMPLE)
        rows["position"] = rows["sample"] = positions
        if self.train:
            rows["sample"] = shuffled(positions, self.count, self.seed, self.epoch)
        numbers = uniform(rows["sample"], stream_key("own", self.seed, self.epoch), 1)
        rows["seed"] = (numbers[:, 0] * 2**32).astype(np.uint32)
        return rows

    def description(self) -> dict[str, str]:
        """Describe all that the rows of an epoch depend on: equal descriptions give equal rows."""
        files = f"{self.count} samples of {self.name}"
        return {"files": files, "seed": str(self.seed), "order": ORDER}

    def fetch(self, rows: np.ndarray) -> None:
        """Wait until the samples of a batch can be read."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the epoch that are used: all but the dropped tail in training."""
        return self.count - self.count % self.global_batch_size if self.train else self.count

    @property
    def max_batches(self) -> int:
        """Batches of rank 0 in a whole epoch; other ranks may have one less in evaluation."""
        return -(-self.num_rows // self.global_batch_size)

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_rows, self.global_batch_size)
        return full + (rest > self.rank)

    def __iter__(self) -> Iterator[np.ndarray]:
        num_rows = max(1, ROWS_AT_ONCE // self.batch_size) * self.global_batch_size
        stop = self.num_rows
        if self.train:
            stop -= (stop - self.start_row) % self.global_batch_size
        for start in range(self.start_row, stop, num_rows):
            end = min(start + num_rows, stop)
            rows = self.plan(np.arange(start + self.rank, end, self.world_size))
            for first in range(0, len(rows), self.batch_size):
                mine = self.without_bad(rows[first : first + self.batch_size])
                if len(mine):
                    self.fetch(mine)
                    yield mine

    def good_batches(
        self, batches: Iterable[LoadedBatch], load: Callable[[np.ndarray], LoadedBatch]
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield rows and content of batches; those with bad samples are loaded again, by `load`,
        with these replaced or left out.

        Raises:
            BadFileError: as `set_aside` and `without_bad`.
        """
        for batch in batches:
            while batch.bad:
                self.set_aside(batch.bad)
                batch = load(self.without_bad(batch.rows))
            if len(batch.rows):
                yield batch.rows, batch.content

    def set_aside(self, failed: dict[int, str]) -> None:
        """Add samples that cannot be read to `bad`, each with the reason.

        Raises:
            BadFileError: `data.on_error=raise`, or bad samples now exceed `data.max_bad_samples`.
        """
        for sample, reason in failed.items():
            if self.data.on_error != "skip":
                raise BadFileError(f"{reason}, or leave out bad samples with data.on_error=skip")
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
        """Number of samples of the split that this rank knows to be left out or replaced."""
        return len(self.left_out) + len(self.bad)

    def check_limit(self) -> None:
        """Raise BadFileError if more than `data.max_bad_samples` samples are bad."""
        if self.num_bad > self.data.max_bad_samples:
            last = [*self.left_out, *self.bad.values()][-1]
            raise BadFileError(
                f"{self.name} has {counted(self.num_bad, 'bad sample')}, more than "
                f"data.max_bad_samples={self.data.max_bad_samples}, the last one: {last}"
                f"{self.advice}"
            )

    def without_bad(self, rows: np.ndarray) -> np.ndarray:
        """Replace those of this rank's rows whose samples are `bad` by its next good ones; in
        evaluation, leave them out.

        The result depends on the order and the samples alone, not on when one was found.

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
            # The next rows of this rank, modulo the epoch: one more than there are bad samples.
            num_tried = min(len(bad) + 1, self.num_rows // self.world_size)
            following = rows["position"][number] + self.world_size * np.arange(num_tried)
            candidates = self.plan(following % self.num_rows)
            is_good = ~np.isin(candidates["sample"], bad)
            if not is_good.any():
                raise BadFileError(f"all samples of {self.name} on rank {self.rank} are bad")
            rows[number] = candidates[is_good.argmax()]
        return rows
