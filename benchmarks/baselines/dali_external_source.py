"""Pairs through DALI as the speed-up template feeds them: Python reads the files, without shards."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import Recipe, optional

Pair = tuple[Tensor, Tensor]


class Batches:
    """Whole files are read one after another in Python, decoded in full, then resized, cropped and
    flipped by one DALI operator each."""

    def __init__(
        self,
        inputs: Sequence[str],
        targets: Sequence[str],
        recipe: Recipe,
        batch_size: int,
        num_threads: int,
        seed: int,
        device_id: int | None,
    ) -> None:
        dali = optional("nvidia.dali", "nvidia-dali-cuda120")
        self.files = list(zip(inputs, targets, strict=True))
        self.recipe, self.batch_size = recipe, batch_size
        self.random = random.Random(seed)
        self.pipeline = dali.pipeline_def(_graph)(
            self._read,
            recipe,
            "cpu" if device_id is None else "mixed",
            batch_size=batch_size,
            num_threads=num_threads,
            device_id=device_id,
            seed=seed + 1,
        )
        self.pipeline.build()

    def _read(self) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """The bytes of one epoch's files, batch by batch."""
        files = self.files[:]
        if self.recipe.train:
            self.random.shuffle(files)
            files = files[: len(files) // self.batch_size * self.batch_size]
        for start in range(0, len(files), self.batch_size):
            content = [
                [np.frombuffer(Path(path).read_bytes(), np.uint8) for path in pair]
                for pair in files[start : start + self.batch_size]
            ]
            yield [pair[0] for pair in content], [pair[1] for pair in content]

    def __iter__(self) -> Iterator[Pair]:
        while True:
            try:
                inputs, targets = self.pipeline.run()
            except StopIteration:
                self.pipeline.reset()
                return
            yield torch.from_dlpack(inputs.as_tensor()), torch.from_dlpack(targets.as_tensor())


def _graph(read: Any, recipe: Recipe, decoder: str) -> Any:
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
        images = fn.transpose(images, perm=[2, 0, 1])
        mean = np.array(recipe.mean, np.float32).reshape(-1, 1, 1)
        std = np.array(recipe.std, np.float32).reshape(-1, 1, 1)
        scale, shift = 1 / (255 * std), -mean / std
        if scale.size == 1:
            return images * float(scale.item()) + float(shift.item())
        return images * types.Constant(scale) + types.Constant(shift)

    return transform(encoded[0]), transform(encoded[1])


def batches(
    inputs: Sequence[str],
    targets: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_threads: int = 2,
    seed: int = 0,
    device_id: int | None = None,
) -> Batches:
    """(inputs, targets), each float32 (B, 3, H, W); every process would read all of the data."""
    return Batches(inputs, targets, recipe, batch_size, num_threads, seed, device_id)
