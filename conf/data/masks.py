"""Keys of `data=masks`, alone, and of `data=pairs`."""

from dataclasses import dataclass

from conf.data.pairs import PairsConfig
from conf.ranges import FROM_2, Allowed, key

INDEX = Allowed("an int from -32768 to 65535", lambda x: -32768 <= x <= 65535)


@dataclass
class MasksConfig(PairsConfig):
    num_classes: int | None = key(None, FROM_2)
    """Number of classes; null: one more than the highest index in the masks."""

    ignore_index: int = key(-100, INDEX)
    """Index of pixels without a class, often 255. No mask has the default: all count."""
