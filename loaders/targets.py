"""The kinds of targets, one class each, and facts about them as stored with an index or a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from conf.errors import UserError, counted


class ImageSpec(NamedTuple):
    """One of the images of a sample: the input, or its target.

    Its `dtype` is `uint8` or `uint16`; `size_factor` is its height and width, divided by those of
    the input, `interpolation` is `linear` or `nearest`, and `content` the conversion of the files'
    pixels: to `rgb` (8 bits), `stored` (none) or `indices` (classes).
    """

    channels: int
    dtype: str
    size_factor: int = 1
    interpolation: str = "linear"
    content: str = "rgb"

    @property
    def per_pixel(self) -> int:
        """Values of this side for each pixel of the input."""
        return self.channels * self.size_factor**2


@dataclass(frozen=True)
class Target:
    """The targets of a split.

    Attributes:
        kind: name of the kind, for `Task.target_kind` and messages.
        dtype: dtype of the targets in a batch.
        interpolation: how target images are resized, `linear` or `nearest`; `none`: no images.
        has_values: they are `values`, one a sample; else images, or unknown.
        classes: names of the classes; empty without any.
        channels: values at each pixel of a target image.
        outside: value of pixels that come from outside of a target image.
    """

    kind: ClassVar[str] = ""
    dtype: ClassVar[str] = "float32"
    interpolation: ClassVar[str] = "none"
    has_values: ClassVar[bool] = False

    values: np.ndarray = field(default_factory=lambda: np.zeros(0), kw_only=True)
    classes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def channels(self) -> int:
        return 1

    @property
    def outside(self) -> int:
        return 0

    def take(self, samples: np.ndarray) -> Self:
        """Return the targets of some samples, given as their positions."""
        return replace(self, values=self.values[samples]) if self.has_values else self

    def class_counts(self) -> np.ndarray | None:
        """Count the samples of each class, (K,) float64; None without labels."""
        return None

    def as_shares(self, targets: Tensor) -> Tensor:
        """Return targets of a batch as float32 that can be averaged: of labels, probabilities."""
        return targets

    def spec(self, inputs: ImageSpec) -> ImageSpec | None:
        """Return the specification of the target images of such inputs; None: targets are none."""
        return None

    def describe(self) -> str:
        """Return a description for the log, such as `labels of 3 classes (cat, cow, dog)`."""
        classes = self.classes
        if not classes:
            return f"targets are {self.kind}"
        few = classes if len(classes) <= 6 else (*classes[:3], "...", classes[-1])
        return f"{self.kind} of {counted(len(classes), 'class')} ({', '.join(few)})"


@dataclass(frozen=True)
class Labels(Target):
    """One class per sample: (N,) int64 in [0, len(classes)); in a batch (B,)."""

    kind = "labels"
    dtype = "int64"
    has_values = True

    values: np.ndarray
    classes: tuple[str, ...]

    def class_counts(self) -> np.ndarray:
        return np.bincount(self.values, minlength=len(self.classes)).astype(float)

    def as_shares(self, targets: Tensor) -> Tensor:
        return one_hot(targets, len(self.classes)).float()


@dataclass(frozen=True)
class MultiLabels(Target):
    """Any number of classes per sample: (N, len(classes)) float32, 1 for those of the sample, else
    0; in a batch (B, len(classes))."""

    kind = "several labels"
    has_values = True

    values: np.ndarray
    classes: tuple[str, ...]

    def class_counts(self) -> np.ndarray:
        return self.values.sum(axis=0, dtype=float)


@dataclass(frozen=True)
class RegressionTargets(Target):
    """Numbers to predict: (N, len(names)) float32; in a batch (B, len(names))."""

    kind = "numbers"
    has_values = True

    values: np.ndarray
    names: tuple[str, ...]

    def describe(self) -> str:
        return f"numbers: {', '.join(self.names)}"


@dataclass(frozen=True)
class Unlabelled(Target):
    """No targets: the samples are there to be predicted. In a batch (B,): the samples' numbers."""

    kind = "unknown"
    dtype = "int64"


@dataclass(frozen=True)
class TargetImages(Target):
    """Images of the inputs' dtype, `size_factor` (f) times as large: the second side of a pair; in
    a batch (B, C, f * H, f * W)."""

    kind = "images"
    interpolation = "linear"

    size_factor: int = 1
    num_channels: int = 3

    @property
    def channels(self) -> int:
        return self.num_channels

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return inputs._replace(channels=self.channels, size_factor=self.size_factor)


@dataclass(frozen=True)
class Masks(Target):
    """The class of each pixel of the input; in a batch (B, H, W). Pixels of `ignore_index` have
    none; no mask holds -100, PyTorch's own default."""

    kind = "masks"
    dtype = "int64"
    interpolation = "nearest"

    classes: tuple[str, ...]
    ignore_index: int = -100
    stored_dtype: str = "uint8"

    @property
    def outside(self) -> int:
        return self.ignore_index

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return ImageSpec(1, self.stored_dtype, 1, self.interpolation, "indices")


def check_rounding(values: np.ndarray, names: Sequence[str]) -> None:
    """Refuse numbers (N, len(names)) that float32 changes by more than a thousandth of the standard
    deviation of their column, as they are so far from 0."""
    for name, column in zip(names, values.T, strict=True):
        errors = np.abs(column - column.astype(np.float32))
        worst, spread = errors.argmax(), column.std(dtype=np.float64)
        if 0 < spread < 1000 * errors[worst]:
            raise UserError(
                f"the numbers of {name} differ by too little for float32, in which "
                f"{column[worst]:.15g} is {np.float32(column[worst]):.15g}; subtract one number "
                f"from all of them, such as {column.mean(dtype=np.float64):.0f}"
            )


KINDS = (Labels, MultiLabels, RegressionTargets, Unlabelled, TargetImages, Masks)


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    facts = {name: value for name, value in vars(target).items() if name != "values"}
    return {"kind": target.kind} | facts


def target_of(facts: dict[str, Any], values: np.ndarray | None = None) -> Target:
    """Return the target that `describe_target` described, with these values or none."""
    given: Any = {"values": np.zeros(0) if values is None else values}
    for name, value in facts.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    wanted = given.pop("kind")
    return next(kind for kind in KINDS if kind.kind == wanted)(**given)
