"""What a run says about its images at the start: samples, inputs, and what is likely a mistake."""

import logging

import numpy as np

from conf.errors import counted, first_few
from conf.schema import DataConfig
from loaders.index import Index
from loaders.rectangles import crop_shapes, output_size, resized_sizes

log = logging.getLogger(__name__)

LEAST_SHARE = 0.25
"""Share of an image's area below which a crop is likely a mistake."""

GEOMETRY = ("random_crop", "random_resized_crop", "hflip", "vflip", "rotation", "random_scale")
"""Keys of `data` that move what an image shows, at random."""


def describe(data: DataConfig, train_index: Index, val_index: Index) -> tuple[str, ...]:
    """Describe the data, such as `photos: 900 training and 100 validation samples, 3 classes (cat,
    cow, dog)`, the inputs, and what may be wrong."""
    lines = [
        f"{train_index.name.rpartition('/')[0]}: {len(train_index):,} training and "
        f"{len(val_index):,} validation samples, {train_index.target.describe()}",
        _describe_inputs(train_index, data),
        *train_index.notes,
    ]
    moved = [f"data.{key}" for key in GEOMETRY if getattr(data, key)]
    if moved and train_index.target.kind == "numbers":
        lines.append(
            f"the labels' numbers do not move with {', '.join(moved)}: none may be a position"
        )
    return tuple(lines)


def warn(data: DataConfig, indexes: tuple[Index, ...]) -> None:
    """Warn of files that are left out, and of inputs that show little of the images."""
    for index in indexes:
        if index.left_out:
            log.warning(
                "%s: %s left out: %s",
                *(index.name, counted(len(index.left_out), "file")),
                first_few(f"{path} ({reason})" for path, reason in index.left_out.items()),
            )
    index = indexes[0]
    is_patch = data.random_crop and len(index.sides) > 1
    share = np.median(_shown_shares(index, data))
    if share < LEAST_SHARE and not is_patch:
        log.warning(
            "data.crop=%s with data.resize=%s shows %.1f%% of an image's area; set data.resize to "
            "a size near data.crop",
            *(data.crop, data.resize or "null", 100 * share),
        )


def _shown_shares(index: Index, data: DataConfig) -> np.ndarray:
    """Return the share of an image's area that the crop of evaluation shows, (M,), by the sizes
    `index.distinct_sizes`."""
    sizes = index.distinct_sizes
    return crop_shapes(index, data, sizes).prod(axis=1) / sizes.prod(axis=1)


def _describe_inputs(index: Index, data: DataConfig) -> str:
    """Describe the inputs and what is done to images to get them, such as `inputs: 28x28, 3
    channels: resized from 40x40 to 256x256, 28x28 cut (1.2% of the area)`."""
    height, width = output_size(data, index)
    sizes, shares = index.distinct_sizes, _shown_shares(index, data)
    resized = sizes if index.is_resized else resized_sizes(data, sizes)
    steps = []
    if (resized != sizes).any():
        steps.append(f"resized from {_range(sizes)} to {_range(resized)}")
    elif (sizes != (height, width)).any():
        steps.append(f"images of {_range(sizes)}")
    if (resized != (height, width)).any():
        low, high = (f"{share:.1%}" for share in (shares.min(), shares.max()))
        share = low if low == high else f"{low} to {high}"
        steps.append(f"{height}x{width} cut ({share} of the area)")
    if data.random_resized_crop is not None:
        low, high = (f"{share:.0%}" for share in data.random_resized_crop)
        steps.append(f"in training {low} to {high} of the area")
    for chance, way in ((data.hflip, "left-right"), (data.vflip, "upside-down")):
        steps += [f"{chance:.0%} flipped {way}"] if chance else []
    inputs = f"inputs: {height}x{width}, {counted(index.inputs.channels, 'channel')}"
    inputs += " of 16 bits" if index.inputs.dtype == "uint16" else ""
    return f"{inputs}: {', '.join(steps)}" if steps else inputs


def _range(sizes: np.ndarray) -> str:
    """Return (N, 2) heights and widths as text, such as `28x28` or `60-64x80`."""
    ends = zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True)
    return "x".join(f"{low}-{high}" if low < high else f"{low}" for low, high in ends)
