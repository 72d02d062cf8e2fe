"""Random brightness, contrast and saturation, and RandAugment (Cubuk et al. 2020, "RandAugment:
Practical automated data augmentation with a reduced search space") without moving pixels."""

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.augment.base import Augmentation, Random, to_device
from loaders.targets import Target

OPERATIONS = (
    "identity",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "adjust_sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
"""Those of RandAugment: functions of torchvision.transforms.v2."""

MOST_OPERATIONS = 4
LARGEST_MAGNITUDE = 30


class ColourJitter(Augmentation):
    """Changes brightness, contrast and saturation, in this order: as torchvision's `adjust_*`, but
    with a factor for each image, and of any number of channels."""

    keys = ("colour_jitter",)
    columns = (("brightness", "f4"), ("contrast", "f4"), ("saturation", "f4"))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        for (name, _), strength in zip(self.columns, data.colour_jitter, strict=True):
            rows[name] = 1 + strength * (2 * random(name, 1)[:, 0] - 1)

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        for name, _ in self.columns:
            if (rows[name] == 1).all():
                continue
            factor = to_device(rows[name].copy(), images.device).view(-1, 1, 1, 1)
            without = grey(images)  # the image without this quality
            if name == "contrast":
                without = without.mean(dim=(2, 3), keepdim=True)
            elif name == "brightness":
                without = torch.zeros_like(without)
            images = torch.lerp(without, images, factor).clamp_(0, 1)
        return images


def grey(images: Tensor) -> Tensor:
    """Return the luma of three channels, else the mean of all channels; (B, 1, H, W)."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


class RandAugment(Augmentation):
    """Operations drawn from `OPERATIONS`, one after the other, on inputs only.

    Those that move pixels (shear, translate, rotate) are left out, because masks and target images
    would have to move too; see `data.rotation` and `data.random_scale`.
    """

    keys = ("randaugment",)
    columns = (("operations", f"({MOST_OPERATIONS},)i1"), ("amounts", f"({MOST_OPERATIONS},)f4"))

    def check(self, cfg: Config, target: Target, world_size: int) -> None:
        if target.kind == "images":
            raise UserError(
                f"data.randaugment={list(cfg.data.randaugment)} changes the colours of inputs but "
                "not of target images; use data.colour_jitter, which changes both, or null"
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
        from torchvision.transforms.v2 import functional  # takes seconds, and few runs need it

        for turn in range(MOST_OPERATIONS):
            drawn = np.stack([rows["operations"][:, turn], rows["amounts"][:, turn]], axis=1)
            # Magnitudes are one for the run: amounts differ in their signs alone.
            for number, amount in np.unique(drawn[drawn[:, 0] > 0], axis=0).tolist():
                samples = np.flatnonzero((drawn == (number, amount)).all(axis=1))
                chosen = to_device(samples, images.device)
                before, name = images[chosen], OPERATIONS[int(number)]
                if before.shape[1] not in (1, 3):  # each channel counts as a grey image
                    before = before.flatten(0, 1)[:, None]
                amounts = {"posterize": [int(amount)], "autocontrast": [], "equalize": []}
                after = getattr(functional, name)(before, *amounts.get(name, [amount]))
                images[chosen] = after.view(-1, *images.shape[1:])
        return images
