"""PyTorch's own DataLoader, or threads of the training process, as the backend."""

import functools
import gc
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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

    def __init__(
        self, index: Index, size: tuple[int, int], num_threads: int, pin_memory: bool
    ) -> None:
        self.index, self.size, self.num_threads = index, size, num_threads
        self.pin_memory = pin_memory
        self.images = torch.from_numpy(index.images) if index.images is not None else None
        # Then one thread copies a whole batch: that is quicker than sharing it out.
        self.are_alike = bool((index.sizes == index.sizes[0]).all()) and (
            self.images is not None or index.is_raw
        )
        self.pool: ThreadPoolExecutor | None = None

    def __getitems__(self, rows: np.ndarray) -> RawBatch | Failed:
        return self.copy(rows) if self.is_copied(rows) else self.start(rows, _as_it_is).result()

    @torch.inference_mode(False)  # whose tensors the pool's threads could not write to
    def start(self, rows: np.ndarray, finish: Callable[[RawBatch], T]) -> "StartedBatch[T]":
        """Let the threads begin with a batch and do with it what `finish` does."""
        if self.pool is None:  # made here, because threads do not survive the start of a worker
            self.pool = ThreadPoolExecutor(self.num_threads, initializer=_compute_alone)
        return StartedBatch(self, self.pool, rows, finish)

    def is_copied(self, rows: np.ndarray) -> bool:
        """Whether images of one size, which need no decoding, are not to be resized either."""
        return self.are_alike and bool(
            (rows["height"] == self.size[0]).all() and (rows["width"] == self.size[1]).all()
        )

    @torch.inference_mode(False)
    def copy(self, rows: np.ndarray) -> RawBatch | Failed:
        """A batch of which `is_copied` is true."""
        if self.images is not None:
            images = self.images[torch.from_numpy(rows["sample"].copy())]
        else:
            height, width = self.index.sizes[0]
            whole = np.empty((len(rows), height, width, self.index.channels), self.index.dtype)
            reasons = {}
            for sample, image in zip(rows["sample"].tolist(), whole, strict=True):
                try:
                    self.index.read_raw(sample, image)
                except BadFileError as error:
                    reasons[sample] = str(error)
            if reasons:
                return Failed(rows, reasons)
            images = torch.from_numpy(whole)
        images = _cut_alike(images, rows, self.size)
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                images[flipped] = images[flipped].flip(dim)
        return rows, (_shared(images.pin_memory() if self.pin_memory else images),)

    def new_batch(self, rows: np.ndarray) -> tuple[Tensor, ...]:
        """The memory of a batch, for pairs also of its targets."""
        height, width = self.size
        return tuple(
            _shared(
                torch.empty(
                    (len(rows), height * scale, width * scale, self.index.channels),
                    dtype=getattr(torch, self.index.dtype),
                    pin_memory=self.pin_memory,
                )
            )
            for scale in self.index.scales
        )

    def execute(self, row: np.void, targets: list[Tensor]) -> None:
        """Fill `targets`, of shape (height, width, C), with the row's images.

        Raises:
            BadFileError: the sample is bad.
        """
        sample, *rectangle = (int(row[name]) for name in ("sample", "y", "x", "height", "width"))
        flips = [dim for dim, name in enumerate(("vflip", "hflip")) if row[name]]
        for side, (scale, target) in enumerate(zip(self.index.scales, targets, strict=True)):
            y, x, height, width = (scale * length for length in rectangle)
            image = self.index.read(sample, side, y + height)
            pixels = _resized(image[y : y + height, x : x + width], target.shape[:2])
            target.copy_(pixels.flip(flips) if flips else pixels)


class StartedBatch(Generic[T]):
    """A batch that threads are filling: whichever has time takes the next row, the last one finishes it."""

    def __init__(
        self,
        dataset: PlannedImages,
        pool: ThreadPoolExecutor,
        rows: np.ndarray,
        finish: Callable[[RawBatch], T],
    ) -> None:
        self.dataset, self.rows, self.finish = dataset, rows, finish
        self.is_cancelled = False
        self.tasks: list[Future[T | Failed | None]]
        if dataset.is_copied(rows):
            self.tasks = [pool.submit(self._copy)]
            return
        self.images = dataset.new_batch(rows)
        self.reasons: dict[int, str] = {}
        # All threads take from these: the next row, and at the end one that is not the last end.
        self.positions = iter(range(len(rows)))
        self.earlier_ends = iter(range(dataset.num_threads - 1))
        self.tasks = [pool.submit(self._fill) for _ in range(dataset.num_threads)]

    def _copy(self) -> T | Failed:
        answer = self.dataset.copy(self.rows)
        return answer if isinstance(answer, Failed) else self.finish(answer)

    def _fill(self) -> T | Failed | None:
        for position in self.positions:
            if self.is_cancelled:
                return None
            row = self.rows[position]
            try:
                self.dataset.execute(row, [images[position] for images in self.images])
            except BadFileError as error:
                self.reasons[int(row["sample"])] = str(error)
        if next(self.earlier_ends, None) is not None:
            return None
        if self.reasons:
            return Failed(self.rows, self.reasons)
        return self.finish((self.rows, self.images))

    def result(self) -> T | Failed:
        """Wait for the threads; what `finish` returned."""
        answers = [task.result() for task in self.tasks]
        return next(answer for answer in answers if answer is not None)

    def cancel(self) -> None:
        """Let no thread take a further row."""
        self.is_cancelled = True
        for task in self.tasks:
            task.cancel()


