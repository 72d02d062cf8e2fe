"""Any folder of images, of which nothing else is known."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.headers import BadHeadersError, read_headers
from loaders.index import Index
from loaders.layouts.files import IMAGE_ENDINGS, file_index, images_below
from loaders.targets import NoTarget, Target


def unlabelled(data: DataConfig, target: Target, channels: int) -> tuple[Index, dict[str, str]]:
    """The images below `data.root`, as a model takes them, and of each file that is none, why.

    Args:
        data: of the run that trained the model; `data.layout=cells` keeps the files' channels.
        target: that the model was trained on.
        channels: that the model takes: photos become grey if it is 1.

    Raises:
        FileNotFoundError: `data.root` is not a folder.
        ValueError: there is no image, or the images have other channels than the model takes.
    """
    root = Path(data.root)
    if not root.is_dir():
        raise FileNotFoundError(
            f"data.root={root} is not a folder; set data.root to the folder of the images"
        )
    files = images_below(root)
    if not files:
        raise ValueError(f"data.root={root} has no images; expected {', '.join(IMAGE_ENDINGS)}")
    as_stored, broken = data.layout == "cells", {}
    content = "stored" if as_stored else "rgb"
    try:
        headers = read_headers(files, data, content)
    except BadHeadersError as error:
        broken = error.reasons
        files = [path for path in files if path not in broken]
        if not files:
            raise
        headers = read_headers(files, data, content)
    if not as_stored and channels == 1:
        headers["channels"] = 1
    index = file_index(root.name, (files,), (headers,), NoTarget(target), as_stored)
    if index.channels != channels:
        raise ValueError(
            f"the images of data.root={root} have {index.channels} channels, but the model was trained on "
            f"{channels}; use images of the kind that it was trained on"
        )
    return index, broken
