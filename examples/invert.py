"""An augmentation of one's own: inverts some images, for all loaders, ranks and resumes alike.

Put the class into a file of `loaders/augment/`, list `Invert()` in its `AUGMENTATIONS`, and add the
key to `DataConfig` in `conf/groups.py`, with a docstring: `invert: float = key(0.0, SHARE)`.
"""

import numpy as np
from torch import Tensor

from conf.schema import DataConfig
from loaders.augment import Augmentation, Random, to_device


class Invert(Augmentation):
    keys = ("invert",)
    columns = (("inverted", "?"),)  # of the plan's rows: name, dtype

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        """Fill in the columns; `random(name, n)` returns n uniform numbers of each row."""
        rows["inverted"] = random("inverted", 1)[:, 0] < data.invert

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        """Change inputs (B, C, H, W) in [0, 1]; `apply_to_both` would change targets, too."""
        inverted = rows["inverted"].astype(np.float32)
        return (images - to_device(inverted, images.device).view(-1, 1, 1, 1)).abs()
