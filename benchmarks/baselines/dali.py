"""DALI pipelines: the fastest short one, and one as in its manual."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator
from torch import Tensor
from torchvision.datasets import ImageFolder

from benchmarks.baselines import Job, Recipe

Pair = tuple[Tensor, Tensor]


def minimal(job: Job) -> Iterator[Tensor]:
    """Short and fast on the CPU: DALI's file reader; fused decoding, resizing and flipping.

    TIFF files keep all channels.
    """
    pipeline = pipeline_def(_minimal_graph)(
        *(job.files, job.recipe),
        batch_size=job.batch_size,
        num_threads=max(1, job.parallel),
        device_id=None,
        seed=1,
    )
    pipeline.build()
    left = len(job.files)
    while job.recipe.train or left > 0:
        (images,) = pipeline.run()
        batch = torch.from_dlpack(images.as_tensor())
        yield batch if job.recipe.train else batch[:left]
        left -= job.batch_size


def _minimal_graph(files: list[str], recipe: Recipe) -> Any:
    encoded, _ = fn.readers.file(files=files, random_shuffle=recipe.train, name="reader")
    kind = types.ANY_DATA if files[0].endswith(".tif") else types.RGB
    flips = [
        fn.random.coin_flip(probability=p) if recipe.train and p else 0
        for p in (recipe.hflip, recipe.vflip)
    ]
    size = recipe.crop or recipe.resize
    if recipe.crop is None:
        images = fn.decoders.image(encoded, output_type=kind)
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
        images = fn.decoders.image_slice(encoded, start, window, axis_names="HW", output_type=kind)
    if size is not None:
        images = fn.resize_crop_mirror(
            images,
            size=size,
            crop=size,
            mirror=flips[0] + 2 * flips[1],
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
    return normalise(images, recipe)


def normalise(images: Any, recipe: Recipe) -> Any:
    """Convert uint8 (H, W, C) to normalised float32 (C, H, W)."""
    mean, std = ([255 * value for value in values] for values in (recipe.mean, recipe.std))
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std
    )


def with_labels(
    root: Path, recipe: Recipe, batch_size: int, threads: int, device: torch.device
) -> Iterator[Pair]:
    """Images and labels as in DALI's manual: its file reader, iterator and whole images."""
    on_gpu = device.type == "cuda"
    files, labels = map(list, zip(*ImageFolder(str(root)).samples, strict=True))

    @pipeline_def
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
    batches = DALIClassificationIterator(pipeline, reader_name="reader", auto_reset=True)
    while True:
        for (batch,) in batches:
            yield batch["data"], batch["label"].squeeze(1).long()
