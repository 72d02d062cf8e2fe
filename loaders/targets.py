"""The targets of a split, and facts about them as stored with an index or a run."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from conf.errors import UserError, counted


class ImageSpec(NamedTuple):
    """One of the images of a sample: the input, or its target.

    Its `dtype` is `uint8` or `uint16`, of masks also `int32`; `size_factor` is its height and
    width, divided by those of the input, and `content` what the files' pixels become: `rgb` of 8
    bits, what is `stored`, or `indices` of classes, which are files in `loaders/images/`.
    """

    channels: int
    dtype: str
    size_factor: int = 1
    content: str = "rgb"

    @property
    def interpolation(self) -> str:
        """How it is resized, `linear` or `nearest`."""
        return "nearest" if self.content == "indices" else "linear"

    @property
    def per_pixel(self) -> int:
        """Values of this side for each pixel of the input."""
        return self.channels * self.size_factor**2


@dataclass(frozen=True)
class Target:
    """The targets of a split, by `kind`:

    - `labels`: one class per sample; `values` are (N,) int64 in [0, K), in a batch (B,).
    - `several labels`: any number of classes per sample; (N, K) float32, 1 for those of the sample,
      else 0; in a batch (B, K).
    - `numbers`: K numbers to predict; (N, K), in a batch (B, K) float32.
    - `images`: of the inputs' dtype, `size_factor` (f) times as large, the second side of a pair;
      in a batch (B, channels, f * H, f * W).
    - `masks`: the class of each pixel of the input; in a batch (B, H, W). Pixels of `ignore_index`
      have none; no mask holds -100, PyTorch's own default.
    - `unknown`: none, the samples are there to be predicted; in a batch (B,): their numbers.
    """

    kind: str
    values: np.ndarray | None = None
    names: tuple[str, ...] = ()
    """Of the K classes or numbers."""
    size_factor: int = 1
    channels: int = 3
    ignore_index: int = -100

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty without any."""
        return self.names if self.kind != "numbers" else ()

    def take(self, samples: np.ndarray) -> "Target":
        """Return the targets of some samples, given as their positions."""
        return self if self.values is None else replace(self, values=self.values[samples])

    def class_counts(self) -> np.ndarray | None:
        """Count the samples of each class, (K,) float64; None without labels."""
        if self.values is None or not len(self.values):
            return None
        if self.kind == "labels":
            return np.bincount(self.values, minlength=len(self.names)).astype(float)
        return self.values.sum(axis=0, dtype=float) if self.kind == "several labels" else None

    def as_shares(self, targets: Tensor) -> Tensor:
        """Return targets of a batch as float32 that can be averaged: of labels, probabilities."""
        return one_hot(targets, len(self.names)).float() if self.kind == "labels" else targets

    def describe(self) -> str:
        """Return a description for the log, such as `labels of 3 classes (cat, cow, dog)`."""
        if not self.names:
            return f"targets are {self.kind}"
        if self.kind == "numbers":
            return f"numbers: {', '.join(self.names)}"
        few = self.names if len(self.names) <= 6 else (*self.names[:3], "...", self.names[-1])
        return f"{self.kind} of {counted(len(self.names), 'class')} ({', '.join(few)})"


def check_rounding(target: Target) -> None:
    """Refuse numbers of a whole data set that float32 changes by more than a thousandth of the
    standard deviation of their column, as they are so far from 0. A part of it may vary less."""
    if target.kind != "numbers" or target.values is None or not len(target.values):
        return
    values = np.asarray(target.values).reshape(len(target.values), -1)
    for name, column in zip(target.names, values.T, strict=True):
        errors = np.abs(column - column.astype(np.float32))
        worst, spread = errors.argmax(), column.std(dtype=np.float64)
        if 0 < spread < 1000 * errors[worst]:
            raise UserError(
                f"the numbers of {name} differ by too little for float32, in which "
                f"{column[worst]:.15g} is {np.float32(column[worst]):.15g}; subtract one number "
                f"from all of them, such as {column.mean(dtype=np.float64):.0f}"
            )


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    return {name: value for name, value in vars(target).items() if name != "values"}


def target_of(facts: dict[str, Any], values: np.ndarray | None = None) -> Target:
    """Return the target that `describe_target` described, with these values or none."""
    return Target(**facts | {"names": tuple(facts["names"]), "values": values})
