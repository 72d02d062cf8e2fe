"""The Dataset of images: rows of the plan to uint8 or uint16 images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conf.errors import UserError
from loaders.batch import Batch
from loaders.index import BadFileError
from loaders.limits import torch_threads
from loaders.plan import MOST_BAD
from loaders.rectangles import Rectangles

PLACE = ["sample", "y", "x", "height", "width", "vflip", "hflip"]
"""Columns of the rows that say what is read."""


@dataclass(eq=False)
class ImageDataset(Dataset[Batch]):
    """Reads batches of rows: images that are cut to the rows' rectangles, resized to
    `rectangles.read_sizes()` and flipped. Threads of the process share each batch.

    Threads are enough, because decoding and resizing release Python's interpreter lock.
    """

    rectangles: Rectangles
    num_threads: int

    def __post_init__(self) -> None:
        self.index, self.sizes = self.rectangles.index, self.rectangles.read_sizes()
        self.source = self.index.source
        self.reduces = self.rectangles.data.reduced_decoding
        self.skips = self.rectangles.data.on_error == "skip"
        # Operations of a thread are not split among further threads, which would take longer.
        self.pool = torch_threads(self.num_threads, "load", 1)

    def __reduce__(self) -> Any:
        return ImageDataset, (self.rectangles, self.num_threads)

    def __getitems__(self, rows: np.ndarray) -> Batch:
        """Read a batch. A bad sample ends the run or, with `data.on_error=skip`, is replaced by the
        one that follows it in the index; in evaluation it is left out."""
        try:
            return self._copied(rows) or self._read(rows)
        except UserError as error:
            return Batch(rows, None, error=error)

    def _copied(self, rows: np.ndarray) -> Batch | None:
        """Copy a batch whose images need neither decoding nor resizing; None: it is another one, or
        has a bad sample to skip."""
        height, width = self.sizes[0]
        if (rows["height"] != height).any() or (rows["width"] != width).any():
            return None
        try:
            whole = self.source.read_batch(rows["sample"])
        except BadFileError:
            if not self.skips:
                raise
            return None
        if whole is None:
            return None
        images = torch.from_numpy(whole)
        if images.shape[1:3] != (height, width):
            corners = zip(images, rows["y"].tolist(), rows["x"].tolist(), strict=True)
            images = torch.stack([image[y : y + height, x : x + width] for image, y, x in corners])
        pixels = movable(images)
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                pixels[flipped] = pixels[flipped].flip(dim)
        return Batch(rows, (images,))

    def _read(self, rows: np.ndarray) -> Batch:
        images = tuple(
            # Unlike torch, NumPy asks Linux for huge pages, which take a sixth of the time.
            torch.from_numpy(np.empty((len(rows), *size, side.channels), side.dtype))
            for side, size in zip(self.index.sides, self.sizes, strict=True)
        )
        batch = Batch(rows.copy() if self.skips else rows, images)
        arrays = [side.numpy() for side in images]
        places = enumerate(rows[PLACE].tolist())  # a free thread takes the next one
        if self.num_threads == 1:
            self._fill(batch, arrays, places)
        else:
            fills = [
                self.pool.submit(self._fill, batch, arrays, places) for _ in range(self.num_threads)
            ]
            for fill in fills:
                fill.result()
        if batch.bad and not self.rectangles.train:
            good = ~np.isin(rows["sample"], [*batch.bad])
            kept = tuple(torch.from_numpy(side[good]) for side in arrays)
            return Batch(rows[good], kept, batch.bad)
        return batch

    def _fill(
        self, batch: Batch, arrays: list[np.ndarray], places: Iterator[tuple[int, Any]]
    ) -> None:
        """Fill in the images of these positions in the batch, each with its values of `PLACE`."""
        for position, place in places:
            try:
                self._fill_one(arrays, position, place)
            except BadFileError as error:
                if not self.skips:
                    raise
                batch.bad[place[0]] = str(error)
                if self.rectangles.train:
                    self._replace(batch, arrays, position)

    def _fill_one(self, arrays: list[np.ndarray], position: int, place: Any) -> None:
        sample, *rectangle, vflip, hflip = place
        dims = [dim for dim, flips in enumerate((vflip, hflip)) if flips]
        sides = zip(self.index.sides, self.sizes, arrays, strict=True)
        for side, (spec, size, filled) in enumerate(sides):
            image = self.source.read_part(sample, side, spec, rectangle, size, self.reduces)
            if dims:  # which takes NumPy ten times as long
                flipped = movable(torch.from_numpy(image)).flip(dims)
                image = flipped.numpy().view(image.dtype)
            filled[position] = image

    def _replace(self, batch: Batch, arrays: list[np.ndarray], position: int) -> None:
        """Fill in the next good sample in place of a bad one.

        Raises:
            UserError: there are `MOST_BAD` bad ones in a row, or none is good.
        """
        for _ in range(min(MOST_BAD, len(self.index)) - 1):
            row = batch.rows[position] = self.rectangles.substitute(batch.rows[position])
            try:
                self._fill_one(arrays, position, row[PLACE].tolist())
            except BadFileError as error:
                batch.bad[int(row["sample"])] = str(error)
            else:
                return
        last = [*batch.bad.values()][-1]
        raise UserError(
            f"{self.index.name} has {min(MOST_BAD, len(self.index))} bad samples in a row, the "
            f"last one: {last}"
        )


def movable(images: Tensor) -> Tensor:
    """View an array as a dtype that torch can flip and index, which it cannot with uint16."""
    return images.view(torch.int16) if images.dtype == torch.uint16 else images
