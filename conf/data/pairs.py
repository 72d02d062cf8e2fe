"""Keys of `data=pairs` alone."""

from dataclasses import dataclass
from pathlib import Path

from conf.groups import DataConfig
from conf.ranges import Allowed, key

FOLDER_BELOW = Allowed(
    "a folder below data.root, without ..",
    lambda x: not Path(x).is_absolute() and ".." not in Path(x).parts,
)


@dataclass
class PairsConfig(DataConfig):
    input_dir: str = key("input", FOLDER_BELOW)
    """Folder of the inputs below `root`, or below its `train` and `val`."""

    target_dir: str = key("target", FOLDER_BELOW)
    """Folder of the targets, with the same relative paths."""
