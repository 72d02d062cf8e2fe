"""The kinds of targets, one class each, and facts about them as stored with an index or a run."""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from conf.errors import UserError, counted, first_few


class ImageSpec(NamedTuple):
    """One of the images of a sample: the input, or its target."""

    channels: int
    dtype: str
    """`uint8` or `uint16`."""
    size_factor: int = 1
    """Height and width, divided by those of the input."""
    interpolation: str = "linear"
    """`linear` or `nearest`."""
    content: str = "rgb"
    """Conversion of the files' pixels: to `rgb` (8 bits), `stored` (none), `indices` (classes)."""

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
        channels: number of values of a target; of an image, at each pixel.
        interpolation: how target images are resized, `linear` or `nearest`; `none`: no images.
        has_values: they are `values`; else images, or unknown.
        outside: value of pixels that come from outside of a target image.
    """

    kind: ClassVar[str] = ""
    dtype: ClassVar[str] = "float32"
    interpolation: ClassVar[str] = "none"
    has_values: ClassVar[bool] = False

    values: np.ndarray = field(default_factory=lambda: np.zeros(0), kw_only=True)
    """Targets of the N samples; empty without `has_values`."""

    classes: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of the classes; empty without any."""

    @property
    def channels(self) -> int:
        return 1

    @property
    def outside(self) -> int:
        return 0

    def take(self, samples: np.ndarray) -> Self:
        """Return the targets of some samples, given as (N,) bool or as their positions."""
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
        """Return a description for the log."""
        return f"targets are {self.kind}"

    def notes(self) -> tuple[str, ...]:
        """Return lines on what may be wrong with the classes of training samples."""
        lines, counts = [], self.class_counts()
        if counts is not None and not counts.all():
            missing = [name for name, count in zip(self.classes, counts, strict=True) if not count]
            what = f"{counted(len(missing), 'class')} without a training sample"
            lines.append(f"{what}: {first_few(missing)}")
        alike: dict[str, list[str]] = defaultdict(list)
        for name in self.classes:
            alike[_meant(name)].append(name)
        if groups := [", ".join(names) for names in alike.values() if len(names) > 1]:
            lines.append(f"spellings of one name that are classes each: {first_few(groups)}")
        return tuple(lines)


@dataclass(frozen=True)
class Labels(Target):
    """One class per sample; in a batch (B,)."""

    kind = "labels"
    dtype = "int64"
    has_values = True

    values: np.ndarray
    """(N,) int64: the class of each sample, in [0, len(classes))."""

    classes: tuple[str, ...]

    def class_counts(self) -> np.ndarray:
        return np.bincount(self.values, minlength=len(self.classes)).astype(float)

    def as_shares(self, targets: Tensor) -> Tensor:
        return one_hot(targets, len(self.classes)).float()

    def describe(self) -> str:
        return _listed("class", self.classes)


@dataclass(frozen=True)
class MultiLabels(Target):
    """Any number of classes per sample; in a batch (B, len(classes))."""

    kind = "several labels"
    has_values = True

    values: np.ndarray
    """(N, len(classes)) float32: 1 for the classes of each sample, else 0."""

    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        return len(self.classes)

    def class_counts(self) -> np.ndarray:
        return self.values.sum(axis=0, dtype=float)

    def describe(self) -> str:
        return f"any of {_listed('class', self.classes)} each"


@dataclass(frozen=True)
class RegressionTargets(Target):
    """Numbers to predict; in a batch (B, len(names))."""

    kind = "numbers"
    has_values = True

    values: np.ndarray
    """(N, len(names)) float32."""

    names: tuple[str, ...]

    @property
    def channels(self) -> int:
        return len(self.names)

    def describe(self) -> str:
        return _listed("number", self.names)


def check_rounding(values: np.ndarray, names: Sequence[str]) -> None:
    """Refuse numbers (N, len(names)) so far from 0 that float32 does not tell them apart.

    Raises:
        UserError: it changes one by more than a thousandth of the standard deviation of its column.
    """
    for name, column in zip(names, values.T, strict=True):
        rounded = column.astype(np.float32)
        errors = np.abs(column - rounded)
        spread = column.std(dtype=np.float64)
        if spread > 0 and errors.max() > spread / 1000:
            worst = errors.argmax()
            raise UserError(
                f"the numbers of {name} differ by too little for float32, in which "
                f"{column[worst]:.15g} is {rounded[worst]:.15g}; subtract one number from all of "
                f"them, such as {column.mean(dtype=np.float64):.0f}"
            )


@dataclass(frozen=True)
class Unlabelled(Target):
    """No targets: the samples are there to be predicted. In a batch (B,): the samples' numbers."""

    kind = "unknown"
    dtype = "int64"


@dataclass(frozen=True)
class TargetImages(Target):
    """Images of the inputs' dtype: the second side of a pair; in a batch (B, C, f * H, f * W)."""

    kind = "images"
    interpolation = "linear"

    size_factor: int = 1
    """f: their height and width, divided by those of the inputs."""

    num_channels: int = 3
    """C."""

    @property
    def channels(self) -> int:
        return self.num_channels

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return inputs._replace(channels=self.channels, size_factor=self.size_factor)


@dataclass(frozen=True)
class Masks(Target):
    """The class of each pixel of the input; in a batch (B, H, W)."""

    kind = "masks"
    dtype = "int64"
    interpolation = "nearest"

    classes: tuple[str, ...]

    ignore_index: int = -100
    """Index of pixels without a class; no mask holds -100, PyTorch's own default."""

    stored_dtype: str = "uint8"
    """`uint8` or `uint16`: type of the masks' pixels in files and packs."""

    @property
    def outside(self) -> int:
        return self.ignore_index

    def describe(self) -> str:
        return f"masks of {_listed('class', self.classes)}"

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return ImageSpec(1, self.stored_dtype, 1, self.interpolation, "indices")


def _meant(name: str) -> str:
    """Return what the spellings of a name have in common, such as those of `Cat` and of `1.0`."""
    try:
        return str(float(name))
    except ValueError:
        return unicodedata.normalize("NFC", name).casefold()


def _listed(what: str, names: tuple[str, ...]) -> str:
    """Return the classes as text, such as `3 classes (cat, cow, dog)`."""
    shown = names if len(names) <= 6 else (*names[:3], "...", names[-1])
    return f"{counted(len(names), what)} ({', '.join(shown)})"


TARGETS: dict[str, type[Target]] = {
    target.kind: target
    for target in (Labels, MultiLabels, RegressionTargets, Unlabelled, TargetImages, Masks)
}
"""The class of each kind."""


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    facts = {name: value for name, value in vars(target).items() if name != "values"}
    return {"kind": target.kind} | facts


def target_of(facts: dict[str, Any]) -> Target:
    """Return the target that `describe_target` described, without values."""
    given: dict[str, Any] = {"values": np.zeros(0)} | facts
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return TARGETS[given.pop("kind")](**given)
