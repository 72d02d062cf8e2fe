"""Any folder of images, without labels."""

from pathlib import Path

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.index.files import IMAGE_ENDINGS, file_index, images_below, read_headers
from loaders.index.headers import BadHeadersError
from loaders.index.index import Index
from loaders.targets import Target, Unlabelled


def unlabelled_index(
    data: DataConfig, target: Target, channels: int
) -> tuple[Index, dict[str, str]]:
    """Build the index of the images below `data.root`; return it, and the reasons by path why files
    cannot be used.

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
    files = images_below(root)
    if not files:
        raise UserError(f"data.root={root} has no images; expected {', '.join(IMAGE_ENDINGS)}")
    keep_channels, broken = data.layout == "cells", {}
    content = "stored" if keep_channels else "rgb"
    try:
        headers = read_headers(files, data, content)
    except BadHeadersError as error:
        broken = error.reasons
        files = [path for path in files if path not in broken]
        if not files:
            raise
        headers = read_headers(files, data, content)
    if not keep_channels and channels == 1:
        headers["channels"] = 1
    index = file_index(
        root.name, data.root, (files,), (headers,), Unlabelled(target), keep_channels
    )
    if index.channels != channels:
        raise UserError(
            f"the images of data.root={root} have {index.channels} channels, but the model was "
            f"trained on {channels}; use images of the kind that it was trained on"
        )
    return index, broken
