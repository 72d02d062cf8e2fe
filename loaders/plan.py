"""What happens to which sample in an epoch: a table, one row a sample, the same for every backend.

A row names a sample, a rectangle of it, flips and colour factors; a backend cuts out the rectangle,
resizes it to the output size and flips it. The table is computed from (seed, epoch) alone by a
counter-based generator, so no worker, rank or earlier batch can influence it: a shard is every
`world_size`-th row, and a resumed run starts at a row.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import DistributedSampler

from loaders.index import Index

if TYPE_CHECKING:
    from conf.schema import DataConfig

ROW = np.dtype(
    [
        ("sample", "i8"),  # position in the index
        ("y", "i4"),  # the rectangle's top, left, height and width in pixels of the source
        ("x", "i4"),
        ("height", "i4"),
        ("width", "i4"),
        ("hflip", "?"),
        ("vflip", "?"),
        ("brightness", "f4"),  # factors, 1 leaves the image as it is
        ("contrast", "f4"),
        ("saturation", "f4"),
    ]
)


def output_size(data: "DataConfig", index: Index) -> tuple[int, int]:
    """(height, width) in pixels of every image that the plan makes.

    Raises:
        ValueError: `data.crop` and `data.resize` leave the size open and the images differ in size.
    """
    if data.crop is not None:
        return data.crop[0], data.crop[1]
    resize = None if index.resized else data.resize
    if resize is not None and not isinstance(resize, int):
        return resize[0], resize[1]
    sizes = np.unique(index.sizes, axis=0)
    if len(sizes) > 1 or resize is not None:
        raise ValueError(
            f"the images of {index.name} have different sizes, from {sizes.min(axis=0).tolist()} to "
            f"{sizes.max(axis=0).tolist()} (height, width); set data.crop=[H,W] or data.resize=[H,W]"
        )
    return int(sizes[0, 0]), int(sizes[0, 1])


def resized_sizes(data: "DataConfig", sizes: np.ndarray) -> np.ndarray:
    """(N, 2) height and width of images of these sizes after `data.resize`; pixels."""
    if data.resize is None:
        return sizes
    if not isinstance(data.resize, int):
        return np.tile(np.array(data.resize, sizes.dtype), (len(sizes), 1))
    scale = data.resize / sizes.min(axis=1, keepdims=True)
    return np.maximum(1, np.rint(sizes * scale)).astype(sizes.dtype)


def epoch_plan(index: Index, data: "DataConfig", seed: int, epoch: int, train: bool) -> np.ndarray:
    """The table of one epoch.

    Args:
        index: the split's samples.
        data: what to do with them.
        seed: together with `epoch`, all that the random columns depend on.
        epoch: counts from 0.
        train: shuffle and augment; otherwise in the index's order, cropped at the centre.

    Returns:
        Array of dtype `ROW`, one row for each sample of the index, in the order of the epoch.
    """

    def stream(column: int) -> np.random.Generator:
        # Each column has a stream of its own: switching one augmentation on leaves the others alone.
        return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, column]))

    count = len(index)
    rows = np.zeros(count, ROW)
    rows["sample"] = stream(0).permutation(count) if train else np.arange(count)
    heights, widths = index.sizes[rows["sample"]].T
    if train and data.random_resized_crop is not None:
        rows["height"], rows["width"] = _random_areas(
            stream(1), heights, widths, data.random_resized_crop
        )
    else:
        rows["height"], rows["width"] = _crop_before_resize(index, data, heights, widths)
    free_y, free_x = heights - rows["height"], widths - rows["width"]
    if train and (data.random_crop or data.random_resized_crop is not None):
        rows["y"] = stream(2).random(count) * (free_y + 1)
        rows["x"] = stream(3).random(count) * (free_x + 1)
    else:
        rows["y"], rows["x"] = free_y // 2, free_x // 2
    if train:
        rows["hflip"] = stream(4).random(count) < data.hflip
        rows["vflip"] = stream(5).random(count) < data.vflip
    for number, name in enumerate(["brightness", "contrast", "saturation"]):
        strength = data.colour_jitter[number] if train else 0.0
        rows[name] = 1 + strength * stream(6 + number).uniform(-1, 1, count) if strength else 1
    return rows


def _crop_before_resize(
    index: Index, data: "DataConfig", heights: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Size of the source's rectangle that becomes the crop once the whole image is resized."""
    if data.resize is None or index.resized:
        scale_y = scale_x = np.ones(len(heights))
    elif isinstance(data.resize, int):
        scale_y = scale_x = np.minimum(heights, widths) / data.resize
    else:
        scale_y, scale_x = heights / data.resize[0], widths / data.resize[1]
    crop_height, crop_width = output_size(data, index)
    height = np.maximum(1, np.rint(crop_height * scale_y)).astype(int)
    width = np.maximum(1, np.rint(crop_width * scale_x)).astype(int)
    too_small = np.flatnonzero((height > heights) | (width > widths))
    if len(too_small):
        first = too_small[0]
        raise ValueError(
            f"{len(too_small)} of {len(index)} images of {index.name} are smaller than the crop: one "
            f"is {heights[first]}x{widths[first]} but data.crop needs {height[first]}x{width[first]} "
            "of it (height x width); use a smaller data.crop or a larger data.resize"
        )
    return height, width


