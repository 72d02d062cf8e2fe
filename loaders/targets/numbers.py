"""Numbers to predict."""

from dataclasses import dataclass

import numpy as np

from loaders.targets.base import Target, listed


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
        return listed("numbers", self.names)
