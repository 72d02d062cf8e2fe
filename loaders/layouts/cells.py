"""One folder per class, as `imagefolder`, of TIFFs with any number of channels."""

from collections.abc import Collection
from pathlib import Path

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.imagefolder import class_folders


def cells(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    return class_folders(data, splits, Path(data.root), "stored")
