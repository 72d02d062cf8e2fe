"""Executes rows of the plan on the CPU: threads read, cut, resize and flip images into a batch.

Decoding and resizing release Python's interpreter lock.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, get_worker_info

from loaders.ahead import Begun, begin
from loaders.index import BadFileError, Content, Index
from loaders.shared import SharedIndex
from loaders.storage import StorageError
from loaders.threads import torch_threads


class Executed(NamedTuple):
    """What became of the rows of a batch."""

    rows: np.ndarray
    images: tuple[Tensor, ...]
    """For each side (B, height, width, C) of the index's dtype; meaningless if any sample is bad."""
    bad: dict[int, str]
    """Of each sample that cannot be decoded, why."""
    failed: list[StorageError]
    """Empty, or why the rows could not be executed."""


class PlannedImages(Dataset[Executed]):
    """Item `rows` is the batch of their images.

    The DataLoader hands a whole batch of rows to `__getitems__`, so nothing is collated.
    """

    def __init__(
        self,
        index: Index,
        sizes: dict[int, tuple[int, int]],
        num_threads: int,
        pin_memory: bool,
        reduces: bool,
    ) -> None:
        """`sizes`: (height, width) of the images of each side that is to be executed; `reduces`: whether
        large JPEGs are decoded at a fraction of their size."""
        self.index, self.sizes, self.num_threads = index, sizes, num_threads
        self.pin_memory, self.reduces = pin_memory, reduces
        self.pool: ThreadPoolExecutor | None = None
        self.shared: SharedIndex | None = None

    def __reduce__(self) -> Any:
        """For each worker process; all map the same index."""
        self.shared = self.shared or SharedIndex(self.index)
        return PlannedImages, (
            self.shared,
            self.sizes,
            self.num_threads,
            self.pin_memory,
            self.reduces,
        )

    def __getitems__(self, rows: np.ndarray, begun: Begun = ()) -> Executed:
        if self._is_copied(rows):
            return self._copy(rows, begun)
        return self.start(rows, begun=begun).result()

    @torch.inference_mode(False)  # whose tensors the pool's threads could not write to
    def start(
        self,
        rows: np.ndarray,
        then: Callable[[Executed], Any] = lambda executed: executed,
        begun: Begun = (),
    ) -> "Future[Any]":
        """Let the threads begin with a batch; the future is what `then` makes of it.

        `begun` is what of it has begun already. Whichever thread has time takes the next row, and the last
        one to end calls `then`. If the future is cancelled, no thread takes a further row.
        """
        if self.pool is None:  # made here, because threads do not survive the start of a worker
            # A thread's operations are not split among further threads, which would take longer.
            self.pool = torch_threads(self.num_threads, "load", 1)
        if self._is_copied(rows):
            return self.pool.submit(lambda: then(self._copy(rows, begun)))
        begun = begun or begin(rows, self.index, self.sizes)
        executed, future = Executed(rows, self._new_batch(len(rows)), {}, []), Future[Any]()
        positions, lock, num_working = iter(range(len(rows))), Lock(), self.num_threads

        def work() -> None:
            nonlocal num_working
            try:
                for position in positions:
                    if future.cancelled():
                        return
                    if executed.failed:
                        break
                    try:
                        filled = [side[position] for side in executed.images]
                        self._execute(rows[position], filled, begun[position] if begun else None)
                    except BadFileError as error:
                        executed.bad[int(rows["sample"][position])] = str(error)
                    except StorageError as error:
                        executed.failed.append(error)
                with lock:
                    num_working -= 1
                    is_last = num_working == 0
                if is_last and future.set_running_or_notify_cancel():
                    future.set_result(then(executed))
            except BaseException as error:
                with lock:
                    if not future.done():
                        future.set_exception(error)

        for _ in range(self.num_threads):
            self.pool.submit(work)
        return future

    def _is_copied(self, rows: np.ndarray) -> bool:
        """Whether images that need no decoding are not to be resized either."""
        height, width = self.sizes.get(0, (0, 0))
        return self.index.can_copy and bool(
            (rows["height"] == height).all() and (rows["width"] == width).all()
        )

    @torch.inference_mode(False)
    def _copy(self, rows: np.ndarray, begun: Begun = ()) -> Executed:
        """A batch of which `_is_copied` is true, without further threads."""
        try:
            whole, bad = self.index.copy(rows["sample"], [content[0] for content in begun])
        except StorageError as error:
            return Executed(rows, (), {}, [error])
        images = _cut_alike(torch.from_numpy(whole), rows, self.sizes[0])
        pixels = _movable(images)
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                pixels[flipped] = pixels[flipped].flip(dim)
        return Executed(
            rows, (_shared(images.pin_memory() if self.pin_memory else images),), bad, []
        )

    def _new_batch(self, count: int) -> tuple[Tensor, ...]:
        """The memory of so many samples, for each side."""
        batch = []
        for number, size in self.sizes.items():
            side = self.index.sides[number]
            shape, dtype = (count, *size, side.channels), getattr(torch, side.dtype)
            batch.append(_shared(torch.empty(shape, dtype=dtype, pin_memory=self.pin_memory)))
        return tuple(batch)

    def _execute(self, row: np.void, batch: list[Tensor], begun: dict[int, Content] | None) -> None:
        """Fill (height, width, C) of each side with the row's images.

        Raises:
            BadFileError: the sample is bad.
        """
        sample, *rectangle = (int(row[name]) for name in ("sample", "y", "x", "height", "width"))
        flips = [dim for dim, name in enumerate(("vflip", "hflip")) if row[name]]
        for number, filled in zip(self.sizes, batch, strict=True):
            side = self.index.sides[number]
            y, x, height, width = (side.size_factor * length for length in rectangle)
            size = (filled.shape[0], filled.shape[1])
            image = self.index.read_rectangle(
                sample,
                number,
                (y, x, height, width),
                size if self.reduces else None,
                begun[number] if begun else None,
            )
            if side.interpolation == "nearest":
                pixels = torch.from_numpy(nearest(image, size))
            else:
                pixels = _resized(image, size)
            pixels = _movable(pixels)
            _movable(filled).copy_(pixels.flip(flips) if flips else pixels)


def nearest(image: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """(height, width, C) of `size`: for each pixel the one of the image in which its centre lies."""
    if image.shape[:2] == size:
        return image
    lines, columns = (
        ((2 * np.arange(new) + 1) * old) // (2 * new)
        for new, old in zip(size, image.shape, strict=False)
    )
    return image[lines[:, None], columns]


def _resized(image: np.ndarray, size: tuple[int, ...]) -> Tensor:
    """(height, width, C) of `size`, bilinear with antialiasing."""
    if image.shape[:2] == size:
        return torch.from_numpy(image)
    # The leading dimension comes first: only so does torch see channels_last.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if image.dtype == np.uint16:  # which torch cannot resize
        pixels = pixels.float()
    # Lines cost torch more than columns: the fewer of them it resizes, the better.
    if size[0] < image.shape[0]:
        pixels = interpolate(pixels, (size[0], image.shape[1]), mode="bilinear", antialias=True)
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    return pixels.round().to(torch.uint16) if image.dtype == np.uint16 else pixels


def _movable(images: Tensor) -> Tensor:
    """The same numbers as what torch can flip and index: it knows no uint16 there."""
    return images.view(torch.int16) if images.dtype == torch.uint16 else images


def _cut_alike(images: Tensor, rows: np.ndarray, size: tuple[int, int]) -> Tensor:
    """The rows' rectangles, all of `size`, of images of one size."""
    height, width = size
    if (height, width) == images.shape[1:3] or not len(rows):
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
