"""Labels: one class per sample."""

from dataclasses import dataclass

import numpy as np

from loaders.targets.base import Target, listed


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
        return listed("classes", self.classes)
