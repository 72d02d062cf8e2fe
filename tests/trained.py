"""Tasks with data that they are trained on, and what their predictions are."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.rows import rows


class Trained(NamedTuple):
    """A task with data that it is trained on, and what its predictions are."""

    task: str
    kind: str
    """Of data: a row of KINDS."""
    options: list[str]
    folder: str
    """Below the data's, that of the validation images."""
    columns: list[str]
    tolerance: float = 1e-4
    values_of: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Function of what an exported file answers."""
    has_palette: bool = False


TRAINED: list[Trained] = [
    *rows(
        Trained(
            *("segmentation", "masks"),
            ["model=unet", "model.kwargs.num_levels=2", "loss.weights=auto"],
            folder="images",
            columns=["image"],
            values_of=lambda answer: answer.argmax(axis=-1),
            has_palette=True,
        ),
        Trained(
            *("restoration", "pairs", ["model=nafnet", "model.kwargs.num_blocks=[1,1]"]),
            folder="test/blurry",
            columns=["image"],
            tolerance=1,
            values_of=lambda answer: 255 * answer,
        ),
        needs="data=pairs",
    ),
    *rows(
        Trained(
            *("multilabel", "several labels", ["model.kwargs.width=8", "loss.weights=auto"], "."),
            columns=["cat", "cow", "dog"],
        ),
        Trained(
            *("regression", "numbers", ["model.kwargs.width=8", "data.hflip=0.5"], "."),
            columns=["label"],
        ),
        needs="data=table",
    ),
]
