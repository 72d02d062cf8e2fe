"""The Dataset of images: rows of the plan to uint8 or uint16 images."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from conf.errors import UserError
from loaders.batch import Batch
from loaders.index import BadFileError
from loaders.limits import torch_threads
from loaders.rectangles import Rectangles

RECTANGLE = ["y", "x", "height", "width"]


@dataclass(eq=False)
class ImageDataset(Dataset[Batch]):
    """Reads batches of rows: images that are cut to the rows' rectangles and resized to
    `rectangles.read_sizes()`. Threads of the process share each batch.

    Threads are enough, because decoding and resizing release Python's interpreter lock.
    """

    rectangles: Rectangles
    num_threads: int

    def __post_init__(self) -> None:
        self.index, self.sizes = self.rectangles.index, self.rectangles.read_sizes()
        self.source = self.index.source
        self.pool = torch_threads(self.num_threads, "load")

    def __reduce__(self) -> Any:
        return ImageDataset, (self.rectangles, self.num_threads)

    def __getitems__(self, rows: np.ndarray) -> Batch:
        """Read a batch. A bad sample ends the run or, with `data.on_error=skip`, is replaced by the
        one that follows it in the index; in evaluation it is left out."""
        try:
            return self._copied(rows) or self._read(rows.copy())
        except UserError as error:
            return Batch(rows, None, error=error)

    def _copied(self, rows: np.ndarray) -> Batch | None:
        """Copy a batch whose images need neither decoding nor resizing; None: it is another one, or
        has a bad sample, which `_read` names or skips."""
        height, width = self.sizes[0]
        if (rows["height"] != height).any() or (rows["width"] != width).any():
            return None
        try:
            whole = self.source.read_batch(rows["sample"])
        except BadFileError:
            return None
        if whole is None:
            return None
        images = torch.from_numpy(whole)
        if images.shape[1:3] != (height, width):
            corners = zip(images, rows["y"].tolist(), rows["x"].tolist(), strict=True)
            images = torch.stack([image[y : y + height, x : x + width] for image, y, x in corners])
        return Batch(rows, (images,))

    def _read(self, rows: np.ndarray) -> Batch:
        # Unlike torch, NumPy asks Linux for huge pages, which take a sixth of the time.
        images = [
            np.empty((len(rows), *size, side.channels), side.dtype)
            for side, size in zip(self.index.sides, self.sizes, strict=True)
        ]
        bad: dict[int, str] = {}
        numbers = iter(range(len(rows)))  # a free thread takes the next one

        def fill() -> None:
            for number in numbers:
                self.rectangles.load(rows, number, read, bad)

        def read(number: int, row: np.void) -> None:
            sample, rectangle = int(row["sample"]), row[RECTANGLE].item()
            for side, spec in enumerate(self.index.sides):
                images[side][number] = self.source.read_part(
                    *(sample, side, spec, rectangle, self.sizes[side]),
                    self.rectangles.data.reduced_decoding,
                )

        for running in [self.pool.submit(fill) for _ in range(self.num_threads)]:
            running.result()
        if bad and not self.rectangles.train:
            is_good = ~np.isin(rows["sample"], [*bad])
            rows, images = rows[is_good], [side[is_good] for side in images]
        return Batch(rows, tuple(map(torch.from_numpy, images)), bad)
