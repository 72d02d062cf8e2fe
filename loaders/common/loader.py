"""The contract between the loaders and all that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from loaders.targets import Target


@dataclass(frozen=True)
class DataInfo:
    """Facts about the samples of a split, all optional."""

    description: tuple[str, ...] = ()
    """Lines for the log: the data set, numbers of samples, classes."""

    target: Target | None = None
    """Kind of the targets; None: unknown, and the task has to say its number of outputs itself."""

    in_channels: int = 1
    """Channels of the inputs, for models of images."""

    dtype: str = "float32"
    """Type of the inputs as they are stored, such as `uint8`."""

    num_samples: int = 0

    num_val_samples: int = 0
    """Of the validation split, which a training loader is compared on; `build_loaders` sets it."""

    num_dropped: int = 0
    """Samples that training drops at the end of each epoch."""

    example: Any = None
    """Inputs of a batch of one sample, with any values: for the model on ranks without samples."""

    name_of: Callable[[int], str] = "sample {}".format
    """Name of a sample, for messages and tables."""

    pictures: Callable[[Any], Tensor | None] = lambda inputs: None
    """Inputs as pictures: 1 or 3 channels with values in [0, 1]; None: they are not images."""

    class_counts: Callable[[], np.ndarray] | None = None
    """Computes (K,) the number of samples of each class, for `loss.weights=auto`."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty if the targets have none."""
        return getattr(self.target, "classes", ())


class Loader(Protocol):
    """Iterates over this rank's batches of one split: `(inputs, targets)` on its device.

    Both are any nesting of dicts and tuples around tensors and lists, see `loaders.common`. A
    training loader has the same number of batches on every rank. A loader whose order is a function
    of seed and epoch subclasses `loaders.epoch.EpochLoader`, which has all of these names.
    """

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches that are left of the epoch; of a whole one, if none is left."""

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0. The current epoch again keeps the position that was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values that are equal on all ranks. If there is a `plan`, it is
        a dict of texts, without which a checkpoint cannot continue within its epoch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, also in the middle of an epoch."""

    @property
    def epoch(self) -> int:
        """Current epoch."""

    @property
    def batches_done(self) -> int:
        """Number of batches already consumed in the epoch: at its end `max_batches`."""

    @property
    def max_batches(self) -> int:
        """Number of batches in a whole epoch of the rank that has most of them."""

    @property
    def in_channels(self) -> int:
        """`info.in_channels`, for the scripts."""

    @property
    def info(self) -> DataInfo:
        """Facts about the samples."""

    @property
    def last_samples(self) -> Sequence[int]:
        """Numbers of the samples of the batch that was yielded last."""

    def share_bad_samples(self, gather: Callable[[Any], list[Any]]) -> dict[str, int]:
        """Exchange the ranks' bad samples; return their number by split, {} if none can be bad.

        Args:
            gather: returns the values of all ranks.
        """
