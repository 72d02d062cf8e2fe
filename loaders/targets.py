"""The kinds of targets: labels, several labels, numbers, images, masks."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from conf.errors import UserError
from conf.facts import CHANNELS, check_kind

NO_PIXEL = -100
"""The `ignore_index` that no mask holds: PyTorch's own default."""


@dataclass(frozen=True)
class Target:
    """The targets of a split: one of the kinds below.

    Attributes:
        kind: its name, for `Task.target_kind` and messages.
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

    def take(self, samples: np.ndarray) -> "Target":
        """The targets of some samples: (N,) bool, or their positions."""
        values = getattr(self, "values", None)
        return self if values is None else replace(self, values=values[samples])  # type: ignore[call-arg]

    def describe(self) -> str:
        """Description for the log."""
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
    """Index of pixels without a class."""

    stored_dtype: str = "uint8"
    """`uint8` or `uint16`: type of the masks' pixels in files and packs."""

    def describe(self) -> str:
        return f"masks of {_listed('classes', self.classes)}"


@dataclass(frozen=True)
class Unlabelled(Target):
    """Nothing is known of the samples: they are there to be predicted. In a batch (B,): their numbers."""

    kind = "unknown"
    dtype = "int64"

    predicted: Target
    """Target that the model was trained on, without values."""


KNOWN_TARGETS: tuple[type[Target], ...] = (
    *(Labels, MultiLabels, RegressionTargets),
    *(TargetImages, Masks),
)
TARGETS = (*KNOWN_TARGETS, Unlabelled)


def describe_target(target: Target) -> dict[str, Any]:
    """Facts about a target, without its values, which are a column."""
    facts = {k: v for k, v in vars(target).items() if k != "values"}
    if isinstance(target, Unlabelled):
        facts["predicted"] = describe_target(target.predicted)
    return {"kind": target.kind} | facts


FACTS = {
    "classes": [str],
    "names": [str],
    "size_factor": CHANNELS,
    "num_channels": CHANNELS,
    "ignore_index": int,
    "stored_dtype": ("uint8", "uint16"),
    "predicted": {},
}
"""Kinds of the attributes of targets, see `conf.facts.check_kind`."""


def target_of(
    facts: dict[str, Any],
    where: str = "the target",
    targets: tuple[type[Target], ...] = TARGETS,
) -> Target:
    """The target that `describe_target` described, without values.

    Args:
        facts: the description.
        where: the file that holds it, for messages.
        targets: classes that it may have.

    Raises:
        UserError: the facts describe none of them.
    """
    fix = "write the folder that it belongs to again"
    kinds = {target.kind: target for target in targets}
    check_kind(facts, {"kind": tuple(kinds)}, where, fix)
    target_class = kinds[facts["kind"]]
    names = {field.name for field in fields(target_class)} - {"values"}
    if names != set(facts) - {"kind"}:
        raise UserError(
            f"{where}: a target of kind {facts['kind']} has {', '.join(sorted(names))}; {fix}"
        )
    check_kind(facts, {name: FACTS[name] for name in names}, where, fix)
    attributes = {
        name: tuple(facts[name]) if FACTS[name] == [str] else facts[name] for name in names
    }
    if target_class in (Labels, MultiLabels, RegressionTargets):
        attributes["values"] = np.zeros(0)
    if target_class is Unlabelled:
        attributes["predicted"] = target_of(facts["predicted"], where, KNOWN_TARGETS)
    return target_class(**attributes)


def _listed(what: str, names: tuple[str, ...]) -> str:
    """`3 classes (cat, cow, dog)`."""
    shown = names if len(names) <= 6 else (*names[:3], "...", names[-1])
    return f"{len(names)} {what} ({', '.join(shown)})"
