"""The kinds of targets: labels, several labels, numbers, images, masks."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from conf.errors import first_few
from conf.facts import CHANNELS, check_kind


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


# part: table|multilabel
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


# part: table|regression
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


# part: predict images
@dataclass(frozen=True)
class Unlabelled(Target):
    """No targets: the samples are there to be predicted. In a batch (B,): the samples' numbers."""

    kind = "unknown"
    dtype = "int64"


# part: images
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


# part: pairs|restoration|masks|segmentation images
@dataclass(frozen=True)
class ImageTarget(Target):
    """The base class of targets that are images."""

    def spec(self, inputs: ImageSpec) -> ImageSpec:
        """Return the specification of the target images of such inputs."""
        raise NotImplementedError


# part: pairs|restoration images
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


# part: masks|segmentation images
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


# part: images
def describe_missing(target: Any) -> tuple[str, ...]:
    """Return a line that names the classes without a training sample, from the training split's
    targets; none if there are none."""
    if target.kind == "labels":
        has_sample = np.isin(np.arange(len(target.classes)), target.values)
    elif target.kind == "several labels":
        has_sample = target.values.any(axis=0)
    else:
        return ()
    missing = [name for name, has in zip(target.classes, has_sample, strict=True) if not has]
    if not missing:
        return ()
    return (f"{len(missing)} classes have no training sample: {first_few(missing)}",)


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    facts = {name: value for name, value in vars(target).items() if name != "values"}
    return {"kind": target.kind} | facts


TARGETS: dict[str, type[Target]] = {
    "labels": Labels,
    "several labels": MultiLabels,
    "numbers": RegressionTargets,
    "unknown": Unlabelled,
    "images": TargetImages,
    "masks": Masks,
}
"""The class of each kind."""

FACTS = {
    "classes": [str],
    "names": [str],
    "size_factor": CHANNELS,
    "num_channels": CHANNELS,
    "ignore_index": int,
    "stored_dtype": ("uint8", "uint16"),
}
"""Kinds of the attributes of targets, see `conf.facts.check_kind`."""


def target_of(facts: dict[str, Any], where: str = "the target") -> Target:
    """Return the target that `describe_target` described, without values.

    Args:
        facts: description of the target.
        where: name of the file in messages.

    Raises:
        UserError: the facts describe none of them.
    """
    fix = "write the folder that it belongs to again"
    check_kind(facts, {"kind": tuple(TARGETS)}, where, fix)
    target_class = TARGETS[facts["kind"]]
    names = {field.name for field in fields(target_class)}
    kinds = {name: FACTS[name] for name in names - {"values"}}
    check_kind(facts, kinds, where, fix)
    values = {name: tuple(facts[name]) if kinds[name] == [str] else facts[name] for name in kinds}
    if "values" in names:
        values["values"] = np.zeros(0)
    return target_class(**values)
