"""The batch sampler of images: the rows of the plan that a rank executes, batch by batch."""

import logging
from collections.abc import Iterator

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import Config
from loaders.augment import AUGMENTATIONS, active_augmentations
from loaders.epoch import ORDER, EpochSampler, stream_key, uniform
from loaders.index import Index, StoredIndex
from loaders.plan.plan import crop_shapes, distinct_shapes, neutral_rows, output_size
from loaders.plan.windows import block_shuffle, next_shards

log = logging.getLogger(__name__)


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
        super().__init__(index.name, len(index), cfg, rank, world_size, train)
        data = cfg.data
        if train and data.shuffle == "window" and index.shards is None:  # part: shards
            raise UserError(
                f"data.shuffle=window needs shards, and {index.name} has none; use "
                "data.shuffle=full, or write shards with python -m loaders.pack format=shards"
            )
        self.augmentations = active_augmentations(data) if train else ()
        for augmentation in self.augmentations:
            augmentation.check(data, index.target, cfg.global_batch_size, world_size)
        self.index = index
        self.output_size = output_size(data, index)
        is_random = train and data.random_resized_crop is not None
        self.distinct_shapes = None if is_random else distinct_shapes(index, data)
        self.left_out = tuple(index.left_out)
        if index.left_out and rank == 0:
            log.warning(
                "%s: %d files are left out (data.max_bad_samples=%d): %s",
                *(index.name, len(index.left_out), data.max_bad_samples),
                first_few(f"{path} ({reason})" for path, reason in index.left_out.items()),
            )
        self.check_limit()

    def order(self, positions: np.ndarray) -> np.ndarray:  # part: shards
        shards = self.index.shards
        if shards is None or not self.train or self.data.shuffle != "window":
            return super().order(positions)
        return block_shuffle(positions, shards, self.data.shuffle_window, self.seed, self.epoch)

    def plan(self, positions: np.ndarray) -> np.ndarray:
        """Return rows of the current epoch's plan, which all ranks share, (len(positions),) of
        dtype `ROW`.

        They depend on (seed, epoch, position) alone: any rows can be computed, in any order.
        """

        def random(column: str, num: int) -> np.ndarray:
            return uniform(positions, stream_key(column, self.seed, self.epoch), num)

        samples = self.order(positions)
        if isinstance(self.index, StoredIndex):  # part: index
            self.index.check(samples)
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
        order, index = ORDER, self.index
        if self.train and self.data.shuffle == "window" and index.shards:  # part: shards
            order += f", windows of {self.data.shuffle_window} shards of {index.shards.fingerprint}"
        return {"files": index.fingerprint, "seed": str(self.seed), "order": order} | settings

    def __iter__(self) -> Iterator[np.ndarray]:  # part: shards
        for rows in super().__iter__():
            self._fetch(rows)
            yield rows

    def _fetch(self, rows: np.ndarray) -> None:  # part: shards
        """Wait until the shards of a batch can be read, and start to fetch the following ones."""
        shards, count = self.index.shards, self.data.shuffle_window
        if shards is None:
            return
        # First, because this marks them as used: the following ones do not replace them.
        shards.fetch(rows["sample"])
        position = int(rows["position"][0])
        if not self.train:
            first = int(np.searchsorted(shards.starts, position, side="right"))
            shards.files.prefetch(range(first, len(shards.starts) - 1)[:count])
        elif self.data.shuffle == "window":
            shards.files.prefetch(next_shards(position, shards, count, self.seed, self.epoch))
