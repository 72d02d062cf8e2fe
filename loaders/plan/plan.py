"""The rows of the plan of an epoch: a table with one row per sample, the same for every backend.

A row holds a sample, a rectangle of it and the values of the augmentations; a backend cuts out the
rectangle, resizes it to the output size and flips it. The table is a function of (seed, epoch,
position): any rows of it can be computed, at a cost that does not depend on how many there are, and
no worker, rank or earlier batch can influence them.
"""

import logging

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import Config, DataConfig
from loaders.augment import AUGMENTATIONS, active_augmentations
from loaders.epoch import ORDER, EpochSampler, stream_key, uniform
from loaders.index import Index

log = logging.getLogger(__name__)

ROW = np.dtype(
    [
        ("position", "i8"),  # in the epoch, from 0
        ("sample", "i8"),  # position in the index
        ("y", "i4"),  # the rectangle's top, left, height and width in pixels of the source
        ("x", "i4"),
        ("height", "i4"),
        ("width", "i4"),
        *((name, kind) for a in AUGMENTATIONS for name, kind, _ in a.columns),
    ]
)


def neutral_rows(samples: np.ndarray) -> np.ndarray:
    """Return rows of these samples without augmentations and without a rectangle."""
    rows = np.zeros(len(samples), ROW)
    rows["sample"] = samples
    for augmentation in AUGMENTATIONS:
        for name, _, neutral in augmentation.columns:
            rows[name] = neutral
    return rows


def output_size(data: DataConfig, index: Index) -> tuple[int, int]:
    """Return (height, width) in pixels of every image after its crop and resize.

    Raises:
        UserError: `data.crop` and `data.resize` leave the size open and the images differ in size.
    """
    if data.crop is not None:
        return (data.crop, data.crop) if isinstance(data.crop, int) else tuple(data.crop)
    sizes = index.distinct_sizes
    sizes = np.unique(sizes if index.resized else resized_sizes(data, sizes), axis=0)
    if len(sizes) > 1:
        raise UserError(
            f"the images of {index.name} have different sizes, from {sizes.min(axis=0).tolist()} "
            f"to {sizes.max(axis=0).tolist()} (height, width); set data.crop or data.resize=[H,W]"
        )
    return int(sizes[0, 0]), int(sizes[0, 1])


def resized_sizes(data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """Return (N, 2) heights and widths in pixels of images of these sizes after `data.resize`."""
    if data.resize is None:
        return sizes
    if not isinstance(data.resize, int):
        return np.tile(np.array(data.resize, sizes.dtype), (len(sizes), 1))
    factor = data.resize / sizes.min(axis=1, keepdims=True)
    return np.maximum(1, np.rint(sizes * factor)).astype(sizes.dtype)


def crop_shapes(index: Index, data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """Return the height and width of the rectangle that becomes the crop when the whole image is
    resized, (N, 2) in pixels of source images of these sizes."""
    if data.crop is None:
        return sizes
    if data.resize is None or index.resized:
        factor = np.ones((1, 2))
    elif isinstance(data.resize, int):
        factor = sizes.min(axis=1, keepdims=True) / data.resize
    else:
        factor = sizes / np.array(data.resize)
    crop = np.array(output_size(data, index))
    return np.maximum(1, np.rint(np.broadcast_to(crop * factor, sizes.shape))).astype(int)


def distinct_shapes(index: Index, data: DataConfig) -> np.ndarray:
    """Return `crop_shapes` of `index.distinct_sizes`, (M, 2).

    Raises:
        UserError: images are smaller than the crop.
    """
    sizes = index.distinct_sizes
    shapes = crop_shapes(index, data, sizes)
    for size, needed in zip(sizes.tolist(), shapes.tolist(), strict=True):
        if needed[0] > size[0] or needed[1] > size[1]:
            raise UserError(
                f"images of {index.name} are smaller than the crop: one is {size[0]}x{size[1]} but "
                f"data.crop needs {needed[0]}x{needed[1]} of it (height x width); use a smaller "
                "data.crop or a larger data.resize"
            )
    return shapes


class PlanSampler(EpochSampler):
    """Yields rows of the plan, of dtype `ROW`; else as `EpochSampler`.

    Attributes:
        augmentations: active augmentations; none in evaluation.
        output_size: (height, width) of the images in pixels, after crop and resize.
        distinct_shapes: (M, 2) height and width in pixels of the rectangles of inputs of the sizes
            `index.distinct_sizes`; None: they are random.

    Raises:
        UserError: as `EpochSampler`, images are smaller than the crop, or an augmentation does not
            fit targets or batches.
    """

    advice = "; python -m loaders.check lists all of them"

    def __init__(self, index: Index, cfg: Config, rank: int, world_size: int, train: bool) -> None:
        if index.left_out and rank == 0:
            log.warning(
                "%s: %s left out (data.max_bad_samples=%d): %s",
                *(index.name, counted(len(index.left_out), "file"), cfg.data.max_bad_samples),
                first_few(f"{path} ({reason})" for path, reason in index.left_out.items()),
            )
        super().__init__(index.name, len(index), cfg, rank, world_size, train, index.left_out)
        self.index, data = index, cfg.data
        self.order_name = index.order_name(data) if train else ORDER
        self.augmentations = active_augmentations(data) if train else ()
        for augmentation in self.augmentations:
            augmentation.check(data, index.target, cfg.global_batch_size, world_size)
        self.output_size = output_size(data, index)
        is_random = train and data.random_resized_crop is not None
        self.distinct_shapes = None if is_random else distinct_shapes(index, data)

    def plan(self, positions: np.ndarray) -> np.ndarray:
        """Return rows of the current epoch's plan, which all ranks share, (len(positions),) of
        dtype `ROW`.

        They depend on (seed, epoch, position) alone: any rows can be computed, in any order.
        """

        def random(column: str, num: int) -> np.ndarray:
            return uniform(positions, stream_key(column, self.seed, self.epoch), num)

        samples = self.index.shuffled(positions, self) if self.train else positions
        rows = neutral_rows(samples)
        rows["position"] = positions
        sizes = self.index.sizes[samples]
        if self.distinct_shapes is not None:
            shapes = crop_shapes(self.index, self.data, sizes)
            rows["height"], rows["width"] = shapes.T
            rows["y"], rows["x"] = (sizes - shapes).T // 2
        for augmentation in self.augmentations:
            augmentation.draw(rows, sizes, self.data, random)
        return rows

    def description(self) -> dict[str, str]:
        """Describe everything that the plan of an epoch depends on: equal descriptions give equal
        plans."""
        keys = ("resize", "crop", *(key for a in AUGMENTATIONS for key in a.keys))
        settings = {f"data.{key}": str(getattr(self.data, key)) for key in keys}
        facts = {"files": self.index.fingerprint, "seed": str(self.seed), "order": self.order_name}
        return facts | settings

    def fetch(self, rows: np.ndarray) -> None:
        self.index.fetch(rows, self)
