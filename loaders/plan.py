"""What happens in an epoch: which samples a rank reads, batch by batch, and how far it has come."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conf.check import check_batch_size
from conf.errors import UserError, counted
from conf.schema import Config
from loaders.index import BadFileError
from loaders.order import ORDER, shuffled

MOST_BAD = 100
"""Bad samples in a row after which the data set is to blame, not a sample."""

ROWS_AT_ONCE = 8192
"""Planned at once, which costs less per row than batch by batch."""

PLACE = ("epoch", "step", "number_of_pass", "row")
"""Attributes of a plan that are the place in the run."""


class Samples:
    """The N samples of a split: their order, and the rows that say what is read of them.

    Attributes:
        name: name of the data set and split, such as `photos/train`.
        seed: seed of the order and of the rows.
        train: shuffle them.
        skips: do without bad samples, by `data.on_error=skip`.
    """

    name: str
    seed: int
    train: bool
    skips: bool

    def __len__(self) -> int:
        raise NotImplementedError

    def order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Return the samples at these positions of an epoch, (len(positions),) int64."""
        if not self.train:
            return positions
        return shuffled(positions, len(self), self.seed, epoch)

    def rows(self, positions: np.ndarray, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Return a row for each position, with the fields `position`, `epoch` and `sample`.

        It depends on (seed, epoch, position, sample) alone.
        """
        raise NotImplementedError

    def following(self, sample: int) -> int:
        """Return the sample that stands in for a bad one."""
        return (sample + 1) % len(self)

    def load(
        self,
        rows: np.ndarray,
        number: int,
        read: Callable[[int, np.void], Any],
        bad: dict[int, str],
    ) -> Any:
        """Return `read(number, row)` of a row. If its sample is bad and `skips` is on, training
        tries those that follow it, each as the row's sample at the same position, and writes the
        good one's row into `rows`; evaluation returns None.

        Args:
            rows: rows of a batch.
            number: which of them.
            read: raises BadFileError for a bad sample.
            bad: reasons by sample, to which bad ones are added.

        Raises:
            UserError: `MOST_BAD` samples in a row are bad, or all.
        """
        num_tries = min(MOST_BAD, len(self)) if self.train else 1
        for _ in range(num_tries):
            row = rows[number]
            try:
                return read(number, row)
            except BadFileError as error:
                if not self.skips:
                    raise
                bad[int(row["sample"])] = last = str(error)
            if self.train:
                following = np.array([self.following(int(row["sample"]))])
                position = row["position"].reshape(1)
                rows[number] = self.rows(position, following, int(row["epoch"]))[0]
        if self.train:
            raise UserError(
                f"{self.name} has {num_tries} bad samples in a row, the last one: {last}"
            )
        return None

    def description(self) -> dict[str, str]:
        """Describe all that the rows of an epoch depend on: equal descriptions give equal rows."""
        files = f"{len(self)} samples of {self.name}"
        return {"files": files, "seed": str(self.seed), "order": ORDER}

    def fetch(self, rows: np.ndarray) -> None:
        """Wait until the samples of a batch can be read."""


class Plan:
    """The rows of this rank, batch by batch, and the place in the epoch.

    Of all rows of an epoch, which every rank can compute, a rank has every `world_size`-th one from
    `rank` on, as with `torch.utils.data.DistributedSampler`. In training, every rank has the same
    number of batches, and the tail of a pass over the data that does not fill a global batch is
    dropped, also after a resume with another batch size. In evaluation every row is yielded once
    over all ranks: the last batches may be smaller, and a rank may have one less.

    An epoch of training is one pass or, with `cfg.epoch_steps`, so many steps of the endless
    sequence of passes: step s of the run is step s % P of pass s // P, where P is the number of
    batches of a pass.

    Args:
        samples: samples of the split.
        cfg: `cfg.global_batch_size` and `cfg.epoch_steps` are used.
        rank, world_size: rank of this process and number of ranks.

    Attributes:
        batch_size: number of samples in a batch of this rank.
        epoch: current epoch.
        step: steps done in the epoch, with `cfg.epoch_steps`.
        number_of_pass: pass over the data, whose order and random numbers are used.
        row: row of the pass at which the next batch begins.

    Raises:
        UserError: ranks cannot share a batch, or the split is too small for a batch or all ranks.
    """

    def __init__(self, samples: Samples, cfg: Config, rank: int = 0, world_size: int = 1) -> None:
        check_batch_size(cfg.global_batch_size, world_size=world_size)
        needed = cfg.global_batch_size if samples.train else world_size
        if len(samples) < needed:
            key = "global_batch_size" if samples.train else "world_size"
            raise UserError(
                f"the data set {samples.name} has {counted(len(samples), 'sample')}, fewer than "
                f"{key}={needed}; use a smaller value or more data"
            )
        self.samples, self.rank, self.world_size = samples, rank, world_size
        self.global_batch_size = cfg.global_batch_size
        self.batch_size = cfg.global_batch_size // world_size
        self.epoch_steps = cfg.epoch_steps if samples.train else None
        self.epoch = self.step = self.number_of_pass = self.row = 0

    @property
    def num_rows(self) -> int:
        """Number of rows of a pass that are used: all but the dropped tail in training."""
        count = len(self.samples)
        return count - count % self.global_batch_size if self.samples.train else count

    @property
    def batches_per_pass(self) -> int:
        """Number of batches in a whole pass of the rank that has most of them."""
        return -(-self.num_rows // self.global_batch_size)

    @property
    def max_batches(self) -> int:
        """Number of batches in a whole epoch of the rank that has most of them."""
        return self.epoch_steps or self.batches_per_pass

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_rows, self.global_batch_size)
        return self.epoch_steps or full + (rest > self.rank)

    @property
    def batches_done(self) -> int:
        """Number of batches of the current size already used in the epoch: at its end
        `max_batches`."""
        done = -(-self.row // self.global_batch_size) if self.epoch_steps is None else self.step
        return min(done, self.max_batches)

    def begin(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.step = epoch, 0
        self.number_of_pass, self.row = epoch, 0
        if self.epoch_steps is not None:
            first_step = epoch * self.epoch_steps
            self.number_of_pass, step = divmod(first_step, self.batches_per_pass)
            self.row = step * self.global_batch_size

    def advance(self) -> None:
        """Go one batch further."""
        self.row += self.global_batch_size
        self.step += 1
        if self.epoch_steps is not None and self.row + self.global_batch_size > self.num_rows:
            self.number_of_pass, self.row = self.number_of_pass + 1, 0

    def finish(self) -> None:
        """Go to the end of the epoch, for any batch size."""
        if self.epoch_steps is None:
            self.row = len(self.samples)
        else:
            self.step = self.epoch_steps

    def state_dict(self) -> dict[str, int]:
        """Return the place, for any number of ranks."""
        return {name: getattr(self, name) for name in PLACE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        for name in PLACE:
            setattr(self, name, state[name])

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the rows of the batches that are left of the epoch; the place stays where it is."""
        number, row, left = self.number_of_pass, self.row, self.max_batches - self.batches_done
        while left > 0:
            end = min(self.num_rows, row + left * self.global_batch_size)
            if self.samples.train:
                end -= (end - row) % self.global_batch_size
            yield from self._batches(number, row, end)
            left -= -(-(end - row) // self.global_batch_size)
            number, row = number + 1, 0

    def _batches(self, number: int, start: int, end: int) -> Iterator[np.ndarray]:
        """Yield this rank's rows from `start` to `end` of a pass."""
        num_rows = max(1, ROWS_AT_ONCE // self.batch_size) * self.global_batch_size
        for first in range(start, end, num_rows):
            last = min(first + num_rows, end)
            positions = np.arange(first + self.rank, last, self.world_size)
            rows = self.rows(positions, number)
            for at in range(0, len(rows), self.batch_size):
                mine = rows[at : at + self.batch_size]
                self.samples.fetch(mine)
                yield mine

    def rows(self, positions: np.ndarray, number_of_pass: int) -> np.ndarray:
        """Return the rows at these positions of a pass, which all ranks share."""
        samples = self.samples.order(positions, number_of_pass)
        return self.samples.rows(positions, samples, number_of_pass)
