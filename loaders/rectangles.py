"""The rows of images: which rectangle of a sample is read, and the values of its augmentations.

A backend cuts out the rectangle, resizes it to the output size and flips it. A row is a function of
(seed, pass, position, sample): no worker, rank or earlier batch can influence it.
"""

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import Config, DataConfig
from loaders.augment import AUGMENTATIONS, active_augmentations
from loaders.index import Index
from loaders.order import stream_key, uniform
from loaders.plan import ROW, Samples

COLUMNS = [
    *(("y", "i4"), ("x", "i4"), ("height", "i4"), ("width", "i4")),  # in pixels of the source
    *(("hflip", "?"), ("vflip", "?")),
]
"""What a row says beside `ROW` and the columns of the active augmentations."""


def _shrinkage(data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """Return the factors, (N or 1, 1 or 2), by which `data.resize` divides these (N, 2) sizes."""
    if data.resize is None:
        return np.ones((1, 1))
    if isinstance(data.resize, int):
        return sizes.min(axis=1, keepdims=True) / data.resize
    return sizes / np.array(data.resize)


def resized_sizes(data: DataConfig, sizes: np.ndarray) -> np.ndarray:
    """Return (N, 2) heights and widths in pixels of images of these sizes after `data.resize`."""
    return np.maximum(1, np.rint(sizes / _shrinkage(data, sizes))).astype(sizes.dtype)


class Rectangles(Samples):
    """The images of an index, and what is read of them.

    Attributes:
        augmentations: active augmentations; none in evaluation.
        output_size: (height, width) of the images in pixels, after crop and resize.
        read_size: (height, width) of the images that a backend delivers, usually the same. If all
            rows enlarge rectangles of one size, it is their size, and the device enlarges the whole
            batch: image by image, 5-channel TIFFs would have 0.3 times the speed.
        distinct_shapes: (M, 2) height and width in pixels of the rectangles of inputs of the sizes
            `index.distinct_sizes`; None: they are random.

    Raises:
        UserError: images are smaller than the crop, or have several sizes without one; or an
            augmentation does not fit targets or batches.
    """

    def __init__(self, index: Index, cfg: Config, world_size: int, train: bool) -> None:
        super().__init__(index.name, index, cfg, train)
        self.index, self.data = index, cfg.data
        self.augmentations = active_augmentations(cfg.data) if train else ()
        for augmentation in self.augmentations:
            augmentation.check(cfg, index.target, world_size)
        drawn = [column for a in self.augmentations for column in a.columns]
        self.dtype = np.dtype([*ROW, *COLUMNS, *drawn])
        self.read_size = self.output_size = self._output_size()
        self.distinct_shapes: np.ndarray | None = None
        if not train or cfg.data.random_resized_crop is None:
            sizes, shapes = index.distinct_sizes, self.crop_shapes(index.distinct_sizes)
            small = np.flatnonzero((shapes > sizes).any(axis=1))
            if len(small):
                size, needed = ("x".join(map(str, pairs[small[0]])) for pairs in (sizes, shapes))
                raise UserError(
                    f"images of {self.name} are smaller than the crop: one is {size} but data.crop "
                    f"needs {needed} of it (height x width); use a smaller data.crop or a larger "
                    "data.resize"
                )
            self.distinct_shapes = shapes
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
        if self.data.crop is None:
            return sizes
        factor = 1 if self.index.is_resized else _shrinkage(self.data, sizes)
        shapes = np.broadcast_to(np.array(self.output_size) * factor, sizes.shape)
        return np.maximum(1, np.rint(shapes)).astype(int)

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

    def draw(self, rows: np.ndarray) -> None:
        def random(column: str, num: int) -> np.ndarray:
            key = stream_key(column, self.seed, int(rows["pass"][0]))
            return uniform(rows["position"], key, num)

        sizes = self.index.sizes[rows["sample"]]
        if self.distinct_shapes is not None:
            shapes = self.crop_shapes(sizes)
            rows["height"], rows["width"] = shapes.T
            rows["y"], rows["x"] = (sizes - shapes).T // 2
        for augmentation in self.augmentations:
            augmentation.draw(rows, sizes, self.data, random)

    def description(self) -> dict[str, str]:
        keys = ("resize", "crop", *(key for a in AUGMENTATIONS for key in a.keys))
        settings = {f"data.{key}": str(getattr(self.data, key)) for key in keys}
        return super().description() | {"files": self.index.fingerprint} | settings

    def describe(self) -> tuple[str, ...]:
        """Describe, for the log, the files that are left out and, of training, the inputs, such as
        `inputs: 224x224, 3 channels, 73.5% of images of 60-64x80`, and what may be wrong."""
        index, left_out = self.index, self.index.left_out
        lines = []
        if left_out:
            few = first_few(f"{path} ({reason})" for path, reason in left_out.items())
            lines.append(f"{index.name}: {counted(len(left_out), 'file')} left out: {few}")
        if not self.train:
            return tuple(lines)
        height, width = self.output_size
        inputs = f"inputs: {height}x{width}, {counted(index.inputs.channels, 'channel')}"
        if index.inputs.dtype == "uint16":
            inputs += " of 16 bits"
        sizes = index.distinct_sizes
        # Of an image's area, what the crop of evaluation shows.
        share = np.median(self.crop_shapes(sizes).prod(axis=1) / sizes.prod(axis=1))
        if share < 1 or (sizes != (height, width)).any():
            ends = zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True)
            of_sizes = "x".join(f"{low}-{high}" if low < high else f"{low}" for low, high in ends)
            inputs += f", {share:.1%} of images of {of_sizes}"
        lines = [inputs, *index.notes, *lines]
        moving = [key for a in self.augmentations if a.moves for key in a.keys]
        moved = [f"data.{key}" for key in moving if getattr(self.data, key)]
        if moved and index.target.kind == "numbers":
            lines.append(
                f"the labels' numbers do not move with {', '.join(moved)}: none may be a position"
            )
        return tuple(lines)
