"""What happens to which sample in an epoch: a table, one row a sample, the same for every backend.

A row names a sample, a rectangle of it and what the augmentations do; a backend cuts out the
rectangle, resizes it to the output size and flips it. The table is computed from (seed, epoch) alone
by a counter-based generator, so no worker, rank or earlier batch can influence it.
"""

import zlib

import numpy as np

from conf.schema import DataConfig
from loaders.augment import AUGMENTATIONS
from loaders.index import Index

ROW = np.dtype(
    [
        ("sample", "i8"),  # position in the index
        ("y", "i4"),  # the rectangle's top, left, height and width in pixels of the source
        ("x", "i4"),
        ("height", "i4"),
        ("width", "i4"),
        *((name, kind) for a in AUGMENTATIONS for name, kind, _ in a.columns),
    ]
)


def epoch_plan(index: Index, data: DataConfig, seed: int, epoch: int, train: bool) -> np.ndarray:
    """The table of one epoch.

    Args:
        index: the split's samples.
        data: what to do with them.
        seed: together with `epoch`, all that the random columns depend on.
        epoch: counts from 0.
        train: shuffle and augment; otherwise in the index's order, cropped at the centre.

    Returns:
        Array of dtype `ROW`, one row for each sample of the index, in the order of the epoch.

    Raises:
        ValueError: images are smaller than the crop.
    """

    def stream(column: str) -> np.random.Generator:
        counter = [0, 0, 0, zlib.crc32(column.encode())]
        return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=counter))

    count = len(index)
    rows = neutral_rows(stream("sample").permutation(count) if train else np.arange(count))
    sizes, shapes = index.sizes[rows["sample"]], crop_shapes(index, data, train)
    if shapes is not None:
        rows["height"], rows["width"] = shapes[rows["sample"]].T
        rows["y"], rows["x"] = (sizes - shapes[rows["sample"]]).T // 2
    if train:
        for augmentation in AUGMENTATIONS:
            augmentation.draw(rows, sizes, data, stream)
    return rows


def neutral_rows(samples: np.ndarray) -> np.ndarray:
    """Rows of these samples that augment nothing, still without a rectangle."""
    rows = np.zeros(len(samples), ROW)
    rows["sample"] = samples
    for augmentation in AUGMENTATIONS:
        for name, _, neutral in augmentation.columns:
            rows[name] = neutral
    return rows


def output_size(data: DataConfig, index: Index) -> tuple[int, int]:
    """(height, width) in pixels of every image that the plan makes.

    Raises:
        ValueError: `data.crop` and `data.resize` leave the size open and the images differ in size.
    """
    if data.crop is not None:
        return (data.crop, data.crop) if isinstance(data.crop, int) else tuple(data.crop)
    sizes = np.unique(index.sizes if index.resized else resized_sizes(data, index.sizes), axis=0)
    if len(sizes) > 1:
        raise ValueError(
            f"the images of {index.name} have different sizes, from {sizes.min(axis=0).tolist()} to "
            f"{sizes.max(axis=0).tolist()} (height, width); set data.crop=[H,W] or data.resize=[H,W]"
        )
    return int(sizes[0, 0]), int(sizes[0, 1])


def resized_sizes(data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """(N, 2) height and width of images of these sizes after `data.resize`; pixels."""
    if data.resize is None:
        return sizes
    if not isinstance(data.resize, int):
        return np.tile(np.array(data.resize, sizes.dtype), (len(sizes), 1))
    factor = data.resize / sizes.min(axis=1, keepdims=True)
    return np.maximum(1, np.rint(sizes * factor)).astype(sizes.dtype)


def crop_shapes(index: Index, data: DataConfig, train: bool) -> np.ndarray | None:
    """(N, 2) height and width of each sample's rectangle, which becomes the crop once the whole image is
    resized, in pixels of the source; None where they are random.

    Raises:
        ValueError: images are smaller than the crop.
    """
    if train and data.random_resized_crop is not None:
        return None
    sizes = index.sizes
    crop = output_size(data, index)
    if data.crop is None:
        return sizes
    if data.resize is None or index.resized:
        factor = np.ones((1, 2))
    elif isinstance(data.resize, int):
        factor = sizes.min(axis=1, keepdims=True) / data.resize
    else:
        factor = sizes / np.array(data.resize)
    shapes = np.maximum(1, np.rint(np.broadcast_to(crop * factor, sizes.shape))).astype(int)
    too_small = np.flatnonzero((shapes > sizes).any(axis=1))
    if len(too_small):
        (height, width), (needed_height, needed_width) = sizes[too_small[0]], shapes[too_small[0]]
        raise ValueError(
            f"{len(too_small)} of {len(index)} images of {index.name} are smaller than the crop: one "
            f"is {height}x{width} but data.crop needs {needed_height}x{needed_width} of it (height x "
            "width); use a smaller data.crop or a larger data.resize"
        )
    return shapes
