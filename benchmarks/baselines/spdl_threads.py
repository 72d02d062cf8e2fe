"""SPDL: its pipeline of threads, around its own FFmpeg-based decoder or around torchvision."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import Recipe, optional

Job = tuple[int, list[float]]
"""Number of a file, and four uniform random numbers in [0, 1) for its crop and flips."""


class Batches:
    """One pipeline per epoch: each file to uint8, then one batch after another to float."""

    def __init__(
        self,
        load: Callable[[Job], Tensor],
        num_files: int,
        recipe: Recipe,
        batch_size: int,
        num_threads: int,
        seed: int,
    ) -> None:
        self.pipeline = optional("spdl.pipeline", "spdl")
        self.load, self.num_files, self.recipe = load, num_files, recipe
        self.batch_size, self.num_threads = batch_size, num_threads
        self.random = random.Random(seed)
        self.mean = torch.tensor(recipe.mean).view(-1, 1, 1)
        self.std = torch.tensor(recipe.std).view(-1, 1, 1)
        try:
            load((0, [0.5] * 4))  # a pipeline would only skip what it cannot decode
        except RuntimeError as error:
            raise ModuleNotFoundError(
                f"SPDL cannot decode; is FFmpeg installed? ({error})"
            ) from error

    def _finish(self, images: list[Tensor]) -> Tensor:
        batch = torch.stack(images).contiguous()
        return batch.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(self.num_files))
        if self.recipe.train:
            self.random.shuffle(order)
        jobs = [(number, [self.random.random() for _ in range(4)]) for number in order]
        pipeline = (
            self.pipeline.PipelineBuilder()
            .add_source(jobs)
            .pipe(self.load, concurrency=self.num_threads, output_order="input")
            .aggregate(self.batch_size, drop_last=self.recipe.train)
            .pipe(self._finish)
            .add_sink()
            .build(num_threads=self.num_threads, max_failures=0)
        )
        with pipeline.auto_stop():
            yield from pipeline


def own_loader(files: Sequence[str], recipe: Recipe) -> Callable[[Job], Tensor]:
    """SPDL's own functions: FFmpeg decodes, scales, crops and flips."""
    io: Any = optional("spdl.io", "spdl")

    def load(job: Job) -> Tensor:
        number, chance = job
        packets = io.demux_image(files[number])
        frames = io.decode_packets(packets, filter_desc=_filters(recipe, chance))
        image: np.ndarray = io.to_numpy(io.convert_frames(frames))
        return torch.from_numpy(image).permute(2, 0, 1)

    return load


def _filters(recipe: Recipe, chance: list[float]) -> str:
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
        y, x = chance[:2] if recipe.crops_randomly else (0.5, 0.5)
        steps.append(f"crop={width}:{height}:(iw-ow)*{x:.4f}:(ih-oh)*{y:.4f}")
    if recipe.train and chance[2] < recipe.hflip:
        steps.append("hflip")
    if recipe.train and chance[3] < recipe.vflip:
        steps.append("vflip")
    return ",".join([*steps, "format=pix_fmts=rgb24"])


def torchvision_loader(files: Sequence[str], recipe: Recipe) -> Callable[[Job], Tensor]:
    """torchvision's decoder and v2 transforms, which release Python's interpreter lock."""
    from benchmarks.baselines.torchvision_v2 import Images

    images = Images(files, recipe, uint8_batches=True)
    return lambda job: images[job[0]]


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_threads: int = 2,
    seed: int = 0,
    own_decoder: bool = True,
) -> Batches:
    """Images of any format that FFmpeg (or torchvision) decodes, as RGB."""
    load = (own_loader if own_decoder else torchvision_loader)(files, recipe)
    return Batches(load, len(files), recipe, batch_size, num_threads, seed)
