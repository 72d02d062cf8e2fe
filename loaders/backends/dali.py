"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the rows of the plan."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.augment import to_device
from loaders.backends.common import Batch, ImageLoader, RawBatch
from loaders.backends.pipelines import (
    decoding,
    options_of,
    output_stream,
    pipeline_options,
    planned_images,
    types,
)
from loaders.backends.pytorch import PlanDataset, movable
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
    same pixels as `loader=pytorch` (`Header.dali` is 2). The threads of `loader=pytorch` load all
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
        self.refused: list[int] = []  # samples that DALI cannot decode, but the threads can
        self.pending: deque[PendingBatch] = deque()
        self.pipeline: Any = None
        self.info.description = (self._describe(),)

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
        num_ahead, waiting = options_of(self.cfg).prefetch_queue_depth, iter(self.sampler)
        self._restart([])  # the previous epoch may have been left early
        while True:
            self.pending += map(self._start, islice(waiting, 1 + num_ahead - len(self.pending)))
            if not self.pending:
                break
            batch, bad, is_complete = self.pending.popleft(), {}, True
            try:
                images = self._outputs() if batch.by_dali.any() else ()
            except RuntimeError as error:
                bad, is_complete = self._bad_files(batch.rows[batch.by_dali], error), False
            others, *masks = (future.result() for future in batch.by_threads)
            for loaded in (others, *masks):
                bad |= loaded.bad
            if bad or not is_complete:
                self.sampler.set_aside(bad)
                self._restart([batch, *self.pending])
            else:
                images = self._joined(batch, images, others.content)
                yield batch.rows, sum((loaded.content for loaded in masks), images)

    def _start(self, rows: np.ndarray) -> PendingBatch:
        by_dali = self._is_readable(rows["sample"])
        if by_dali.any():
            files, bad = self._files(rows["sample"][by_dali])
            by_dali &= ~np.isin(rows["sample"], bad)  # the threads will report them
        if by_dali.any():
            self._schedule(rows[by_dali], files)
        by_threads = [self.others.start(rows[~by_dali])]
        if self.masks:
            by_threads.append(self.masks.start(rows))
        return PendingBatch(rows, by_dali, by_threads)

    def _is_readable(self, samples: np.ndarray) -> np.ndarray:
        """Return a mask of the samples whose files DALI decodes to the same pixels, (B,) bool."""
        if not self.index.files or self.index.is_raw:
            return np.zeros(len(samples), bool)
        sides = self.index.headers[: len(self.factors)]
        is_alike = np.all([side["dali"][samples] == 2 for side in sides], axis=0)
        return is_alike & ~np.isin(samples, self.refused)

    def _files(self, samples: np.ndarray) -> tuple[Any, list[int]]:
        """Return the files of the good ones of these samples, all inputs and then all targets, and
        the bad samples.

        Files are paths, (files, length) uint8, or a list of contents where they have no path.

        Raises:
            OSError, MemoryError: as `Index.read_bytes`.
        """
        index, sides = self.index, range(len(self.factors))
        if index.by_path:
            bad = [*index.changed(samples)]
            good = samples[~np.isin(samples, bad)]
            # The system takes a path to end at its first zero. One array is fed in a fifth of the
            # time that a list of paths takes.
            length = max(paths.length for paths in index.files)
            return np.concatenate([index.files[n].as_bytes(good, length) for n in sides]), bad
        contents, bad = [], []
        for sample in samples.tolist():
            try:
                contents.append([index.read_bytes(sample, side) for side in sides])
            except BadFileError:
                bad.append(sample)
        in_order = [content for side in zip(*contents, strict=True) for content in side]
        return [np.frombuffer(content, np.uint8) for content in in_order], bad

    def _schedule(self, rows: np.ndarray, files: Any) -> None:
        """Start the pipeline on these rows and what `_files` returns of their samples."""
        self.pipeline = self.pipeline or self._build()
        inputs: dict[str, Any] = {"files": files}
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

    def _bad_files(self, rows: np.ndarray, error: RuntimeError) -> dict[int, str]:
        """Return the reasons by sample why files of these rows, on which the pipeline has failed,
        are bad. If none is, find those that DALI alone refuses: the threads decode them from now
        on.

        Raises:
            RuntimeError: `error`, if DALI decodes each file, or none of several.
            OSError, MemoryError: the machine has run out of file handles or memory.
        """
        self.pipeline = None  # it is dead after an error
        if bad := self.others.load(rows).bad:
            return bad
        refused = []
        for row in np.split(rows, len(rows)):
            self.pipeline = self.pipeline or self._build()
            try:
                self._schedule(row, self._files(row["sample"])[0])
                self._outputs()
            except RuntimeError:
                self.pipeline = None
                refused.append(int(row["sample"][0]))
        if not refused or len(refused) == len(rows) > 1:  # the files are not to blame
            raise error
        for sample in refused:
            name = self.index.name_of(sample)
            log.warning("DALI cannot decode %s; it is decoded as by loader=pytorch", name)
        self.refused += refused
        return {}

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
