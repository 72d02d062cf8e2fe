"""Several labels: any number of classes per sample."""

from dataclasses import dataclass

import numpy as np

from loaders.targets.base import Target, listed


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
        return f"any of {listed('classes', self.classes)} each"
