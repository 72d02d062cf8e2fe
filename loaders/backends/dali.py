"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the rows of the plan."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError, counted, first_few
from conf.loader.dali import DaliConfig
from conf.schema import Config
from loaders.batch import Batch
from loaders.dali_pipeline import decoding, output_stream, pipeline_options, planned_images, types
from loaders.index import Index
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.transform import ImageTransform

UNREADABLE, OTHER_PIXELS = 0, 1
"""Values of `Header.dali`."""


def dali_loader(plan: Plan, cfg: Config, device: torch.device) -> Loader:
    """Build the loader of a plan of `Rectangles`.

    Raises:
        UserError: DALI cannot read all files right.
    """
    rectangles = plan.samples
    assert isinstance(rectangles, Rectangles)
    if cfg.data.on_error == "skip":
        raise UserError(
            "data.on_error=skip is not possible with loader=dali; list bad files by python -m "
            "loaders.check ... out=bad.txt, and leave them out by data.leave_out=bad.txt"
        )
    check_files(rectangles.index)
    transform = ImageTransform(rectangles, cfg, device)
    info = transform.info(plan)
    headers = rectangles.index.source.headers
    num_others = sum(int((side["dali"] == OTHER_PIXELS).sum()) for side in headers)
    if num_others:
        info.description = (f"DALI decodes {counted(num_others, 'file')} to other pixels",)
    batches = DALIBatches(plan, rectangles, cfg, device)
    return Loader(plan, batches, transform, info, device, cpus_per_rank())


def check_files(index: Index) -> None:
    """Raise UserError for images that DALI cannot read, or would read wrong."""
    if index.target.kind == "masks":
        raise UserError("loader=dali does not read masks; use loader=pytorch")
    for side, headers in enumerate(index.source.headers):
        for is_wrong, why in (
            (headers["dali"] == UNREADABLE, "that DALI cannot read"),
            (headers["background"] >= 0, "with transparent pixels, which DALI would show"),
        ):
            wrong = np.flatnonzero(is_wrong)
            if len(wrong):
                names = first_few(index.source.place(sample, side) for sample in wrong[:6].tolist())
                raise UserError(
                    f"{index.name} has {counted(len(wrong), 'file')} {why}, such as {names}; use "
                    "loader=pytorch, convert them, or list them in data.leave_out"
                )


class DALIBatches(Iterable[Batch]):
    """Reads batches on the GPU if `device` is one, else on the CPU.

    Order and rectangles come from the plan, not from DALI's own shuffling. Pairs are decoded in one
    call, the targets after the inputs of the batch.
    """

    def __init__(
        self, plan: Plan, rectangles: Rectangles, cfg: Config, device: torch.device
    ) -> None:
        assert isinstance(cfg.loader, DaliConfig)
        self.plan, self.device, self.cfg, self.options = plan, device, cfg, cfg.loader
        self.index, self.read_size = rectangles.index, rectangles.read_size
        self.factors = tuple(side.size_factor for side in self.index.sides)
        # Steps that no row needs are left out of the pipeline.
        shapes = rectangles.distinct_shapes
        self.cuts = shapes is None or bool((shapes != self.index.distinct_sizes).any())
        self.resizes = shapes is None or bool((shapes != self.read_size).any())
        self.flips = rectangles.train and cfg.data.hflip + cfg.data.vflip > 0
        self.pipeline: Any = None
        self.scheduled: deque[np.ndarray] = deque()

    def __iter__(self) -> Iterator[Batch]:
        self.pipeline = self.pipeline or self._build()
        while self.scheduled:  # of an epoch that was left early
            self._outputs()
        waiting = iter(self.plan)
        while True:
            while len(self.scheduled) <= self.options.prefetch_queue_depth:
                rows = next(waiting, None)
                if rows is None:
                    break
                self._schedule(rows)
            if not self.scheduled:
                break
            rows = self.scheduled[0]
            yield Batch(rows, self._outputs())

    def _schedule(self, rows: np.ndarray) -> None:
        """Start the pipeline on these rows."""
        forms = [
            self.index.source.read_form(rows["sample"], side, spec)
            for side, spec in enumerate(self.index.sides)
        ]
        inputs: dict[str, Any] = {"images": forms[0]}
        if len(forms) > 1:
            are_arrays = isinstance(forms[0], np.ndarray)
            inputs["images"] = np.concatenate(forms) if are_arrays else [*forms[0], *forms[1]]
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
        self.scheduled.append(rows)

    def _outputs(self) -> tuple[Tensor, ...]:
        """Return the images of the batch that was scheduled first, by side.

        Raises:
            UserError: a file of it cannot be decoded.
        """
        rows = self.scheduled.popleft()
        try:
            (images,) = self.pipeline.outputs(output_stream(self.device))
        except RuntimeError as error:
            self.pipeline, self.scheduled = None, deque()  # it is dead after an error
            raise self._named(rows, error) from error
        num_sides = len(self.factors)
        if max(self.factors) == 1:
            return torch.from_dlpack(images.as_tensor()).chunk(num_sides)
        single = [torch.from_dlpack(image) for image in images]
        return tuple(
            torch.stack(single[side * len(rows) :][: len(rows)]) for side in range(num_sides)
        )

    def _named(self, rows: np.ndarray, error: RuntimeError) -> Exception:
        """Return the error of the file that `loader=pytorch` cannot decode either, or else one that
        names the files of the batch."""
        if not self.index.source.headers:
            return error  # the machine is to blame, not a file
        for sample in rows["sample"].tolist():
            for side in range(len(self.index.sides)):
                try:
                    self.index.read(sample, side)
                except UserError as bad:
                    return bad
        names = first_few(map(self.index.source.name, rows["sample"].tolist()), 8)
        what = str(error).strip().splitlines()[-1]
        return UserError(
            f"DALI cannot decode a file of the batch {names} ({what}); use loader=pytorch, or list "
            "the file in data.leave_out"
        )

    def _build(self) -> Any:
        inputs = self.index.inputs
        pipeline = planned_images(
            self.index.source.form,
            self.cuts,
            self.device.type == "cpu",
            self.resizes,
            self.flips,
            inputs.channels == 1 and inputs.content == "rgb",
            decoding(self.cfg, self.options, self.device)
            | {
                "dtype": types.UINT16 if inputs.dtype == "uint16" else types.UINT8,
                "output_type": types.ANY_DATA if inputs.content == "stored" else types.RGB,
            },
            **pipeline_options(self.options, self.device, len(self.factors) * self.plan.batch_size),
        )
        pipeline.build()
        return pipeline
