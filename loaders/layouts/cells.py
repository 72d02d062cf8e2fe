"""One folder per class, as `imagefolder`, of TIFFs with any number of channels."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.imagefolder import class_folders


def cells(data: DataConfig) -> tuple[Index, Index]:
    """Return the index of the training and of the validation split."""
    return class_folders(data, Path(data.root), content="stored")


def test_cells(data: DataConfig) -> Index:
    """Return the index of the test split."""
    return class_folders(data, Path(data.root), "test", "stored")[1]
