"""The kinds of targets, one class each."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Target:
    """The targets of a split.

    Attributes:
        kind: name of the kind, for `Task.target_kind` and messages.
        dtype: dtype of the targets in a batch.
        channels: number of values of a target; of an image, at each pixel.
        interpolation: how target images are resized, `linear` or `nearest`; `none`: no images.
    """

    kind: ClassVar[str] = ""
    dtype: ClassVar[str] = "float32"
    interpolation: ClassVar[str] = "none"

    @property
    def channels(self) -> int:
        return 1

    def take(self, samples: np.ndarray) -> "Target":
        """Return the targets of some samples, given as (N,) bool or as their positions."""
        own = getattr(self, "values", None)
        return self if own is None else replace(self, values=own[samples])  # type: ignore[call-arg]

    def describe(self) -> str:
        """Return a description for the log."""
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
class MultiLabels(Target):
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
class RegressionTargets(Target):
    """Numbers to predict; in a batch (B, len(names))."""

    kind = "numbers"

    values: np.ndarray
    """(N, len(names)) float32."""

    names: tuple[str, ...]
    """Names of the numbers."""

    @property
    def channels(self) -> int:
        return len(self.names)

    def describe(self) -> str:
        return _listed("numbers", self.names)


@dataclass(frozen=True)
class Unlabelled(Target):
    """No targets: the samples are there to be predicted. In a batch (B,): the samples' numbers."""

    kind = "unknown"
    dtype = "int64"


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
class ImageTarget(Target):
    """The base class of targets that are images."""

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        """Return the specification of the target images of such inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class TargetImages(ImageTarget):
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
class Masks(ImageTarget):
    """The class of each pixel of the input; in a batch (B, H, W)."""

    kind = "masks"
    dtype = "int64"
    interpolation = "nearest"

    classes: tuple[str, ...]
    """Their names."""

    ignore_index: int = -100
    """Index of pixels without a class; no mask holds -100, PyTorch's own default."""

    stored_dtype: str = "uint8"
    """`uint8` or `uint16`: type of the masks' pixels in files and packs."""

    def describe(self) -> str:
        return f"masks of {_listed('classes', self.classes)}"

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        return ImageSpec(1, self.stored_dtype, 1, self.interpolation, "indices")


def _listed(what: str, names: tuple[str, ...]) -> str:
    """Return the classes as text, such as `3 classes (cat, cow, dog)`."""
    shown = names if len(names) <= 6 else (*names[:3], "...", names[-1])
    return f"{len(names)} {what} ({', '.join(shown)})"


TARGETS: dict[str, type[Target]] = {
    "labels": Labels,
    "several labels": MultiLabels,
    "numbers": RegressionTargets,
    "unknown": Unlabelled,
    "images": TargetImages,
    "masks": Masks,
}
"""The class of each kind."""
