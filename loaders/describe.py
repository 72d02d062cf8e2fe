"""What a run says about its images at the start: samples, inputs, and what is likely a mistake."""

import logging

import numpy as np

from conf.errors import counted, first_few
from loaders.index import Index
from loaders.rectangles import Rectangles

log = logging.getLogger(__name__)

GEOMETRY = ("random_crop", "random_resized_crop", "hflip", "vflip", "rotation", "random_scale")
"""Keys of `data` that move what an image shows, at random."""


def describe(train: Rectangles, val_index: Index) -> tuple[str, ...]:
    """Describe the data, such as `photos: 900 training and 100 validation samples, labels of 2
    classes (cat, dog)`, the inputs, such as `inputs: 224x224, 3 channels, 73.5% of images of
    60-64x80`, and what may be wrong."""
    data, train_index = train.data, train.index
    height, width = train.output_size
    inputs = f"inputs: {height}x{width}, {counted(train_index.inputs.channels, 'channel')}"
    if train_index.inputs.dtype == "uint16":
        inputs += " of 16 bits"
    sizes = train_index.distinct_sizes
    # Of an image's area, what the crop of evaluation shows.
    share = np.median(train.crop_shapes(sizes).prod(axis=1) / sizes.prod(axis=1))
    if share < 1 or (sizes != (height, width)).any():
        inputs += f", {share:.1%} of images of {_range(sizes)}"
    lines = [
        f"{train_index.name.rpartition('/')[0]}: {len(train_index):,} training and "
        f"{len(val_index):,} validation samples, {train_index.target.describe()}",
        inputs,
        *train_index.notes,
    ]
    moved = [f"data.{key}" for key in GEOMETRY if getattr(data, key)]
    if moved and train_index.target.kind == "numbers":
        lines.append(
            f"the labels' numbers do not move with {', '.join(moved)}: none may be a position"
        )
    return tuple(lines)


def warn(indexes: tuple[Index, ...]) -> None:
    """Warn of files that are left out."""
    for index in indexes:
        if index.left_out:
            log.warning(
                "%s: %s left out: %s",
                *(index.name, counted(len(index.left_out), "file")),
                first_few(f"{path} ({reason})" for path, reason in index.left_out.items()),
            )


def _range(sizes: np.ndarray) -> str:
    """Return (N, 2) heights and widths as text, such as `28x28` or `60-64x80`."""
    ends = zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True)
    return "x".join(f"{low}-{high}" if low < high else f"{low}" for low, high in ends)
