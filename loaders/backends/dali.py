"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the rows of the plan."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from torch import Tensor

from conf.errors import UserError, counted, first_few
from conf.schema import Config
from loaders.batch import Batch
from loaders.index import BadFileError
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.transform import ImageTransform

OF_THE_MACHINE = re.compile("CUDA (runtime|driver)|allocat|bad_alloc")
"""In DALI's reasons that no file is to blame for, such as `CUDA allocation failed`."""


def dali_loader(plan: Plan, transform: ImageTransform, cfg: Config) -> Loader:
    """Build the loader of a plan; raise UserError if DALI cannot read all files right."""
    index = transform.index
    if cfg.data.on_error == "skip":
        raise UserError(
            "data.on_error=skip is not possible with loader=dali; list bad files by python -m "
            "loaders.check ... out=bad.txt, and leave them out by data.leave_out=bad.txt"
        )
    for side, headers in enumerate(index.headers):
        wrong = np.flatnonzero(headers["dali"] == 0)
        if len(wrong):
            names = first_few(index.place_of(sample, side) for sample in wrong[:6].tolist())
            raise UserError(
                f"{index.name} has {counted(len(wrong), 'file')} that DALI cannot read right, such "
                f"as {names}; use loader=pytorch, convert them, or list them in data.leave_out"
            )
    batches = DALIBatches(plan, transform, cfg)
    return Loader(plan, batches, transform, transform.info(plan), transform.device, cpus_per_rank())


class DALIBatches(Iterable[Batch]):
    """Reads batches on the GPU if the device is one, else on the CPU.

    Order and rectangles come from the plan, not from DALI's own shuffling. Pairs are decoded in one
    call, the targets after the inputs of the batch.
    """

    def __init__(self, plan: Plan, transform: ImageTransform, cfg: Config) -> None:
        rectangles = transform.rectangles
        self.plan, self.index, self.device = plan, transform.index, transform.device
        self.read_size, self.num_ahead = rectangles.read_size, cfg.loader.prefetch_queue_depth
        self.factors = tuple(side.size_factor for side in self.index.sides)
        # Steps that no row needs are left out of the pipeline.
        shapes = rectangles.distinct_shapes
        self.cuts = shapes is None or bool((shapes != self.index.distinct_sizes).any())
        self.resizes = shapes is None or bool((shapes != self.read_size).any())
        self.scheduled: deque[np.ndarray] = deque()
        inputs, is_gpu = self.index.inputs, self.device.type == "cuda"
        # A GPU decodes to a CPU's pixels, rounded differently by up to 5 of 255.
        decoding: dict[str, Any] = {
            "device": "mixed" if is_gpu else "cpu",
            "adjust_orientation": cfg.data.exif is not False,
            "dtype": types.UINT16 if inputs.dtype == "uint16" else types.UINT8,
            "output_type": types.ANY_DATA if inputs.content == "stored" else types.RGB,
        }
        num_threads = cpus_per_rank()
        if is_gpu:
            # The hardware decoder rounds differently, and what it decodes varies from run to run.
            load = 0.0 if cfg.deterministic else cfg.loader.hw_decoder_load
            # The CPU's decoders interpolate subsampled colours, the GPU's only if asked to.
            decoding |= {"hw_decoder_load": load, "jpeg_fancy_upsampling": True}
            # The threads that launch kernels, the training's and DALI's, have CPUs of their own.
            num_threads = max(1, num_threads - 2)
        self.pipeline = planned_images(
            self.index.form,
            self.cuts,
            self.resizes,
            inputs.channels == 1 and inputs.content == "rgb",
            decoding,
            batch_size=len(self.factors) * plan.batch_size,
            num_threads=cfg.loader.num_threads or num_threads,
            device_id=self.device.index if is_gpu else None,
            prefetch_queue_depth=1,  # batches are scheduled here
        )

    def __iter__(self) -> Iterator[Batch]:
        while self.scheduled:  # of an epoch that was left early
            self._outputs()
        waiting = iter(self.plan)
        while True:
            for rows in islice(waiting, self.num_ahead + 1 - len(self.scheduled)):
                self._schedule(rows)
            if not self.scheduled:
                break
            rows = self.scheduled[0]
            yield Batch(rows, self._outputs())

    def _schedule(self, rows: np.ndarray) -> None:
        """Start the pipeline on these rows."""

        def per_side(values: np.ndarray) -> np.ndarray:
            return np.concatenate([factor * values for factor in self.factors])

        forms = [
            self.index.read_form(rows["sample"], side) for side in range(len(self.index.sides))
        ]
        images = forms[0]
        if len(forms) > 1:
            are_arrays = isinstance(images, np.ndarray)
            images = np.concatenate(forms) if are_arrays else [*forms[0], *forms[1]]
        self.pipeline.feed_input("images", images)
        if self.cuts:
            for name, first, second in (("start", "y", "x"), ("shape", "height", "width")):
                lengths = np.stack([rows[first], rows[second]], axis=1)
                self.pipeline.feed_input(name, per_side(lengths))
        if self.resizes:
            size = np.tile(np.array(self.read_size, np.float32), (len(rows), 1))
            self.pipeline.feed_input("size", per_side(size))
        self.pipeline.schedule_run()
        self.scheduled.append(rows)

    def _outputs(self) -> tuple[Tensor, ...]:
        """Return the images of the batch that was scheduled first, by side.

        Raises:
            BadFileError: a file of it cannot be decoded.
        """
        rows, stream = self.scheduled.popleft(), None
        if self.device.type == "cuda":  # it waits for the outputs, and not the host
            stream = torch.cuda.current_stream(self.device)
        try:
            (images,) = self.pipeline.outputs(stream)
        except RuntimeError as error:
            what = str(error).rpartition("encountered:")[2].strip().partition("\n")[0]
            if not what or OF_THE_MACHINE.search(what):
                raise
            names = first_few(map(self.index.name_of, rows["sample"].tolist()), 8)
            raise BadFileError(
                f"DALI cannot decode a file of the batch {names} ({what}); find it by python -m "
                "loaders.check, and use loader=pytorch or list the file in data.leave_out"
            ) from error
        num_sides = len(self.factors)
        if max(self.factors) == 1:
            return torch.from_dlpack(images.as_tensor()).chunk(num_sides)
        single = [torch.from_dlpack(image) for image in images]
        return tuple(
            torch.stack(single[side * len(rows) :][: len(rows)]) for side in range(num_sides)
        )


