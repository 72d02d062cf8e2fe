"""The rows of images: which rectangle of a sample is read, and the values of its augmentations.

A backend cuts out the rectangle, resizes it to the output size and flips it. A row is a function of
(seed, epoch, position, sample): no worker, rank or earlier batch can influence it.
"""

import numpy as np

from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.augment import AUGMENTATIONS, active_augmentations
from loaders.index import Index
from loaders.order import stream_key, uniform
from loaders.plan import Samples

ROW = np.dtype(
    [
        ("position", "i8"),  # in the epoch, from 0
        ("epoch", "i8"),  # whose random numbers these are
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


def resized_sizes(data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """Return (N, 2) heights and widths in pixels of images of these sizes after `data.resize`."""
    if data.resize is None:
        return sizes
    if not isinstance(data.resize, int):
        return np.tile(np.array(data.resize, sizes.dtype), (len(sizes), 1))
    factor = data.resize / sizes.min(axis=1, keepdims=True)
    return np.maximum(1, np.rint(sizes * factor)).astype(sizes.dtype)


class Rectangles(Samples):
    """The images of an index, and what is read of them.

    Args:
        index: index of the split.
        cfg: `cfg.data`, `cfg.seed` and `cfg.global_batch_size` are used.
        world_size: number of ranks.
        train: augment the images.

    Attributes:
        augmentations: active augmentations; none in evaluation.
        output_size: (height, width) of the images in pixels, after crop and resize.
        read_size: (height, width) of the images that a backend delivers, usually the same. If all
            rows enlarge rectangles of one size, it is their size, and the device enlarges the whole
            batch, so that fewer bytes are copied to it.
        distinct_shapes: (M, 2) height and width in pixels of the rectangles of inputs of the sizes
            `index.distinct_sizes`; None: they are random.

    Raises:
        UserError: images are smaller than the crop, or have several sizes without one; or an
            augmentation does not fit targets or batches.
    """

    def __init__(self, index: Index, cfg: Config, world_size: int, train: bool) -> None:
        self.index, self.data, self.seed, self.train = index, cfg.data, cfg.seed, train
        self.name, self.skips = index.name, cfg.data.on_error == "skip"
        self.augmentations = active_augmentations(cfg.data) if train else ()
        for augmentation in self.augmentations:
            augmentation.check(cfg.data, index.target, cfg.global_batch_size, world_size)
        self.read_size = self.output_size = self._output_size()
        self.distinct_shapes: np.ndarray | None = None
        if not train or cfg.data.random_resized_crop is None:
            shapes = self.distinct_shapes = self.crop_shapes(index.distinct_sizes)
            self._check_shapes(shapes)
            if (shapes == shapes[:1]).all() and (shapes <= self.output_size).all():
                self.read_size = int(shapes[0, 0]), int(shapes[0, 1])

    def _output_size(self) -> tuple[int, int]:
        data, index = self.data, self.index
        if data.crop is not None:
            return (data.crop, data.crop) if isinstance(data.crop, int) else tuple(data.crop)
        sizes = index.distinct_sizes
        sizes = np.unique(sizes if index.is_resized else resized_sizes(data, sizes), axis=0)
        if len(sizes) > 1:
            raise UserError(
                f"the images of {index.name} have different sizes, from "
                f"{sizes.min(axis=0).tolist()} to {sizes.max(axis=0).tolist()} (height, width); "
                "set data.crop or data.resize=[H,W]"
            )
        return int(sizes[0, 0]), int(sizes[0, 1])

    def crop_shapes(self, sizes: np.ndarray) -> np.ndarray:
        """Return the height and width of the rectangle that becomes the crop when the whole image
        is resized, (N, 2) in pixels of source images of these sizes."""
        resize = self.data.resize
        if self.data.crop is None:
            return sizes
        if resize is None or self.index.is_resized:
            factor = np.ones((1, 2))
        elif isinstance(resize, int):
            factor = sizes.min(axis=1, keepdims=True) / resize
        else:
            factor = sizes / np.array(resize)
        crop = np.array(self.output_size)
        return np.maximum(1, np.rint(np.broadcast_to(crop * factor, sizes.shape))).astype(int)

    def _check_shapes(self, shapes: np.ndarray) -> None:
        """Raise UserError if images are smaller than their rectangles."""
        sizes = self.index.distinct_sizes
        small = (shapes > sizes).any(axis=1)
        if small.any():
            size, needed = (f"{pair[0]}x{pair[1]}" for pair in (sizes[small][0], shapes[small][0]))
            raise UserError(
                f"images of {self.name} are smaller than the crop: one is {size} but data.crop "
                f"needs {needed} of it (height x width); use a smaller data.crop or a larger "
                "data.resize"
            )

    def __len__(self) -> int:
        return len(self.index)

    def read_sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of the images that a backend delivers of each side; masks have the
        inputs' size."""
        return [
            self.output_size
            if side.interpolation == "nearest"
            else (side.size_factor * self.read_size[0], side.size_factor * self.read_size[1])
            for side in self.index.sides
        ]

    def order(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        if not self.train:
            return positions
        return self.index.source.shuffled(positions, len(self), self.seed, epoch)

    def rows(self, positions: np.ndarray, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Return rows of dtype `ROW`."""

        def random(column: str, num: int) -> np.ndarray:
            return uniform(positions, stream_key(column, self.seed, epoch), num)

        rows = neutral_rows(samples)
        rows["position"], rows["epoch"] = positions, epoch
        sizes = self.index.sizes[samples]
        if self.distinct_shapes is not None:
            shapes = self.crop_shapes(sizes)
            rows["height"], rows["width"] = shapes.T
            rows["y"], rows["x"] = (sizes - shapes).T // 2
        for augmentation in self.augmentations:
            augmentation.draw(rows, sizes, self.data, random)
        return rows

    def following(self, sample: int) -> int:
        return self.index.source.following(sample, len(self))

    def description(self) -> dict[str, str]:
        keys = ("resize", "crop", *(key for a in AUGMENTATIONS for key in a.keys))
        settings = {f"data.{key}": str(getattr(self.data, key)) for key in keys}
        order = self.index.source.order_name
        return {"files": self.index.fingerprint, "seed": str(self.seed), "order": order} | settings

    def fetch(self, rows: np.ndarray) -> None:
        self.index.source.fetch(rows, self.seed, self.train)
