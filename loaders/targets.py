"""What the targets of a split are: labels, several labels, numbers, images or masks."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

NO_PIXEL = -100
"""The `ignore_index` that no mask holds: PyTorch's own default."""


@dataclass(frozen=True)
class Target:
    """What the targets of a split are: one of the kinds below.

    Attributes:
        kind: its name, as a task's `takes` and messages say it.
        dtype: of the targets in a batch.
        channels: values of a target, at each pixel if it is an image.
        interpolation: of target images that are resized, `linear` or `nearest`; `none`: they are no images.
    """

    kind: ClassVar[str] = ""
    dtype: ClassVar[str] = "float32"
    interpolation: ClassVar[str] = "none"

    @property
    def channels(self) -> int:
        return 1

    def describe(self) -> str:
        """For the log."""
        return f"targets are {self.kind}"


@dataclass(frozen=True)
class Labels(Target):
    """One class per sample; in a batch (B,)."""

    kind = "labels"
    dtype = "int64"

    values: np.ndarray
    """(N,) int64: the class of each sample, in [0, len(classes))."""

    classes: tuple[str, ...]
    """Their names."""

    def describe(self) -> str:
        return _listed("classes", self.classes)


@dataclass(frozen=True)
class SeveralLabels(Target):
    """Any number of classes per sample; in a batch (B, len(classes))."""

    kind = "several labels"

    values: np.ndarray
    """(N, len(classes)) float32: 1 for the classes of each sample, else 0."""

    classes: tuple[str, ...]
    """Their names."""

    @property
    def channels(self) -> int:
        return len(self.classes)

    def describe(self) -> str:
        return f"any of {_listed('classes', self.classes)} each"


@dataclass(frozen=True)
class Numbers(Target):
    """Numbers to predict; in a batch (B, len(names))."""

    kind = "numbers"

    values: np.ndarray
    """(N, len(names)) float32."""

    names: tuple[str, ...]
    """What they are called."""

    @property
    def channels(self) -> int:
        return len(self.names)

    def describe(self) -> str:
        return _listed("numbers", self.names)


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


@dataclass(frozen=True)
class Masks(Target):
    """The class of each pixel of the input; in a batch (B, H, W)."""

    kind = "masks"
    dtype = "int64"
    interpolation = "nearest"

    classes: tuple[str, ...]
    """Their names."""

    ignore_index: int = NO_PIXEL
    """What marks pixels without a class."""

    stored_dtype: str = "uint8"
    """`uint8` or `uint16`: type of the masks' pixels in files and packs."""

    def describe(self) -> str:
        return f"masks of {_listed('classes', self.classes)}"


TARGETS: tuple[type[Target], ...] = (Labels, SeveralLabels, Numbers, TargetImages, Masks)


@dataclass(frozen=True)
class NoTarget(Target):
    """Nothing is known of the samples: they are there to be predicted. In a batch (B,): their numbers."""

    kind = "unknown"
    dtype = "int64"

    predicted: Target
    """What the model was trained on, without values."""


def describe_target(target: Target) -> dict[str, Any]:
    """All but its values, which are an array of their own."""
    return {"kind": target.kind} | {k: v for k, v in vars(target).items() if k != "values"}


def target_of(facts: dict[str, Any], values: np.ndarray | None = None) -> Target:
    """The target that `describe_target` described, without samples if there are no values."""
    [target_class] = [t for t in TARGETS if t.kind == facts["kind"]]
    told = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items() if k != "kind"}
    if "values" in (field.name for field in fields(target_class)):
        told["values"] = np.zeros(0) if values is None else values
    return target_class(**told)


def _listed(what: str, names: tuple[str, ...]) -> str:
    """`3 classes (cat, cow, dog)`."""
    shown = names if len(names) <= 6 else (*names[:3], "...", names[-1])
    return f"{len(names)} {what} ({', '.join(shown)})"