@pipeline_def
def planned_images(form, cuts, resizes, grey, decoding):  # type: ignore[no-untyped-def]
    """Decode files, cut rectangles and resize them with antialiasing.

    Inputs by name: `images` (paths, contents or decoded pixels, as `form` says); if `cuts`, `start`
    and `shape` of the rectangles; if `resizes`, `size`.
    """
    layout, dtype = ("HWC", decoding["dtype"]) if form == "pixels" else (None, types.UINT8)
    images = fn.external_source(name="images", dtype=dtype, layout=layout)
    if form == "paths":
        images = fn.io.file.read(images, dont_use_mmap=True)
    if cuts:
        start = fn.external_source(name="start", dtype=types.INT32)
        shape = fn.external_source(name="shape", dtype=types.INT32)
    # The same pixels without those outside of the rectangles; nvJPEG before 13.2 leaves it to the
    # CPU. On a CPU, it is 1.3 to 1.8 times as fast as to cut whole images.
    decodes_regions = cuts and decoding["device"] == "cpu" and form != "pixels"
    if form == "pixels":
        images = images.gpu() if decoding["device"] == "mixed" else images
    elif decodes_regions:
        images = fn.decoders.image_slice(images, start, shape, axis_names="HW", **decoding)
    else:
        images = fn.decoders.image(images, **decoding)
    if cuts and not decodes_regions:
        images = fn.slice(images, start, shape, axis_names="HW")
    if grey:  # the decoders' own conversion differs from Pillow's by up to 80 of 255
        images = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
    if resizes:
        size = fn.external_source(name="size", dtype=types.FLOAT)
        images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
    return images
