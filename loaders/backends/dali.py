"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the rows of the plan."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.augment import to_device
from loaders.backends.common import Batch, ImageLoader, PlanDataset, RawBatch, movable
from loaders.backends.pipelines import (
    decoding,
    options_of,
    output_stream,
    pipeline_options,
    planned_images,
    types,
)
from loaders.common import cpus_per_rank
from loaders.epoch import LoadedBatch
from loaders.index import BadFileError
from loaders.plan import PlanSampler

log = logging.getLogger(__name__)

MOST_COUNTED = 1 << 20
"""Samples of a large data set that are looked at to count those that DALI decodes."""


class PendingBatch(NamedTuple):
    """A batch that DALI and the threads are loading."""

    rows: np.ndarray
    by_dali: np.ndarray
    """(B,) bool: rows whose images DALI decodes."""
    by_threads: list[Future[LoadedBatch]]
    """Images of the other rows and, if there are masks, those of all rows."""


class DALILoader(ImageLoader):
    """Decodes and augments on the GPU if `device` is one, else on the CPU.

    Order and rectangles come from the plan, not from DALI's own shuffling. Pairs are decoded in one
    call, the targets after the inputs of the batch. DALI decodes the files for which it gives the
    same pixels as `loader=pytorch` (`Header.dali_reads`). The threads of `loader=pytorch` load all
    others, images that need no decoding, and masks, whose palettes DALI would convert to colours.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index, shapes = self.index, sampler.distinct_shapes
        sizes = self.read_sizes()
        masks = {n: sizes.pop(n) for n, s in enumerate(index.sides) if s.content == "indices"}
        # Of the sides that the pipeline decodes.
        self.factors = tuple(index.sides[number].size_factor for number in sizes)
        num_threads, pins = cfg.loader.num_threads or cpus_per_rank(), device.type == "cuda"
        options = num_threads, pins, cfg.data.reduced_decoding
        self.others = PlanDataset(index, sizes, *options)
        self.masks = PlanDataset(index, masks, *options) if masks else None
        # Steps that no row needs are left out of the pipeline.
        self.cuts = shapes is None or bool((shapes != index.distinct_sizes).any())
        self.resizes = shapes is None or bool((shapes != self.read_size).any())
        self.flips = sampler.train and cfg.data.hflip + cfg.data.vflip > 0
        self.refused: set[int] = set()
        self.pending: deque[PendingBatch] = deque()
        self.pipeline: Any = None
        self.info = replace(self.info, description=(self._describe(),))

    def _describe(self) -> str:
        """Return a line on how many samples DALI decodes; threads load the others."""
        index = self.index
        samples = np.arange(0, len(index), 1 + len(index) // MOST_COUNTED)
        why = "" if index.files else ": they are in memory"
        why = ": they are not compressed" if index.files and index.is_raw else why
        decoded = self._is_readable(samples).sum()
        return f"DALI decodes {decoded:,} of {len(samples):,} samples{why}"

    def finished_batches(self) -> Iterator[Batch]:
        return self.transform.finish(self._decoded_batches())

    def _decoded_batches(self) -> Iterator[RawBatch]:
        self._restart([])  # the previous epoch may have been left early
        for rows in self.sampler:
            self.pending.append(self._start(rows))
            if len(self.pending) > options_of(self.cfg).prefetch_queue_depth:
                yield from self._first()
        while self.pending:
            yield from self._first()

    def _start(self, rows: np.ndarray) -> PendingBatch:
        files = {}
        for position in np.flatnonzero(self._is_readable(rows["sample"])).tolist():
            with suppress(BadFileError):  # the threads will report it
                files[position] = self._files(int(rows["sample"][position]))
        by_dali = np.isin(np.arange(len(rows)), list(files))
        if files:
            self._schedule(rows[by_dali], list(files.values()))
        by_threads = [self.others.start(rows[~by_dali])]
        if self.masks:
            by_threads.append(self.masks.start(rows))
        return PendingBatch(rows, by_dali, by_threads)

    def _is_readable(self, samples: np.ndarray) -> np.ndarray:
        """Return a mask of the samples whose files DALI decodes to the same pixels, (B,) bool."""
        if not self.index.files or self.index.is_raw:
            return np.zeros(len(samples), bool)
        sides = self.index.headers[: len(self.factors)]
        is_alike = np.all([side["dali_reads"][samples] for side in sides], axis=0)
        return is_alike & ~np.isin(samples, [*self.refused])

    def _files(self, sample: int) -> list[np.ndarray]:
        """Return the path of the file of each side, or its content if it has none; raise errors as
        `Index.read_bytes`."""
        index, sides = self.index, range(len(self.factors))
        files = [
            os.fsencode(index.unchanged_path(sample, side))
            if index.by_path
            else index.read_bytes(sample, side)
            for side in sides
        ]
        return [np.frombuffer(file, np.uint8) for file in files]

    def _schedule(self, rows: np.ndarray, files: list[list[np.ndarray]]) -> None:
        """Start the pipeline on these rows and their files."""
        self.pipeline = self.pipeline or self._build()
        # All inputs, then all targets.
        in_order = [file for side in zip(*files, strict=True) for file in side]
        inputs: dict[str, Any] = {"files": in_order}
        if self.cuts:
            for name, keys in (("start", ("y", "x")), ("shape", ("height", "width"))):
                lengths = np.stack([rows[key] for key in keys], axis=1).astype(np.int32)
                inputs[name] = np.concatenate([factor * lengths for factor in self.factors])
        if self.resizes:
            size = np.tile(np.array(self.read_size, np.float32), (len(rows), 1))
            inputs["size"] = np.concatenate([factor * size for factor in self.factors])
        if self.flips:
            mirror = (rows["hflip"] + 2 * rows["vflip"]).astype(np.int32)
            inputs["mirror"] = np.tile(mirror, len(self.factors))
        for name, values in inputs.items():
            self.pipeline.feed_input(name, values)
        self.pipeline.schedule_run()

    def _first(self) -> Iterator[RawBatch]:
        """Yield the first pending batch that has good samples, if there is any."""
        while self.pending:
            batch = self.pending.popleft()
            try:
                images = self._outputs() if batch.by_dali.any() else ()
            except (RuntimeError, OSError) as error:
                self._refuse(batch, error)
                self._restart([batch, *self.pending])
                continue
            others, *masks = (future.result() for future in batch.by_threads)
            bad = {sample: why for loaded in (others, *masks) for sample, why in loaded.bad.items()}
            if not bad:
                images = self._joined(batch, images, others.content)
                yield batch.rows, sum((loaded.content for loaded in masks), images)
                return
            self.sampler.set_aside(bad)
            self._restart([batch, *self.pending])

    def _outputs(self) -> tuple[Tensor, ...]:
        """Return the images of the batch that was scheduled first, by side."""
        (images,) = self.pipeline.outputs(output_stream(self.device))
        num_sides = len(self.factors)
        if max(self.factors) == 1:
            return torch.from_dlpack(images.as_tensor()).chunk(num_sides)
        single = [torch.from_dlpack(image) for image in images]
        count = len(single) // num_sides
        return tuple(torch.stack(single[side * count :][:count]) for side in range(num_sides))

    def _joined(
        self, batch: PendingBatch, mine: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Join the images of DALI and of the threads in the order of the rows, by side."""
        if batch.by_dali.all():
            return mine
        if not batch.by_dali.any():
            return others
        # Of each row, the place in the images of DALI followed by those of the threads.
        order = np.argsort(np.argsort(~batch.by_dali, kind="stable"))
        places = to_device(torch.from_numpy(order), self.device)
        joined = []
        for one, other in zip(mine, others, strict=True):
            images = torch.cat([movable(one), movable(to_device(other, self.device))])
            joined.append(images[places].view(one.dtype))
        return tuple(joined)

    def _refuse(self, batch: PendingBatch, error: Exception) -> None:
        """Find the files of a batch that DALI cannot decode; the threads decode them from now on.

        Raises:
            Exception: the batch's error, if DALI decodes each of its files alone.
            OSError, MemoryError: the machine has run out of file handles or memory.
        """
        self.others.start(batch.rows).result()
        self.pipeline = None  # it is dead after an error
        is_explained = False
        for row in np.split(batch.rows, len(batch.rows)):
            if not self._is_readable(row["sample"])[0]:
                continue
            sample = int(row["sample"][0])
            try:
                self._schedule(row, [self._files(sample)])
                self._outputs()
            except BadFileError:
                pass  # the threads will report it
            except (RuntimeError, OSError):
                self.pipeline, is_explained = None, True
                self.refused.add(sample)
                name = self.index.name_of(sample)
                log.warning("DALI cannot decode %s; it is decoded as by loader=pytorch", name)
        if not is_explained:
            error.add_note(
                "All files of the batch can be decoded without DALI; try loader=pytorch."
            )
            raise error

    def _restart(self, batches: Iterable[PendingBatch]) -> None:
        """Drop all pending batches, and start again with the good samples of these."""
        rows = [self.sampler.without_bad(batch.rows) for batch in batches]
        for batch in self.pending:
            for future in batch.by_threads:
                future.cancel()
            if batch.by_dali.any():
                self.pipeline = None  # with the batches scheduled in it
        self.pending = deque(self._start(some) for some in rows if len(some))

    def _build(self) -> Any:
        index = self.index
        options = pipeline_options(self, len(self.factors) * self.batch_size)
        pipeline = planned_images(
            index.by_path,
            self.cuts,
            self.device.type == "cpu",
            self.resizes,
            self.flips,
            self.in_channels == 1 and not index.keep_channels,
            decoding(self.cfg, self.device)
            | {
                "dtype": types.UINT16 if index.dtype == "uint16" else types.UINT8,
                "output_type": types.ANY_DATA if index.keep_channels else types.RGB,
            },
            # Batches are scheduled by this loader.
            **options | {"prefetch_queue_depth": 1},
        )
        pipeline.build()
        return pipeline
