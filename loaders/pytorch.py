"""PyTorch's own DataLoader as the backend."""

import atexit
import functools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, get_worker_info

from loaders.base import Loader, RawBatch, cpus_per_rank, limits_explained
from loaders.index import BadFileError, Index
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config

T = TypeVar("T")


@dataclass
class Failed:
    """Rows of which some cannot be executed."""

    rows: np.ndarray
    reasons: dict[int, str]
    """For each bad sample, why."""


class PlannedImages(Dataset[RawBatch | Failed]):
    """Executes rows of the plan: item `rows` is the batch of their images.

    The DataLoader hands a whole batch of rows to `__getitems__`, so nothing is collated: threads
    decode, cut and resize the images straight into the batch. Decoding and resizing release Python's
    interpreter lock. What is to be done about a bad sample is decided in the training process.
    """

    def __init__(self, index: Index, size: tuple[int, int], num_threads: int) -> None:
        self.index, self.size, self.num_threads = index, size, num_threads
        self.images = torch.from_numpy(index.images) if index.images is not None else None
        # Then a batch needs no threads: copying is quicker than handing it to them.
        self.are_alike = bool((index.sizes == index.sizes[0]).all()) and (
            self.images is not None or index.is_raw
        )
        self.pool: ThreadPoolExecutor | None = None

    @torch.inference_mode(False)  # whose tensors the pool's threads could not write to
    def __getitems__(self, rows: np.ndarray) -> RawBatch | Failed:
        images = self._read_alike(rows) if self.are_alike and self._are_only_cut(rows) else None
        if images is not None:
            images = _cut_alike(images, rows, self.size)
            for name, dim in [("vflip", 1), ("hflip", 2)]:
                if rows[name].any():
                    flipped = torch.from_numpy(rows[name].copy())
                    images[flipped] = images[flipped].flip(dim)
            return rows, _shared((images,))
        if self.pool is None:  # made here, because threads do not survive the start of a worker
            self.pool = ThreadPoolExecutor(self.num_threads, initializer=_compute_alone)
        batch = _shared(
            tuple(
                torch.empty(
                    (len(rows), self.size[0] * scale, self.size[1] * scale, self.index.channels),
                    dtype=getattr(torch, self.index.dtype),
                )
                for scale in self.index.scales
            )
        )
        reasons = self.pool.map(self._execute, rows, range(len(rows)), [batch] * len(rows))
        failed = {
            int(row["sample"]): reason
            for row, reason in zip(rows, reasons, strict=True)
            if reason is not None
        }
        return Failed(rows, failed) if failed else (rows, batch)

    def _are_only_cut(self, rows: np.ndarray) -> bool:
        """Whether no image is to be resized."""
        return bool(
            (rows["height"] == self.size[0]).all() and (rows["width"] == self.size[1]).all()
        )

    def _read_alike(self, rows: np.ndarray) -> Tensor | None:
        """(B, height, width, C): whole images, which are all of one size; None if one is bad."""
        if self.images is not None:
            return self.images[torch.from_numpy(rows["sample"].copy())]
        height, width = self.index.sizes[0]
        images = np.empty((len(rows), height, width, self.index.channels), self.index.dtype)
        try:
            for sample, image in zip(rows["sample"], images, strict=True):
                self.index.read_raw(sample, image)
        except BadFileError:
            return None
        return torch.from_numpy(images)

    def _execute(self, row: np.void, position: int, batch: tuple[Tensor, ...]) -> str | None:
        """None, or why the sample is bad."""
        for side, scale in enumerate(self.index.scales):
            try:
                image = torch.from_numpy(self.index.read(row["sample"], side))
            except BadFileError as error:
                return str(error)
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
        return None


def _compute_alone() -> None:
    """Let this thread's operations not be split among further threads, which takes longer."""
    torch.set_num_threads(1)


def _cut_alike(images: Tensor, rows: np.ndarray, size: tuple[int, int]) -> Tensor:
    """The rows' rectangles, all of `size`, of images of one size."""
    height, width = size
    if (height, width) == images.shape[1:3]:
        return images
    corners = rows[["y", "x"]]
    if (corners == corners[0]).all():
        y, x = corners[0].item()
        return images[:, y : y + height, x : x + width].contiguous()
    parts = [
        image[y : y + height, x : x + width]
        for image, (y, x) in zip(images, corners.tolist(), strict=True)
    ]
    return torch.stack(parts)


def _shared(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The batch, in a worker process moved to shared memory.

    The DataLoader's queue would do this in a thread of its own, where a full /dev/shm loses the batch
    and the training process waits for it forever.
    """
    if get_worker_info() is not None:
        for images in batch:
            images.share_memory_()
    return batch


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
        self.dataset = PlannedImages(sampler.index, self.read_size, num_threads)
        self.data_loader = DataLoader(
            self.dataset,
            batch_sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=cfg.loader.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            worker_init_fn=_init_worker,
        )
        # Images in memory are faster at hand than through another thread.
        self.in_background = workers == 0 and self.dataset.images is None

    def _answers(self) -> Iterator[RawBatch | Failed]:
        if self.in_background:
            return in_background(self.data_loader, self.cfg.loader.prefetch_factor)
        answers = iter(self.data_loader)
        if self.data_loader.num_workers and current_thread() is main_thread():
            _explain_deaths_of_workers()
        return answers

    def batches(self) -> Iterator[RawBatch]:
        for answer in self._answers():
            while isinstance(answer, Failed):
                self.sampler.set_aside(answer.reasons)
                answer = self.dataset.__getitems__(self.sampler.without_bad(answer.rows))
            if len(answer[0]):
                yield answer


def _init_worker(worker_id: int) -> None:
    """Leave it to the training process to act on signals that are sent to all its processes."""
    if not hasattr(signal, "sigtimedwait"):  # macOS
        return
    # Blocked in this thread, and so in those that it will start.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    Thread(target=_end_with_training, args=(os.getppid(),), daemon=True).start()


def _end_with_training(parent: int) -> None:
    """End this worker when the training process is gone or ends it, which it does with SIGTERM."""
    training = multiprocessing.parent_process()  # not the parent, where a fork server is
    assert training is not None
    while os.getppid() == parent and training.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if received and received.si_pid == training.pid:
            break
    os._exit(0)


@functools.cache
def _explain_deaths_of_workers() -> None:
    """PyTorch notices them in a signal handler, that is, wherever the training loop happens to be."""
    notice: Any = signal.getsignal(signal.SIGCHLD)

    def handle(*arguments: Any) -> None:
        with limits_explained():
            notice(*arguments)

    if callable(notice):
        signal.signal(signal.SIGCHLD, handle)


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

    def end() -> None:
        stop.set()
        try:
            while True:
                queue.get_nowait()
        except Empty:
            thread.join()

    thread = Thread(target=produce, daemon=True)
    thread.start()
    atexit.register(end)  # Python aborts if it ends while a thread computes with torch
    try:
        while True:
            item, error = queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        atexit.unregister(end)
        end()