def _compute_alone() -> None:
    """Let this thread's operations not be split among further threads, which takes longer."""
    torch.set_num_threads(1)


def _resized(image: np.ndarray, size: tuple[int, ...]) -> Tensor:
    """(height, width, C) of `size`, bilinear with antialiasing."""
    if image.shape[:2] == size:
        return torch.from_numpy(image)
    # The leading dimension comes first: only so does torch see channels_last.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    # Lines cost torch more than columns: the fewer of them it resizes, the better.
    if size[0] < image.shape[0]:
        pixels = interpolate(pixels, (size[0], image.shape[1]), mode="bilinear", antialias=True)
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
    return pixels[0].permute(1, 2, 0)


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


def _shared(images: Tensor) -> Tensor:
    """The images, in a worker process moved to shared memory.

    The DataLoader's queue would do this in a thread of its own, where a full /dev/shm loses the batch
    and the training process waits for it forever.
    """
    return images if get_worker_info() is None else images.share_memory_()


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
        pin_memory = device.type == "cuda"
        self.dataset = PlannedImages(
            sampler.index, self.read_size, num_threads, pin_memory and not workers
        )
        self.data_loader: DataLoader[RawBatch | Failed] | None = None
        if workers:
            self.data_loader = DataLoader(
                self.dataset,
                batch_sampler=sampler,
                collate_fn=_as_it_is,
                num_workers=workers,
                prefetch_factor=cfg.loader.prefetch_factor,
                persistent_workers=True,
                pin_memory=pin_memory,
                worker_init_fn=_init_worker,
            )

    def batches(self) -> Iterator[RawBatch]:
        for answer in self._answers():
            yield from self._repaired(answer)

    def _finish_in_thread(self) -> Iterator[tuple[np.ndarray, tuple[Tensor, Tensor]]]:
        """By the threads that fill the batches: a further one would take the CPU from them."""
        if self.data_loader is not None:
            yield from super()._finish_in_thread()
            return
        for answer in self._by_threads(self._finished):
            if isinstance(answer, Failed):
                yield from map(self._finished, self._repaired(answer))
            else:
                yield answer

    def _finished(self, batch: RawBatch) -> tuple[np.ndarray, tuple[Tensor, Tensor]]:
        return batch[0], self.finish(*batch)

    def _answers(self) -> Iterator[RawBatch | Failed]:
        if self.data_loader is not None:
            return self._by_processes(_without_garbage(self.data_loader))
        if self.index.images is not None:  # faster at hand than through a thread
            return map(self.dataset.__getitems__, self.sampler)
        return self._by_threads(_as_it_is)

    def _repaired(self, answer: RawBatch | Failed) -> Iterator[RawBatch]:
        """The batch without its bad samples, if any others are left."""
        while isinstance(answer, Failed):
            self.sampler.set_aside(answer.reasons)
            answer = self.dataset.__getitems__(self.sampler.without_bad(answer.rows))
        if len(answer[0]):
            yield answer

    def _by_processes(self, answers: Iterator[RawBatch | Failed]) -> Iterator[RawBatch | Failed]:
        if current_thread() is main_thread():
            _explain_deaths_of_workers()
        try:
            yield from answers
        except ConnectionError:
            time.sleep(1)  # a worker was killed while it sent: here comes the signal that says so
            raise

    def _by_threads(self, finish: Callable[[RawBatch], T]) -> Iterator[T | Failed]:
        """The batches, up to `loader.prefetch_factor` further ones of them already started."""
        started = deque[StartedBatch[T]]()
        try:
            for rows in self.sampler:
                started.append(self.dataset.start(rows, finish))
                if len(started) > self.cfg.loader.prefetch_factor:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            for batch in started:
                batch.cancel()


def _without_garbage(data_loader: DataLoader[T]) -> Iterator[T]:
    """Start the workers, which shall not collect what is garbage here: a DALI pipeline would crash them."""
    gc.freeze()
    try:
        return iter(data_loader)
    finally:
        gc.unfreeze()


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
