"""SPDL: its pipeline of threads, around its own FFmpeg-based decoder or around torchvision."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.baselines import Job, Recipe, optional
from benchmarks.baselines.dataloader import convert, geometry, load_torchvision


def own(job: Job) -> Iterator[Tensor]:
    """SPDL's own functions: FFmpeg decodes, scales, crops and flips."""
    return batches(job, partial(_load, optional("spdl.io", "spdl"), job.recipe))


def around_torchvision(job: Job) -> Iterator[Tensor]:
    """torchvision's decoder and v2 transforms, which release Python's interpreter lock."""
    transform = v2.Compose([v2.Identity(), *geometry(job.recipe, v2)])
    return batches(job, partial(load_torchvision, transform=transform))


def batches(job: Job, load: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """One pipeline per epoch: each file to uint8 RGB, then one batch after another to float32."""
    builder = optional("spdl.pipeline", "spdl").PipelineBuilder
    try:
        load(job.files[0])  # a pipeline would only skip what it cannot decode
    except RuntimeError as error:
        raise ModuleNotFoundError(f"SPDL cannot decode; is FFmpeg installed? ({error})") from error
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


def _load(io: Any, recipe: Recipe, path: str) -> Tensor:
    frames = io.decode_packets(io.demux_image(path), filter_desc=_filters(recipe))
    return torch.from_numpy(io.to_numpy(io.convert_frames(frames))).permute(2, 0, 1)


def _filters(recipe: Recipe) -> str:
    """FFmpeg's filters for one image."""
    steps = []
    if isinstance(recipe.resize, int):
        side = recipe.resize
        size = f"'if(lt(iw,ih),{side},-1)':'if(lt(iw,ih),-1,{side})'"
        steps.append(f"scale={size}:flags=bilinear")
    elif recipe.resize is not None:
        steps.append(f"scale={recipe.resize[1]}:{recipe.resize[0]}:flags=bilinear")
    if recipe.crop is not None:
        height, width = recipe.crop
        y, x = (random.random(), random.random()) if recipe.crops_randomly else (0.5, 0.5)
        steps.append(f"crop={width}:{height}:(iw-ow)*{x:.4f}:(ih-oh)*{y:.4f}")
    if recipe.train and random.random() < recipe.hflip:
        steps.append("hflip")
    if recipe.train and random.random() < recipe.vflip:
        steps.append("vflip")
    return ",".join([*steps, "format=pix_fmts=rgb24"])
