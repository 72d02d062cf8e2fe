"""SPDL: a pipeline of threads with torchvision's decoder.

SPDL's own decoder uses FFmpeg and is not faster for JPEGs.
"""

import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.baselines import Job, optional
from benchmarks.baselines.dataloader import convert, geometry, load_torchvision


def batches(job: Job) -> Iterator[Tensor]:
    """One pipeline per epoch: files are decoded to uint8, whole batches converted to float32."""
    builder = optional("spdl.pipeline", "spdl").PipelineBuilder
    # torchvision's decoder and v2 transforms release Python's interpreter lock.
    transform = v2.Compose([v2.Identity(), *geometry(job.recipe, v2)])
    load = partial(load_torchvision, transform=transform)
    to_float = convert(job.recipe)

    def finish(images: list[Tensor]) -> Tensor:
        batch = torch.stack(images).contiguous()
        if job.on_gpu:
            batch = batch.pin_memory().to(job.device, non_blocking=True)
        return to_float(batch)

    order = list(job.files)
    while True:
        if job.recipe.train:
            random.shuffle(order)
        pipeline = (
            builder()
            .add_source(order)
            .pipe(load, concurrency=job.parallel, output_order="input")
            .aggregate(job.batch_size, drop_last=job.recipe.train)
            .pipe(finish)
            .add_sink()
            .build(num_threads=job.parallel, max_failures=0)
        )
        with pipeline.auto_stop():
            yield from pipeline
        if not job.recipe.train:
            return
