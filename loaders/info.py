"""Facts about the samples of a split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from loaders.targets import Target


@dataclass
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

    has_files: bool = False
    """Names are paths, which `data.leave_out` can list."""

    pictures: Callable[[Any], Tensor | None] = lambda inputs: None
    """Inputs as pictures: 1 or 3 channels with values in [0, 1]; None: they are not images."""

    class_counts: Callable[[], np.ndarray | None] = lambda: None
    """Computes (K,) float64, the number of samples of each class, for `loss.weights=auto`; None:
    there are no classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty if the targets have none."""
        return self.target.classes if self.target else ()
