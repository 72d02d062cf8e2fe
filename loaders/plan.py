"""What happens to which sample in an epoch: a table, one row a sample, the same for every backend.

A row names a sample, a rectangle of it, flips and colour factors; a backend cuts out the rectangle,
resizes it to the output size and flips it. The table is computed from (seed, epoch) alone by a
counter-based generator, so no worker, rank or earlier batch can influence it: a shard is every
`world_size`-th row, and a resumed run starts at a row.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import DistributedSampler

from loaders.index import BadFileError, Index

if TYPE_CHECKING:
    from conf.schema import DataConfig

log = logging.getLogger(__name__)

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
    sizes = np.unique(index.sizes if index.resized else resized_sizes(data, index.sizes), axis=0)
    if len(sizes) > 1:
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
    crop_height, crop_width = output_size(data, index)
    if data.crop is None:
        return heights, widths
    if data.resize is None or index.resized:
        scale_y = scale_x = np.ones(len(heights))
    elif isinstance(data.resize, int):
        scale_y = scale_x = np.minimum(heights, widths) / data.resize
    else:
        scale_y, scale_x = heights / data.resize[0], widths / data.resize[1]
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

    A sample that turns out to be undecodable joins `bad` (sample: reason). In training the next row of
    this rank in the epoch whose sample is good takes the place of its row, in evaluation the row is left
    out. This follows from the plan and the files alone: when the sample was found does not matter.

    Raises:
        ValueError: the split has fewer samples than a global batch (training) or than ranks, or
            `data.on_error` is unknown.
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
        if data.on_error not in ("raise", "skip"):
            raise ValueError(f"data.on_error={data.on_error} is unknown; use raise or skip")
        self.index, self.data = index, data
        self.bad: dict[int, str] = {}
        self.global_batch_size = global_batch_size
        self.start_row = 0
        self.plan()  # bad sizes are reported now, not in the first epoch

    def plan(self) -> np.ndarray:
        """The whole table of the current epoch, of all ranks."""
        return epoch_plan(self.index, self.data, self.seed, self.epoch, self.shuffle)

    def description(self) -> dict[str, str]:
        """All that the plan of an epoch depends on: equal descriptions give equal plans."""
        keys = (
            "resize",
            "crop",
            "random_crop",
            "random_resized_crop",
            "hflip",
            "vflip",
            "colour_jitter",
        )
        settings = {f"data.{key}": str(getattr(self.data, key)) for key in keys}
        return {"files": self.index.fingerprint, "seed": str(self.seed)} | settings

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
            if len(shard := self.without_bad(rows[self.rank :: self.num_replicas])):
                yield shard

    def set_aside(self, failed: dict[int, str]) -> None:
        """Add samples to `bad`, with the reasons.

        Raises:
            BadFileError: `data.on_error` is `raise`, or there are more than `data.max_bad_samples` now.
        """
        for sample, reason in failed.items():
            if self.data.on_error == "raise":
                raise BadFileError(f"{reason}, or leave out bad files with data.on_error=skip")
            if sample not in self.bad:
                self.bad[sample] = reason
                log.warning(
                    "%s (%s; bad sample %d, data.max_bad_samples=%d)",
                    *(reason, "replaced" if self.shuffle else "left out"),
                    *(len(self.bad), self.data.max_bad_samples),
                )
        if len(self.bad) > self.data.max_bad_samples:
            raise BadFileError(
                f"{len(self.bad)} samples of {self.index.name} are bad, more than data.max_bad_samples="
                f"{self.data.max_bad_samples}, the last one: {list(self.bad.values())[-1]}; "
                "python -m loaders.check lists all of them"
            )

    def without_bad(self, rows: np.ndarray) -> np.ndarray:
        """Rows of this rank, those of `bad` samples replaced or left out.

        Raises:
            BadFileError: no good sample is left to replace one.
        """
        if not self.bad:
            return rows
        bad = np.array(list(self.bad), np.int64)
        is_bad = np.isin(rows["sample"], bad)
        if not self.shuffle or not is_bad.any():
            return rows[~is_bad]
        plan, rows = self.plan()[: self.num_rows], rows.copy()
        is_good = ~np.isin(plan["sample"], bad)
        for number in np.flatnonzero(is_bad):
            place = np.flatnonzero(plan["sample"] == rows["sample"][number])[0]
            following = np.arange(place, place + self.num_rows, self.num_replicas) % self.num_rows
            if not is_good[following].any():
                raise BadFileError(f"all samples of {self.index.name} on rank {self.rank} are bad")
            rows[number] = plan[following[is_good[following].argmax()]]
        return rows
