"""Random brightness, contrast and saturation, and RandAugment (Cubuk et al. 2020, "RandAugment:
Practical automated data augmentation with a reduced search space") without moving pixels."""

from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random, on_device, to_device
from loaders.targets import Target

MOST_OPERATIONS = 4
LARGEST_MAGNITUDE = 30


def grey(images: Tensor) -> Tensor:
    """Return the luma of three channels, else the mean of all channels; (B, 1, H, W)."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def mean_grey(images: Tensor) -> Tensor:
    return grey(images).mean(dim=(2, 3), keepdim=True)


def smooth(images: Tensor) -> Tensor:
    """Smooth the inner pixels by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13.

    On a CPU, torchvision's convolution takes 2 to 10 times as long; on a GPU, it rounds to TF32.
    """
    if min(images.shape[2:]) <= 2:
        return images
    inner = images[..., 1:-1, 1:-1]
    around = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    around = around[..., :-2] + around[..., 1:-1] + around[..., 2:]
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = (around + 4 * inner) / 13
    return smoothed


WITHOUT = {"contrast": mean_grey, "saturation": grey, "sharpness": smooth}
"""Functions that take a quality from images, by its name."""


def adjust(quality: str, images: Tensor, factor: Tensor | float) -> Tensor:
    """Multiply a quality of images (B, C, H, W) by a factor, of all or (B, 1, 1, 1) of each: as
    torchvision's `adjust_*`, which takes one factor and one or three channels."""
    if quality == "brightness":
        return (images * factor).clamp_(0, 1)
    return torch.lerp(WITHOUT[quality](images), images, factor).clamp_(0, 1)


class ColourJitter(Augmentation):
    """Changes brightness, contrast and saturation, in this order."""

    keys = ("colour_jitter",)
    columns = (("brightness", "f4", 1.0), ("contrast", "f4", 1.0), ("saturation", "f4", 1.0))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        for (name, _, _), strength in zip(self.columns, data.colour_jitter, strict=True):
            rows[name] = 1 + strength * (2 * random(name, 1)[:, 0] - 1)

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        for name, _, _ in self.columns:
            if (rows[name] != 1).any():
                [factor] = on_device(images.device, rows[name][:, None])
                images = adjust(name, images, factor[..., None, None])
        return images


ADJUSTMENTS = ("brightness", *WITHOUT)
OPERATIONS = ("identity", *ADJUSTMENTS, "posterize", "solarize", "autocontrast", "equalize")


def operate(operation: str, images: Tensor, amount: float) -> Tensor:
    """Return images (B, C, H, W) in [0, 1] after one of `OPERATIONS`.

    Args:
        operation: name of the operation.
        images: images, which stay as they are.
        amount: a factor, the bits of posterize or the threshold of solarize; others have none.
    """
    from torchvision.transforms.v2 import functional  # takes seconds, and few runs need it

    if operation in ADJUSTMENTS:
        return adjust(operation, images, amount)
    if operation == "posterize":
        return functional.posterize(images, int(amount))
    if operation == "solarize":
        return functional.solarize(images, amount)
    if operation == "equalize":
        return functional.equalize(images)
    channels = images.flatten(0, 1)[:, None]
    return functional.autocontrast(channels).view(images.shape)


class RandAugment(Augmentation):
    """Operations drawn from `OPERATIONS`, one after the other, on inputs only.

    Those that move pixels (shear, translate, rotate) are left out, because masks and target images
    would have to move too; see `data.rotation` and `data.random_scale`.
    """

    keys = ("randaugment",)
    columns = (
        ("operations", f"({MOST_OPERATIONS},)i1", 0),
        ("amounts", f"({MOST_OPERATIONS},)f4", 0.0),
    )

    def check(
        self, data: DataConfig, target: Target, global_batch_size: int, world_size: int
    ) -> None:
        if target.kind == "images":
            raise UserError(
                f"data.randaugment={list(data.randaugment)} changes the colours of inputs but not "
                "of target images; use data.colour_jitter, which changes both, or null"
            )

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        count, magnitude = data.randaugment
        strength = magnitude / LARGEST_MAGNITUDE  # scaled as in the paper
        factors = [1 - 0.9 * strength, 1 + 0.9 * strength]
        bits, threshold = 8 - round(4 * strength), 1 - strength
        # In the order of OPERATIONS, for both signs.
        amounts = [[0, 0], *4 * [factors], 2 * [bits], 2 * [threshold], [0, 0], [0, 0]]
        chances, signs = np.split(random("operations", 2 * MOST_OPERATIONS), 2, axis=1)
        operations = (chances * len(OPERATIONS)).astype(int)[:, :count]
        is_positive = (signs[:, :count] >= 0.5).astype(int)
        rows["operations"][:, :count] = operations
        rows["amounts"][:, :count] = np.array(amounts)[operations, is_positive]

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        order = np.lexsort((rows["amounts"], rows["operations"]), axis=0)
        index = to_device(torch.from_numpy(order), images.device)
        for turn, samples in enumerate(order.T):
            operations, amounts = rows["operations"][samples, turn], rows["amounts"][samples, turn]
            # Magnitudes are one for the run: amounts differ in their signs alone.
            drawn = zip(operations.tolist(), amounts.tolist(), strict=True)
            start = 0
            for (number, amount), group in groupby(drawn):
                end = start + len(list(group))
                if number > 0:
                    chosen = index[start:end, turn]
                    images[chosen] = operate(OPERATIONS[number], images[chosen], amount)
                start = end
        return images
