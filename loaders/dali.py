"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the plan's rows."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders import decoder_lines
from loaders.ahead import Begun, begun_ahead
from loaders.decode import what_libjpeg_says
from loaders.execute import Executed, PlannedImages
from loaders.index import BadFileError, Index
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.overlap import Finished, on_stream
from loaders.pixels import RawBatch
from loaders.sampler import PlanSampler
from loaders.storage import StorageError

try:
    from nvidia.dali import fn, pipeline_def, types
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "loader=dali needs NVIDIA DALI, which exists for Linux only: pip install nvidia-dali-cuda120, "
        "or use loader=pytorch"
    ) from error

log = logging.getLogger(__name__)


@pipeline_def
def planned_images(  # type: ignore[no-untyped-def]
    source, reads, decode, cut, resize, flip, decoding, dtype, output_type
):
    """Decode only the rectangles of files, resize them with antialiasing and flip them.

    `source` gives, of each batch, with `flip` the mirrorings, with `resize` the sizes, then either the
    pixels or, with `decode`, the files' content and, with `cut`, the rectangles' starts and shapes. Without
    `cut` these are the whole images; without `resize` they have the right size. With `reads`, it gives paths
    instead of content.
    """
    content_types = [types.UINT8] + cut * [types.INT32, types.INT32] if decode else [dtype]
    input_types = flip * [types.INT32] + resize * [types.FLOAT] + content_types
    inputs = iter(
        fn.external_source(
            source=source, num_outputs=len(input_types), batch=True, dtype=input_types
        )
    )
    mirror = next(inputs) if flip else 0
    size = next(inputs) if resize else None
    if decode:
        encoded = fn.io.file.read(next(inputs)) if reads else next(inputs)
        options = {"dtype": dtype, "output_type": output_type, **decoding}
        if cut:
            start, shape = inputs
            images = fn.decoders.image_slice(encoded, start, shape, axis_names="HW", **options)
        else:
            images = fn.decoders.image(encoded, **options)
    else:
        (pixels,) = inputs
        images = fn.reinterpret(
            pixels.gpu() if decoding["device"] == "mixed" else pixels, layout="HWC"
        )
    if resize:
        return fn.resize_crop_mirror(
            images,
            size=size,
            crop=size,
            mirror=mirror,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
    return fn.flip(images, horizontal=mirror & 1, vertical=mirror // 2) if flip else images


class DALILoader(Loader):
    """Decodes and augments on the GPU if `device` is one, else on the CPU.

    The order and the rectangles are the plan's; DALI's own shuffling is not used. A pair is decoded
    in one call, the targets behind the inputs of the batch. Masks, whose palettes DALI would turn into
    colours, are made meanwhile by the threads that make them for `loader=pytorch`.
    """

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index, shapes = self.index, sampler.distinct_shapes
        sizes = self.read_sizes()
        by_threads = [n for n, side in enumerate(index.sides) if side.interpolation == "nearest"]
        # The pipeline's sides.
        self.factors = tuple(
            side.size_factor for n, side in enumerate(index.sides) if n not in by_threads
        )
        num_threads = cfg.loader.num_threads or cpus_per_rank()
        masks = {n: sizes[n] for n in by_threads}
        self.masks = PlannedImages(index, masks, num_threads, pin_memory=False, reduces=False)
        self.masks_begun: deque[Future[Executed]] = deque()
        # DALI decodes the upper lines of a JPEG that is cut short without an error.
        self.doubtful = set(index.doubtful.tolist())
        # What the pipeline has to do: less where the plan never asks for it.
        self.cuts = shapes is None or bool((shapes != index.distinct_sizes).any())
        self.resizes = shapes is None or bool((shapes != self.read_size).any())
        self.flips = sampler.train and cfg.data.hflip + cfg.data.vflip > 0
        self.copies = index.can_copy
        num_sides = len(self.factors)
        readable = all(index.dali_reads[:num_sides])
        self.decodes = bool(index.files) and readable and not self.copies
        if not readable:
            log.info("%s: tifffile decodes, because DALI does not read these TIFFs", index.name)
        self.waiting: Iterator[tuple[np.ndarray, Begun]] = iter(())
        self.running: deque[np.ndarray] = deque()
        self.lines = decoder_lines.listen() if self.decodes else None
        self.pipeline = self._build()

    def finished_batches(self) -> Iterator[Finished]:
        return finished_beside_pipeline(self.raw_batches(), self)

    def raw_batches(self) -> Iterator[RawBatch]:
        """The rows of each batch and their images, still to be finished."""
        self._leave_epoch()
        self.waiting = self._begun(self.sampler)
        last = deque[np.ndarray](maxlen=3)
        try:
            while (images := self._run()) is not None:
                last.append(self.running.popleft())
                yield last[-1], images
                log_new_lines(self.lines, self.index, [*last, *self.running])
        except StorageError as error:
            self.failed = error

    def _build(self) -> Any:
        photo_type = types.GRAY if self.in_channels == 1 else types.RGB
        pipeline = planned_images(
            self._feed,
            self.index.shards is None,
            self.decodes,
            self.cuts,
            self.resizes,
            self.flips,
            decoding(self.cfg, self.device),
            types.UINT16 if self.index.dtype == "uint16" else types.UINT8,
            types.ANY_DATA if self.index.as_stored else photo_type,
            **pipeline_options(self, len(self.factors) * self.batch_size),
        )
        pipeline.build()
        return pipeline

    def _feed(self) -> tuple[list[np.ndarray] | np.ndarray, ...]:
        """The next batch of rows in the form that the pipeline takes; StopIteration at the end."""
        rows, begun = next(self.waiting)
        self.running.append(rows)
        try:
            return self._inputs(rows, begun)
        except StorageError as error:  # after the batches before, which are whole
            self.failed = error
            raise StopIteration from error

    def _inputs(self, rows: np.ndarray, begun: Begun) -> tuple[list[np.ndarray] | np.ndarray, ...]:
        doubtful = self.doubtful.intersection(rows["sample"].tolist())
        for reason in bad_among(doubtful, self.index).values():
            raise BadFileError(reason)
        self.doubtful -= doubtful
        if self.masks.sizes:
            self.masks_begun.append(self.masks.start(rows, begun=begun))
        factors = self.factors
        inputs: list[Any] = []
        if self.flips:
            mirror = (rows["hflip"] + 2 * rows["vflip"]).astype(np.int32)
            inputs.append(np.tile(mirror, len(factors)))
        if self.resizes:
            size = np.tile(np.array(self.read_size, np.float32), (len(rows), 1))
            inputs.append(_for_each_side(factors, size))
        start = _for_each_side(factors, np.stack([rows["y"], rows["x"]], axis=1))
        shape = _for_each_side(factors, np.stack([rows["height"], rows["width"]], axis=1))
        reads = [
            (sample, side, begun[number][side] if begun else None)
            for side in range(len(factors))
            for number, sample in enumerate(rows["sample"].tolist())
        ]
        if self.decodes:
            for reason in self.index.changed(rows["sample"]).values():
                raise BadFileError(reason)
            encoded = [
                os.fsencode(self.index.files[side][sample])
                if self.index.shards is None
                else self.index.content(sample, side, content)
                for sample, side, content in reads
            ]
            files = [np.frombuffer(file, np.uint8) for file in encoded]
            return (*inputs, files, start, shape) if self.cuts else (*inputs, files)
        images: np.ndarray | list[np.ndarray]
        if self.copies:
            images, bad = self.index.copy(rows["sample"], [content[0] for content in begun])
            for reason in bad.values():
                raise BadFileError(reason)
        else:
            images = [
                self.index.read(sample, side, begun=content) for sample, side, content in reads
            ]
        if self.cuts or not self.copies:
            images = [
                np.ascontiguousarray(image[y : y + height, x : x + width])
                for image, (y, x), (height, width) in zip(images, start, shape, strict=True)
            ]
        return (*inputs, images)

    def _run(self) -> tuple[Tensor, ...] | None:
        """The images of each side of the next batch; None at the end of the epoch."""
        while True:
            try:
                (images,) = run_on_stream(self.pipeline, self.device)
                masks = self._masks()
                break
            except StopIteration:
                return None
            except StorageError:  # of masks
                raise
            except (RuntimeError, OSError) as error:
                self._recover(error)
        num_sides = len(self.factors)
        if max(self.factors) == 1:
            return (*torch.from_dlpack(images.as_tensor()).chunk(num_sides), *masks)
        single = [torch.from_dlpack(image) for image in images]
        count = len(single) // num_sides
        return tuple(torch.stack(single[side * count :][:count]) for side in range(num_sides))

    def _begun(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Begun]]:
        return begun_ahead(batches, self.index, range(len(self.index.sides)))

    def _masks(self) -> tuple[Tensor, ...]:
        """Those of the batch whose images the pipeline has just returned, if there are masks."""
        if not self.masks_begun:
            return ()
        executed = self.masks_begun.popleft().result()
        for error in executed.failed:
            raise error
        for reason in executed.bad.values():
            raise BadFileError(reason)
        return executed.images

    def _forget_masks(self) -> None:
        for future in self.masks_begun:
            future.cancel()
        self.masks_begun.clear()

    def _recover(self, error: Exception) -> None:
        """Go on at the batch that failed, without its bad samples; a pipeline is dead after an error.

        Raises:
            BadFileError: as `PlanSampler.set_aside`.
            Exception: the error itself, if all files of the batches in flight can be decoded.
        """
        each = (bad_among(rows["sample"].tolist(), self.index) for rows in self.running)
        bad = next(filter(None, each), None)
        log_new_lines(self.lines, self.index, list(self.running))
        if bad is None:
            error.add_note("Without DALI, all files in flight can be decoded; try loader=pytorch.")
            raise error
        self.sampler.set_aside(bad)
        again = [rows for rows in map(self.sampler.without_bad, self.running) if len(rows)]
        self.running.clear()
        self._forget_masks()
        self.waiting = chain(self._begun(again), self.waiting)
        self.pipeline = self._build()

    def _leave_epoch(self) -> None:
        """Throw away the batches in flight of an epoch that was left early."""
        self.waiting = iter(())
        try:
            while True:
                self.pipeline.run()
        except StopIteration:
            self.pipeline.reset()
        except (RuntimeError, OSError):
            self.pipeline = self._build()
        self.running.clear()
        self._forget_masks()


def pipeline_options(loader: Loader, batch_size: int) -> dict[str, Any]:
    """What every pipeline of a loader is told."""
    options = loader.cfg.loader
    return {
        "batch_size": batch_size,
        "num_threads": options.num_threads or cpus_per_rank(),
        "device_id": loader.device.index if loader.device.type == "cuda" else None,
        "prefetch_queue_depth": options.prefetch_queue_depth,
    }


def decoding(cfg: Config, device: torch.device) -> dict[str, Any]:
    """Arguments of DALI's decoders: on a GPU they give the pixels that they would on the CPU."""
    if device.type != "cuda":
        return {"device": "cpu"}
    return {
        "device": "mixed",
        # The hardware's decoder rounds otherwise, and which images it takes may differ.
        "hw_decoder_load": 0.0 if cfg.deterministic else cfg.loader.hw_decoder_load,
        # The CPU's decoders interpolate subsampled colours, the GPU's only when they are told to.
        "jpeg_fancy_upsampling": True,
    }


def run_on_stream(pipeline: Any, device: torch.device) -> tuple[Any, ...]:
    """The outputs of the next batch; on CUDA the current stream waits for them instead of the host."""
    if device.type == "cuda" and pipeline.exec_dynamic:
        return pipeline.run(torch.cuda.current_stream(device))
    return pipeline.run()


def finished_beside_pipeline(batches: Iterator[RawBatch], loader: Loader) -> Iterator[Finished]:
    """Finish a pipeline's batches while its threads are at the next ones already."""
    if loader.device.type == "cuda":
        yield from on_stream(batches, loader.pixels.finish, loader.device)
        return
    for batch in batches:
        num_threads = torch.get_num_threads()
        # Unless images are enlarged this thread works alone: until one of torch's gets a core from the
        # pipeline's threads takes longer than the work.
        if loader.read_size == loader.output_size:
            torch.set_num_threads(1)
        try:
            finished = loader.pixels.finish(*batch)
        finally:
            torch.set_num_threads(num_threads)
        yield finished


def log_new_lines(lines: IO[bytes] | None, index: Index, batches: list[np.ndarray]) -> None:
    """Warn of what DALI's decoders have printed, and name the JPEG of these rows of which it is true."""
    for line in decoder_lines.read(lines):
        name = index.name.rpartition("/")[0]  # the split is not sure: lines take a moment to come
        if line.startswith("Corrupt JPEG") and batches:
            samples = np.unique(np.concatenate([rows["sample"] for rows in batches])).tolist()
            files = [(sample, side) for side in range(len(index.files)) for sample in samples]
            with ThreadPoolExecutor(index.num_readers) as pool:
                found = zip(
                    files, pool.map(partial(_libjpeg_says, line, index), files), strict=True
                )
                name = next((index.files[side][i] for (i, side), says in found if says), name)
                pool.shutdown(cancel_futures=True)
        log.warning("%s: DALI's decoder says: %s (more of this kind are left out)", name, line)


def _libjpeg_says(line: str, index: Index, file: tuple[int, int]) -> bool:
    """Whether this is its warning of a sample's file of a side."""
    try:
        return what_libjpeg_says(index.content(*file)) == line
    except OSError:
        return False


def bad_among(samples: Iterable[int], index: Index) -> dict[int, str]:
    """Those of the samples that cannot be decoded, and why; decoded with all CPUs."""

    def reason(sample: int) -> str | None:
        try:
            for side in range(len(index.size_factors)):
                index.read(sample, side)
        except BadFileError as error:
            return str(error)
        return None

    samples = list(samples)
    with ThreadPoolExecutor(index.num_readers) as pool:
        reasons = zip(samples, pool.map(reason, samples), strict=True)
        return {sample: why for sample, why in reasons if why is not None}


def _for_each_side(factors: tuple[int, ...], lengths: np.ndarray) -> np.ndarray:
    """The lengths of a batch's images and, below these, those of its targets."""
    return np.concatenate([factor * lengths for factor in factors]).astype(lengths.dtype)
