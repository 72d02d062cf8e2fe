"""The Dataset of images: rows of the plan to uint8 or uint16 images."""

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


class ImageDataset(Dataset[Batch]):
    """Reads images, cut to the rows' rectangles and resized to `rectangles.read_sizes()`.

    Threads of the process share each batch: decoding and resizing release the interpreter's lock.
    """

    def __init__(self, rectangles: Rectangles, num_threads: int) -> None:
        self.rectangles, self.num_threads = rectangles, num_threads
        self.index, self.sizes = rectangles.index, rectangles.read_sizes()
        self.pool = torch_threads(num_threads, "load")

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
            whole = self.index.read_batch(rows["sample"])
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
            reduces = self.rectangles.data.reduced_decoding
            for side, size in enumerate(self.sizes):
                images[side][number] = self.index.read_part(sample, side, rectangle, size, reduces)

        for running in [self.pool.submit(fill) for _ in range(self.num_threads)]:
            running.result()
        if bad and not self.rectangles.train:
            is_good = ~np.isin(rows["sample"], [*bad])
            rows, images = rows[is_good], [side[is_good] for side in images]
        return Batch(rows, tuple(map(torch.from_numpy, images)), bad)
