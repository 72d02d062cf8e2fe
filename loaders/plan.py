"""What happens in an epoch: which samples a rank reads, batch by batch, and how far it has come."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conf.check import check_batch_size
from conf.errors import UserError, counted
from conf.schema import Config
from loaders.index import BadFileError
from loaders.order import Order

ROW = [("pass", "i8"), ("position", "i8"), ("sample", "i8")]
"""Columns of each row: the number of the pass over the data, the position in it, and the sample's
number in the split."""

MOST_BAD = 100  # samples in a row, after which the data set is to blame
ROWS_AT_ONCE = 8192  # planned together, which costs less per row than batch by batch
PLACE = ("epoch", "step", "number_of_pass", "row")  # attributes of a plan


class Samples:
    """The N samples of a split, called `name`, in their `order`, and the rows, of
    `dtype`, that say what is read of them. Those to `train` on are shuffled; bad ones end the run
    unless it `skips` them."""

    dtype = np.dtype(ROW)

    def __init__(self, name: str, order: Order, cfg: Config, train: bool) -> None:
        self.name, self.order, self.seed, self.train = name, order, cfg.seed, train
        self.skips = cfg.data.on_error == "skip"

    def __len__(self) -> int:
        raise NotImplementedError

    def rows(self, number_of_pass: int, positions: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return a row for each position; it depends on (seed, pass, position, sample) alone."""
        rows = np.zeros(len(positions), self.dtype)
        rows["pass"], rows["position"], rows["sample"] = number_of_pass, positions, samples
        self.draw(rows)
        return rows

    def draw(self, rows: np.ndarray) -> None:
        """Fill in the columns of rows beside `ROW`."""

    def load(
        self,
        rows: np.ndarray,
        number: int,
        read: Callable[[int, np.void], Any],
        bad: dict[int, str],
    ) -> Any:
        """Return `read(number, row)` of one of the rows of a batch.

        If it raises BadFileError, and `skips` is on, training tries the samples that follow, each
        at the same position, and writes the good one's row into `rows`; evaluation returns None.
        The reasons come into `bad`, by sample. It raises UserError after `MOST_BAD` of them.
        """
        num_tries = min(MOST_BAD, len(self))
        for _ in range(num_tries):
            row = rows[number]
            try:
                return read(number, row)
            except BadFileError as error:
                if not self.skips:
                    raise
                bad[int(row["sample"])] = last = str(error)
            if not self.train:
                return None
            following = self.order.following(int(row["sample"]), len(self))
            position = row["position"].reshape(1)
            rows[number] = self.rows(int(row["pass"]), position, np.array([following]))[0]
        raise UserError(f"{self.name} has {num_tries} bad samples in a row, the last one: {last}")

    def description(self) -> dict[str, str]:
        """Describe all that the rows of an epoch depend on: equal descriptions give equal rows."""
        files = f"{len(self)} samples of {self.name}"
        return {"files": files, "seed": str(self.seed), "order": self.order.order_name}


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

    Attributes:
        batch_size: number of samples in a batch of this rank.
        fetches: samples of the rows that are yielded are fetched, as they will be read.
        num_rows: number of rows of a pass that are used: in training all but the dropped tail.
        epoch: current epoch.
        step: steps done in the epoch, with `cfg.epoch_steps`.
        number_of_pass: pass over the data, whose order and random numbers are used.
        row: row of the pass at which the next batch begins.

    Raises:
        UserError: ranks cannot share a batch, or the split is too small for a batch or all ranks.
    """

    fetches = True

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
        tail = len(samples) % cfg.global_batch_size if samples.train else 0
        self.num_rows = len(samples) - tail
        self.epoch_steps = cfg.epoch_steps if samples.train else None
        self.begin(0)

    def _batches_in(self, num_rows: int) -> int:
        return -(-num_rows // self.global_batch_size)

    @property
    def max_batches(self) -> int:
        """Number of batches in a whole epoch of the rank that has most of them."""
        return self.epoch_steps or self._batches_in(self.num_rows)

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_rows, self.global_batch_size)
        return self.epoch_steps or full + (rest > self.rank)

    @property
    def batches_done(self) -> int:
        """Number of batches of the current size already used in the epoch: at its end
        `max_batches`."""
        done = self._batches_in(self.row) if self.epoch_steps is None else self.step
        return min(done, self.max_batches)

    def begin(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.step = epoch, 0
        first_step, steps_of_pass = epoch * self.max_batches, self._batches_in(self.num_rows)
        self.number_of_pass, step = divmod(first_step, steps_of_pass)
        self.row = step * self.global_batch_size

    def advance(self, num_batches: int = 1) -> None:
        """Go so many batches further, of the same pass."""
        self.row += num_batches * self.global_batch_size
        self.step += num_batches
        self._skip_tail()

    def _skip_tail(self) -> None:
        if self.epoch_steps is not None and self.row + self.global_batch_size > self.num_rows:
            self.number_of_pass, self.row = self.number_of_pass + 1, 0

    def finish(self) -> None:
        """Go to the end of the epoch, for any batch size."""
        if self.epoch_steps is None:
            self.row = len(self.samples)
        else:
            self.step = self.epoch_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the place, for any number of ranks, and what the rows depend on."""
        place = {name: getattr(self, name) for name in PLACE}
        return place | {"plan": self.samples.description()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        for name in PLACE:
            setattr(self, name, state[name])
        self._skip_tail()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the rows of the batches that are left of the epoch; the place stays where it is."""
        ahead = copy.copy(self)
        while (left := ahead.max_batches - ahead.batches_done) > 0:
            num_batches = min(left, max(1, ROWS_AT_ONCE // self.batch_size))
            end = min(self.num_rows, ahead.row + num_batches * self.global_batch_size)
            if self.samples.train:
                end -= (end - ahead.row) % self.global_batch_size
            positions = np.arange(ahead.row + self.rank, end, self.world_size)
            rows = self.rows(ahead.number_of_pass, positions)
            for at in range(0, len(rows), self.batch_size):
                mine = rows[at : at + self.batch_size]
                if self.fetches:
                    self.samples.order.fetch(mine, self.samples.seed, self.samples.train)
                yield mine
            ahead.advance(self._batches_in(end - ahead.row))

    def rows(self, number_of_pass: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions of a pass, which all ranks share."""
        samples, numbers = self.samples, positions
        if samples.train:
            numbers = samples.order.shuffled(positions, len(samples), samples.seed, number_of_pass)
        return samples.rows(number_of_pass, positions, numbers)
