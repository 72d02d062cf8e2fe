"""Any folder of images, without labels."""

from pathlib import Path

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.index.files import file_index, images_below, read_headers
from loaders.index.index import Index
from loaders.targets import Target, Unlabelled


def unlabelled_index(data: DataConfig, target: Target, channels: int) -> Index:
    """Build the index of the images below `data.root`.

    Args:
        data: configuration of the training run; `data.layout=cells` keeps the files' channels.
        target: kind of targets that the model was trained on.
        channels: number of channels of the model's inputs; with 1, photos become grey.

    Raises:
        UserError: `data.root` is not a folder or has no image, or the images have other channels
            than the model takes.
    """
    root = Path(data.root)
    if not root.is_dir():
        raise UserError(
            f"data.root={root} is not a folder; set data.root to the folder of the images"
        )
    keep_channels = data.layout == "cells"
    files = read_headers(images_below(root), data, "stored" if keep_channels else "rgb")
    if not keep_channels and channels == 1:
        files.headers["channels"] = 1
    index = file_index(f"data.root={root}", data.root, (files,), Unlabelled(target), keep_channels)
    if index.channels != channels:
        raise UserError(
            f"the images of {index.name} have {index.channels} channels, but the model was "
            f"trained on {channels}; use images of the kind that it was trained on"
        )
    return index
