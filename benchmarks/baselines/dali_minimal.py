"""The shortest DALI pipeline that is also fast: what one writes after reading DALI's manual."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import Recipe, optional


class Batches:
    """DALI's own file reader and shuffling; decoding, resizing, cropping and flipping fused."""

    def __init__(
        self,
        files: Sequence[str],
        recipe: Recipe,
        batch_size: int,
        num_threads: int,
        seed: int,
        channels: int,
        device_id: int | None,
    ) -> None:
        dali = optional("nvidia.dali", "nvidia-dali-cuda120")
        optional("nvidia.dali.fn", "nvidia-dali-cuda120")
        self.num_batches = (
            len(files) // batch_size if recipe.train else -(-len(files) // batch_size)
        )
        self.rest = None if recipe.train else len(files) - (self.num_batches - 1) * batch_size
        pipeline = dali.pipeline_def(_graph)
        self.pipeline = pipeline(
            list(files),
            recipe,
            channels,
            "cpu" if device_id is None else "mixed",
            batch_size=batch_size,
            num_threads=num_threads,
            device_id=device_id,
            seed=seed + 1,  # DALI takes a negative seed as none, and 0 is allowed
        )
        self.pipeline.build()

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.num_batches):
            (images,) = self.pipeline.run()
            batch = torch.from_dlpack(images.as_tensor())
            yield batch[: self.rest] if number == self.num_batches - 1 else batch


def _graph(files: list[str], recipe: Recipe, channels: int, decoder: str) -> Any:
    fn = optional("nvidia.dali.fn", "nvidia-dali-cuda120")
    types = optional("nvidia.dali.types", "nvidia-dali-cuda120")
    math = optional("nvidia.dali.math", "nvidia-dali-cuda120")
    encoded, _ = fn.readers.file(files=files, random_shuffle=recipe.train, name="reader")
    kind = {1: types.GRAY, 3: types.RGB}.get(channels, types.ANY_DATA)
    mirror: Any = 0
    if recipe.train and recipe.hflip:
        mirror = fn.random.coin_flip(probability=recipe.hflip)
    if recipe.train and recipe.vflip:
        mirror = mirror + 2 * fn.random.coin_flip(probability=recipe.vflip)
    if recipe.crop is None:
        images = fn.decoders.image(encoded, device=decoder, output_type=kind)
    else:
        # The rectangle of the file that becomes the crop once the whole is resized: only this is
        # decoded.
        shape = fn.peek_image_shape(encoded)
        whole = fn.cast(fn.stack(shape[0], shape[1]), dtype=types.FLOAT)
        if recipe.resize is None:
            scale: Any = 1.0
        elif isinstance(recipe.resize, int):
            scale = math.min(whole[0], whole[1]) / float(recipe.resize)
        else:
            scale = whole / types.Constant([float(side) for side in recipe.resize])
        window = math.min(
            fn.cast(
                types.Constant([float(side) for side in recipe.crop]) * scale + 0.5,
                dtype=types.INT32,
            ),
            fn.cast(whole, dtype=types.INT32),
        )
        free = fn.cast(whole, dtype=types.INT32) - window
        if recipe.crops_randomly:
            place = fn.random.uniform(range=[0.0, 1.0], shape=[2])
            start = fn.cast(
                math.floor(place * fn.cast(free + 1, dtype=types.FLOAT)), dtype=types.INT32
            )
        else:
            start = free // 2
        images = fn.decoders.image_slice(
            encoded, start, window, axis_names="HW", device=decoder, output_type=kind
        )
    size = recipe.crop or (None if isinstance(recipe.resize, int) else recipe.resize)
    if size is None and recipe.resize is not None:
        images = fn.resize(images, resize_shorter=recipe.resize, antialias=True)
    elif size is not None:
        images = fn.resize_crop_mirror(
            images,
            size=size,
            crop=size,
            mirror=mirror,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        mirror = 0
    if not isinstance(mirror, int):
        images = fn.flip(images, horizontal=mirror % 2, vertical=mirror // 2)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in recipe.mean],
        std=[255 * value for value in recipe.std],
    )


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_threads: int = 2,
    seed: int = 0,
    channels: int = 3,
    device_id: int | None = None,
) -> Batches:
    """uint8 images of equal size after the recipe.

    Args:
        files: paths.
        recipe: what becomes of them.
        batch_size: images per batch.
        num_threads: CPU threads.
        seed: decides the order and the crops.
        channels: of the files; other than 1 and 3 only where DALI decodes the format as it is.
        device_id: GPU that decodes and resizes, and on which the batches then lie; None: the CPU.
    """
    return Batches(files, recipe, batch_size, num_threads, seed, channels, device_id)
