"""Images by torch's `DataLoader`: threads of this process, or of each worker process, read them."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from conf.errors import UserError
from conf.schema import Config
from loaders.batch import Batch
from loaders.index import BadFileError, share
from loaders.limits import cpus_per_rank, torch_threads
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.transform import ImageTransform
from loaders.workers import data_loader, default_workers

RECTANGLE = ["y", "x", "height", "width"]


def pytorch_loader(plan: Plan, transform: ImageTransform, cfg: Config) -> Loader:
    """Build the loader of a plan."""
    options, device, index = cfg.loader, transform.device, transform.index
    is_in_memory = index.form == "pixels" and index.columns.folder is None
    num_workers = options.num_workers
    if num_workers is None:
        # Pixels in memory need none.
        num_samples = 0 if index.form == "pixels" else plan.num_rows
        num_workers = default_workers(device, num_samples, options.num_threads)
    if num_workers:
        share(index, cfg.data)
    num_threads = options.num_threads or max(1, cpus_per_rank() // max(1, num_workers))
    dataset = ImageDataset(transform.rectangles, num_threads)
    images = [torch.from_numpy(images) for images in dataset.empty(plan.batch_size)]
    batches = data_loader(dataset, plan, num_workers, cfg, device, images)
    return Loader(
        *(plan, batches, transform, transform.info(plan), device),
        num_threads=cpus_per_rank(),
        # Digits in memory are copied in less time than it takes to wait for a thread.
        num_ahead=0 if num_workers or is_in_memory else options.prefetch_factor,
    )


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

    def empty(self, count: int) -> list[np.ndarray]:
        """Return memory for the images of so many rows, by side."""
        # Unlike torch, NumPy asks Linux for huge pages, which take a sixth of the time.
        return [
            np.empty((count, *size, side.channels), side.dtype)
            for side, size in zip(self.index.sides, self.sizes, strict=True)
        ]

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
        height, width = size = self.sizes[0]
        if (rows["height"] != height).any() or (rows["width"] != width).any():
            return None
        try:
            images = self.index.read_batch(rows, size)
        except BadFileError:
            return None
        return None if images is None else Batch(rows, (torch.from_numpy(images),))

    def _read(self, rows: np.ndarray) -> Batch:
        images = self.empty(len(rows))
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
