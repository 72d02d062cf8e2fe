"""PyTorch's own DataLoader as the backend."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from loaders.base import Loader, RawBatch, cpus_per_rank
from loaders.index import Index
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config

T = TypeVar("T")


class PlannedImages(Dataset[RawBatch]):
    """Executes rows of the plan: item `rows` is the batch of their images.

    The DataLoader hands a whole batch of rows to `__getitems__`, so nothing is collated: threads
    decode, cut and resize the images straight into the batch. Decoding and resizing release Python's
    interpreter lock.
    """

    def __init__(self, index: Index, size: tuple[int, int], num_threads: int) -> None:
        self.index, self.size, self.num_threads = index, size, num_threads
        self.images = torch.from_numpy(index.images) if index.images is not None else None
        self.pool: ThreadPoolExecutor | None = None

    def __getitems__(self, rows: np.ndarray) -> RawBatch:
        if self.images is not None and self._are_whole(rows):
            images = self.images[torch.from_numpy(rows["sample"].copy())]
            for name, dim in [("vflip", 1), ("hflip", 2)]:
                if rows[name].any():
                    flipped = torch.from_numpy(rows[name].copy())
                    images[flipped] = images[flipped].flip(dim)
            return rows, (images,)
        if self.pool is None:  # made here, because threads do not survive the start of a worker
            self.pool = ThreadPoolExecutor(self.num_threads)
        batch = tuple(
            torch.empty(
                (len(rows), self.size[0] * scale, self.size[1] * scale, self.index.channels),
                dtype=getattr(torch, self.index.dtype),
            )
            for scale in self.index.scales
        )
        for _ in self.pool.map(self._execute, rows, range(len(rows)), [batch] * len(rows)):
            pass
        return rows, batch

    def _are_whole(self, rows: np.ndarray) -> bool:
        height, width = self.size
        whole = (rows["height"] == height) & (rows["width"] == width)
        return bool(whole.all() and (self.index.sizes == self.size).all())

    def _execute(self, row: np.void, position: int, batch: tuple[Tensor, ...]) -> None:
        for side, scale in enumerate(self.index.scales):
            image = torch.from_numpy(self.index.read(row["sample"], side))
            y, x, height, width = (scale * int(row[name]) for name in ("y", "x", "height", "width"))
            image = image[y : y + height, x : x + width]
            target = batch[side][position]
            if image.shape != target.shape:
                # The leading dimension comes first: only so does torch see channels_last.
                image = interpolate(
                    image[None].permute(0, 3, 1, 2),
                    target.shape[:2],
                    mode="bilinear",
                    antialias=True,
                )[0].permute(1, 2, 0)
            flips = [dim for dim, name in enumerate(("vflip", "hflip")) if row[name]]
            target.copy_(image.flip(flips) if flips else image)


def _as_it_is(batch: Any) -> Any:
    return batch


class PyTorchLoader(Loader):
    """Batches through `torch.utils.data.DataLoader`, whose batch sampler walks the plan.

    `loader.num_workers` processes with `loader.num_threads` threads each prepare the batches; without
    worker processes, threads of the training process do.
    """

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        workers = cfg.loader.num_workers
        num_threads = cfg.loader.num_threads or max(1, cpus_per_rank() // max(1, workers))
        dataset = PlannedImages(sampler.index, self.read_size, num_threads)
        self.data_loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=cfg.loader.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )
        # Images in memory are faster at hand than through another thread.
        self.in_background = workers == 0 and dataset.images is None

    def batches(self) -> Iterator[RawBatch]:
        if self.in_background:
            return in_background(self.data_loader, self.cfg.loader.prefetch_factor)
        return iter(self.data_loader)


def in_background(items: "Iterator[T] | DataLoader[T]", depth: int) -> Iterator[T]:
    """The items, up to `depth` of them prepared ahead by a thread; its errors are raised here."""
    queue: Queue[Any] = Queue(depth)
    stop = Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            try:
                return queue.put(item, timeout=0.1)
            except Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put((item, None))
                if stop.is_set():
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    thread = Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        try:
            while True:
                queue.get_nowait()
        except Empty:
            thread.join()
