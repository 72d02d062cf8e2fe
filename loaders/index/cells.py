"""Class folders of TIFFs with any number of channels."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.index.class_folders import class_folders
from loaders.index.index import Index


def cells(data: DataConfig) -> tuple[Index, Index]:
    """List TIFFs whose channels stay as they are."""
    return class_folders(data, Path(data.root), keep_channels=True)
