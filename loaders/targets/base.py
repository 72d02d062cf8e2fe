"""The base class of the kinds of targets."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

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


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    facts = {
        name: describe_target(value) if isinstance(value, Target) else value
        for name, value in vars(target).items()
        if name != "values"
    }
    return {"kind": target.kind} | facts


def listed(what: str, names: tuple[str, ...]) -> str:
    """Return the classes as text, such as `3 classes (cat, cow, dog)`."""
    shown = names if len(names) <= 6 else (*names[:3], "...", names[-1])
    return f"{len(names)} {what} ({', '.join(shown)})"