def _random_areas(
    random: np.random.Generator, heights: np.ndarray, widths: np.ndarray, share: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Rectangles with a random share of the area and a random aspect ratio (Szegedy et al. 2015,
    "Going deeper with convolutions", section 6): ten tries, then the largest centre square."""
    tries = 10
    area = (heights * widths)[:, None] * random.uniform(share[0], share[1], (len(heights), tries))
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3), area.shape))
    height = np.rint(np.sqrt(area / ratio)).astype(int)
    width = np.rint(np.sqrt(area * ratio)).astype(int)
    fits = (0 < height) & (height <= heights[:, None]) & (0 < width) & (width <= widths[:, None])
    first = np.arange(len(heights)), fits.argmax(axis=1)
    square = np.minimum(heights, widths)
    any_fits = fits.any(axis=1)
    return np.where(any_fits, height[first], square), np.where(any_fits, width[first], square)


class PlanSampler(DistributedSampler):
    """Walks the plan of the current epoch: yields, batch by batch, the rows of this rank.

    In training every rank gets the same number of batches and the tail of the epoch that does not
    fill a global batch is dropped; in evaluation every row is yielded exactly once over all ranks,
    so that the last batches can be smaller and a rank can have one batch less.

    Raises:
        ValueError: the split has fewer samples than a global batch (training) or than ranks.
    """

    def __init__(
        self,
        index: Index,
        data: "DataConfig",
        seed: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        train: bool,
    ) -> None:
        needed = global_batch_size if train else world_size
        if len(index) < needed:
            raise ValueError(
                f"{index.name} has {len(index)} samples, fewer than "
                + (f"global_batch_size={needed}" if train else f"world_size={needed}")
                + "; use a smaller value or more data"
            )
        super().__init__(
            index,  # type: ignore[arg-type]  # it has a length, which is all that is used
            num_replicas=world_size,
            rank=rank,
            shuffle=train,
            seed=seed,
            drop_last=train,
        )
        self.index, self.data = index, data
        self.global_batch_size = global_batch_size
        self.start_row = 0
        self.plan()  # bad sizes are reported now, not in the first epoch

    def plan(self) -> np.ndarray:
        """The whole table of the current epoch, of all ranks."""
        return epoch_plan(self.index, self.data, self.seed, self.epoch, self.shuffle)

    @property
    def num_rows(self) -> int:
        """Rows of the plan that are used: all, less the dropped tail in training."""
        count = len(self.index)
        return count - count % self.global_batch_size if self.drop_last else count

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        full, rest = divmod(self.num_rows, self.global_batch_size)
        return full + (rest > self.rank)

    def __iter__(self) -> Iterator[np.ndarray]:
        plan = self.plan()
        for start in range(self.start_row, self.num_rows, self.global_batch_size):
            rows = plan[start : min(start + self.global_batch_size, self.num_rows)]
            if len(shard := rows[self.rank :: self.num_replicas]):
                yield shard
