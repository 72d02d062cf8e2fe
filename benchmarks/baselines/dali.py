"""DALI pipelines: the fastest short one, one as in its manual, one as in the speed-up template."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import ImageFolder

from benchmarks.baselines import Job, Recipe, optional

Pair = tuple[Tensor, Tensor]


def build(graph: Any, arguments: tuple[Any, ...], job: Job) -> Any:
    """Build a pipeline, which decodes, resizes and returns batches on a GPU if the job has one."""
    pipeline = optional("nvidia.dali", "nvidia-dali-cuda120").pipeline_def(graph)(
        *(*arguments, job.recipe, "mixed" if job.on_gpu else "cpu"),
        batch_size=job.batch_size,
        num_threads=max(1, job.parallel),
        device_id=(job.device.index or 0) if job.on_gpu else None,
        seed=1,
    )
    pipeline.build()
    return pipeline


def minimal(job: Job) -> Iterator[Tensor]:
    """Short and fast pipeline: DALI's file reader; fused decoding, resizing, cropping and flipping.

    TIFF files keep all channels.
    """
    pipeline = build(_minimal_graph, (job.files,), job)
    left = len(job.files)
    while job.recipe.train or left > 0:
        (images,) = pipeline.run()
        batch = torch.from_dlpack(images.as_tensor())
        yield batch if job.recipe.train else batch[:left]
        left -= job.batch_size


def _minimal_graph(files: list[str], recipe: Recipe, decoder: str) -> Any:
    fn = optional("nvidia.dali.fn", "nvidia-dali-cuda120")
    types = optional("nvidia.dali.types", "nvidia-dali-cuda120")
    math = optional("nvidia.dali.math", "nvidia-dali-cuda120")
    encoded, _ = fn.readers.file(files=files, random_shuffle=recipe.train, name="reader")
    kind = types.ANY_DATA if files[0].endswith(".tif") else types.RGB
    flips = [
        fn.random.coin_flip(probability=p) if recipe.train and p else 0
        for p in (recipe.hflip, recipe.vflip)
    ]
    size = recipe.crop or recipe.resize
    if recipe.crop is None:
        images = fn.decoders.image(encoded, device=decoder, output_type=kind)
    else:
        # Decode only the rectangle that becomes the crop after resizing.
        shape = fn.peek_image_shape(encoded)
        whole = fn.cast(fn.stack(shape[0], shape[1]), dtype=types.FLOAT)
        scale: Any = 1.0
        if isinstance(recipe.resize, int):
            scale = math.min(whole[0], whole[1]) / float(recipe.resize)
        elif recipe.resize is not None:
            scale = whole / types.Constant([float(side) for side in recipe.resize])
        crop = types.Constant([float(side) for side in recipe.crop])
        whole = fn.cast(whole, dtype=types.INT32)
        window = math.min(fn.cast(crop * scale + 0.5, dtype=types.INT32), whole)
        start = (whole - window) // 2
        if recipe.crops_randomly:
            place = fn.random.uniform(range=[0.0, 1.0], shape=[2])
            free = fn.cast(whole - window + 1, dtype=types.FLOAT)
            start = fn.cast(math.floor(place * free), dtype=types.INT32)
        images = fn.decoders.image_slice(
            encoded, start, window, axis_names="HW", device=decoder, output_type=kind
        )
    if size is not None:
        images = fn.resize_crop_mirror(
            images,
            size=size,
            crop=size,
            mirror=flips[0] + 2 * flips[1],
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
    return normalise(fn, types, images, recipe)


def normalise(fn: Any, types: Any, images: Any, recipe: Recipe) -> Any:
    """Convert uint8 (H, W, C) to normalised float32 (C, H, W)."""
    mean, std = ([255 * value for value in values] for values in (recipe.mean, recipe.std))
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std
    )


def external_source(job: Job) -> Iterator[Pair]:
    """Pairs as in the speed-up template: read sequentially in Python, fully decoded, transformed.

    Resizing, cropping and flipping are one operator each; there is no sharding.
    """
    files, shuffler = list(zip(job.files, job.targets, strict=True)), random.Random(0)

    def read() -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Bytes of one epoch's files, batch by batch."""
        count = len(files)
        if job.recipe.train:
            shuffler.shuffle(files)
            count -= count % job.batch_size
        for start in range(0, count, job.batch_size):
            chosen = files[start : start + job.batch_size]
            content = [[np.fromfile(path, np.uint8) for path in pair] for pair in chosen]
            yield [pair[0] for pair in content], [pair[1] for pair in content]

    pipeline = build(_external_graph, (read,), job)
    while True:
        try:
            batches = pipeline.run()
        except StopIteration:
            if not job.recipe.train:
                return
            pipeline.reset()
            continue
        yield torch.from_dlpack(batches[0].as_tensor()), torch.from_dlpack(batches[1].as_tensor())


