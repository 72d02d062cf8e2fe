"""Open a data set: its index, from files or from shards."""

from conf.schema import DataConfig
from loaders.index import Index, build_index
from loaders.shards import holds_shards, open_shards


def open_splits(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split.

    Raises:
        UserError: the data is missing, or its files do not have the layout `data.layout`.
    """
    if data.index is None and holds_shards(data.root):  # part: shards
        return open_shards(data)
    return build_index(data)
