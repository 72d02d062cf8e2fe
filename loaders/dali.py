"""NVIDIA DALI as the backend: one pipeline for the whole run, fed with the plan's rows."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from loaders.base import Loader
from loaders.index import as_image_tree
from loaders.plan import PlanSampler

try:
    from nvidia.dali import fn, pipeline_def, types
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "loader=dali needs NVIDIA DALI, which exists for Linux on x86_64 (and aarch64) only: "
        "pip install nvidia-dali-cuda120, or use loader=pytorch"
    ) from error

if TYPE_CHECKING:
    from conf.schema import Config


@pipeline_def
def image_pipeline(source, size, output_type, decoder_device):  # type: ignore[no-untyped-def]
    """Read the files, decode only the rectangles, resize them with antialiasing and flip them."""
    paths, start, shape, mirror = fn.external_source(
        source=source,
        num_outputs=4,
        batch=True,
        dtype=[types.UINT8, types.INT32, types.INT32, types.INT32],
    )
    images = fn.decoders.image_slice(
        fn.io.file.read(paths),
        start,
        shape,
        axis_names="HW",
        device=decoder_device,
        output_type=output_type,
    )
    return fn.resize_crop_mirror(
        images, size=size, crop=size, mirror=mirror, interp_type=types.INTERP_LINEAR, antialias=True
    )


class DALILoader(Loader):
    """Decodes and augments on the GPU if `device` is one, else on the CPU.

    The order and the rectangles are the plan's; DALI's own shuffling is not used.
    """

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index = as_image_tree(sampler.index, cfg.data.cache_dir)
        assert index.files is not None
        self.paths = [np.frombuffer(path.encode(), np.uint8) for path in index.files]
        self.waiting: Iterator[np.ndarray] = iter(())
        self.running: deque[np.ndarray] = deque()
        on_gpu = device.type == "cuda"
        self.pipeline = image_pipeline(
            self._feed,
            self.output_size,
            types.GRAY if self.in_channels == 1 else types.RGB,
            "mixed" if on_gpu else "cpu",
            batch_size=sampler.global_batch_size // sampler.num_replicas,
            num_threads=cfg.loader.num_threads,
            device_id=device.index if on_gpu else None,
            prefetch_queue_depth=cfg.loader.prefetch_queue_depth,
        )
        self.pipeline.build()

    def _feed(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """The next batch of rows in the form that the pipeline takes; StopIteration at the end."""
        rows = next(self.waiting)
        self.running.append(rows)
        return (
            [self.paths[sample] for sample in rows["sample"]],
            np.stack([rows["y"], rows["x"]], axis=1),
            np.stack([rows["height"], rows["width"]], axis=1),
            rows["hflip"] + 2 * rows["vflip"].astype(np.int32),
        )

    def _run(self) -> Tensor | None:
        try:
            (images,) = self.pipeline.run()
        except StopIteration:
            return None
        return torch.from_dlpack(images.as_tensor())

    def batches(self) -> Iterator[tuple[np.ndarray, Tensor]]:
        # An epoch that was left early has batches in flight.
        self.waiting = iter(())
        while self._run() is not None:
            pass
        self.pipeline.reset()
        self.running.clear()
        self.waiting = iter(self.sampler)
        while (images := self._run()) is not None:
            yield self.running.popleft(), images