def _external_graph(read: Any, recipe: Recipe, decoder: str) -> Any:
    fn = optional("nvidia.dali.fn", "nvidia-dali-cuda120")
    types = optional("nvidia.dali.types", "nvidia-dali-cuda120")
    encoded = fn.external_source(source=read, num_outputs=2, dtype=types.UINT8, cycle="raise")
    place: list[Any] = [0.5, 0.5]
    flips: list[Any] = [0, 0]
    if recipe.crops_randomly:
        place = [fn.random.uniform(range=[0.0, 1.0]) for _ in range(2)]
    if recipe.train:
        flips = [fn.random.coin_flip(probability=p) for p in (recipe.hflip, recipe.vflip)]

    def transform(file: Any) -> Any:
        images = fn.decoders.image(file, device=decoder, output_type=types.RGB)
        if isinstance(recipe.resize, int):
            images = fn.resize(images, resize_shorter=recipe.resize, antialias=True)
        elif recipe.resize is not None:
            images = fn.resize(images, size=recipe.resize, antialias=True)
        if recipe.crop is not None:
            images = fn.crop(images, crop=recipe.crop, crop_pos_y=place[0], crop_pos_x=place[1])
        images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
        return normalise(fn, types, images, recipe)

    return transform(encoded[0]), transform(encoded[1])


def with_labels(
    root: Path, recipe: Recipe, batch_size: int, threads: int, device: torch.device
) -> Iterator[Pair]:
    """Images and labels as in DALI's manual: its file reader, iterator and whole images."""
    dali = optional("nvidia.dali", "nvidia-dali-cuda120")
    plugin = optional("nvidia.dali.plugin.pytorch", "nvidia-dali-cuda120")
    fn, types, on_gpu = dali.fn, dali.types, device.type == "cuda"
    files, labels = map(list, zip(*ImageFolder(str(root)).samples, strict=True))

    @dali.pipeline_def
    def graph() -> Any:
        encoded, label = fn.readers.file(
            files=files, labels=labels, random_shuffle=True, name="reader"
        )
        images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu")
        images = fn.resize(images, resize_shorter=recipe.resize, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            crop=recipe.crop,
            crop_pos_x=fn.random.uniform(range=[0.0, 1.0]),
            crop_pos_y=fn.random.uniform(range=[0.0, 1.0]),
            mirror=fn.random.coin_flip(probability=recipe.hflip),
            mean=[255 * value for value in recipe.mean],
            std=[255 * value for value in recipe.std],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return images, label.gpu() if on_gpu else label

    pipeline = graph(
        batch_size=batch_size,
        num_threads=threads,
        device_id=(device.index or 0) if on_gpu else None,
        prefetch_queue_depth=2,
        seed=1,
    )
    batches = plugin.DALIClassificationIterator(pipeline, reader_name="reader", auto_reset=True)
    while True:
        for (batch,) in batches:
            yield batch["data"], batch["label"].squeeze(1).long()
