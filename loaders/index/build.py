"""The index of a data set, from `data.index` or by its layout."""

from conf.errors import UserError
from conf.names import file_of, find
from conf.schema import DataConfig
from loaders.index.columns import open_index
from loaders.index.index import Index


def build_index(data: DataConfig) -> tuple[Index, Index]:
    """Build the index of the training and of the validation split, from `data.index` or from the
    files of the data set.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    if data.index is not None:  # part: index
        return open_index(data)
    if hasattr(file_of("loaders.layouts", data.layout, "data.layout"), "build_loaders"):
        raise UserError(f"data.layout={data.layout} is not of images; use a layout of images")
    splits: tuple[Index, Index] = find("loaders.layouts", data.layout, "data.layout")(data)
    return splits
