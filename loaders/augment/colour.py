"""Random brightness, contrast and saturation, and RandAugment (Cubuk et al. 2020, "RandAugment:
Practical automated data augmentation with a reduced search space") without moving pixels."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random, on_device
from loaders.targets import Target

MOST_OPERATIONS = 4
LARGEST_MAGNITUDE = 30


def grey(images: Tensor) -> Tensor:
    """Return the luma of three channels, else the mean of all channels; (B, 1, H, W)."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(grey(images).mean(dim=(2, 3), keepdim=True), images, factor).clamp_(0, 1)


def colour(images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(grey(images), images, factor).clamp_(0, 1)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend the inner pixels with those smoothed by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13."""
    if min(images.shape[2:]) <= 2:
        return images
    inner = images[..., 1:-1, 1:-1]
    around = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    around = around[..., :-2] + around[..., 1:-1] + around[..., 2:]
    smooth = (around + 4 * inner) / 13
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = torch.lerp(smooth, inner, factor).clamp_(0, 1)
    return sharp


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    levels = 2**bits
    return torch.minimum((images * levels).floor_(), levels - 1) / levels


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    # torch.where takes many times as long on a CPU where neighbours differ.
    return torch.lerp(images, 1 - images, (images >= threshold).float())


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to [0, 1], unless all its values are equal."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    varies = high > low
    low, span = torch.where(varies, low, 0), torch.where(varies, high - low, 1)
    return ((images - low) / span).clamp_(0, 1)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Equalize the histogram of each channel with 256 levels, as Pillow does."""
    levels = (images * 255.999).long().flatten(2)
    counts = torch.zeros((*images.shape[:2], 256), dtype=torch.int32, device=images.device)
    counts.scatter_add_(2, levels, counts.new_ones(1).expand_as(levels))
    up_to = counts.cumsum(dim=2)
    last = (counts * (up_to == up_to[..., -1:])).amax(dim=2, keepdim=True)  # of the highest level
    step = (up_to[..., -1:] - last) // 255
    spread = ((up_to - counts + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    equal = spread.gather(2, levels).view(images.shape) / 255
    return torch.where(step[..., None] > 0, equal, images)


JITTER = {"brightness": brightness, "contrast": contrast, "saturation": colour}


class ColourJitter(Augmentation):
    """Changes brightness, contrast and saturation in this order, as torchvision's `adjust_*`."""

    keys = ("colour_jitter",)
    columns = tuple((name, "f4", 1.0) for name in JITTER)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        for name, strength in zip(JITTER, data.colour_jitter, strict=True):
            rows[name] = 1 + strength * (2 * random(name, 1)[:, 0] - 1)

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        factors = on_device(images.device, *(rows[name][:, None] for name in JITTER))
        for (name, change), factor in zip(JITTER.items(), factors, strict=True):
            if (rows[name] != 1).any():
                images = change(images, factor[..., None, None])
        return images


OPERATIONS = (
    None,  # the identity
    *(brightness, contrast, colour, sharpness),
    *(posterize, solarize, autocontrast, equalize),
)


def amount_of(operation: np.ndarray, magnitude: int, sign: np.ndarray) -> np.ndarray:
    """Return the factors, bits or thresholds of the operations, (N,), scaled as in the paper."""
    strength = magnitude / LARGEST_MAGNITUDE
    bits, threshold = 8 - np.rint(4 * strength), 1 - strength
    amounts = np.where(operation == OPERATIONS.index(posterize), bits, 1 + 0.9 * strength * sign)
    return np.where(operation == OPERATIONS.index(solarize), threshold, amounts)


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
        chances, signs = np.split(random("operations", 2 * MOST_OPERATIONS), 2, axis=1)
        operations = (chances * len(OPERATIONS)).astype(int)
        amounts = amount_of(operations, magnitude, np.where(signs < 0.5, -1, 1))
        rows["operations"][:, :count] = operations[:, :count]
        rows["amounts"][:, :count] = np.where(operations > 0, amounts, 0)[:, :count]

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        order = np.argsort(rows["operations"], axis=0, kind="stable")
        operations, amounts = (
            np.take_along_axis(rows[name], order, axis=0) for name in ("operations", "amounts")
        )
        index, amount = on_device(images.device, order, amounts)
        index = index.long()
        for turn, drawn in enumerate(operations.T):
            starts = np.searchsorted(drawn, range(len(OPERATIONS) + 1))
            for operation, (start, end) in zip(OPERATIONS, pairwise(starts), strict=True):
                if operation is not None and start < end:  # on all rows that drew it at once
                    chosen, factor = index[start:end, turn], amount[start:end, turn]
                    images[chosen] = operation(images[chosen], factor.view(-1, 1, 1, 1))
        return images
