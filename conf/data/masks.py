"""Keys of `data=masks`, alone, and of `data=pairs`."""

from dataclasses import dataclass

from conf.data.pairs import PairsConfig
from conf.ranges import FROM_2, key


@dataclass
class MasksConfig(PairsConfig):
    num_classes: int | None = key(None, FROM_2)
    """Number of classes; null: one more than the highest index in the masks."""

    ignore_index: int = -100
    """Index of pixels without a class, often 255. No mask has the default: all count."""
