"""Random crops and flips, and rotation, scale and erasing of finished batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random, to_device
from loaders.targets import Target

ERASED_SHARES, ERASED_RATIOS = (0.02, 0.33), (0.3, 3.3)


class RandomCrop(Augmentation):
    """A rectangle anywhere in the image, all places equally likely.

    It has the crop's size or, with `data.random_resized_crop`, a random area and aspect ratio
    (Szegedy et al. 2015, "Going deeper with convolutions", section 6): the first of ten tries that
    fits, else the largest square.
    """

    keys = ("random_crop", "random_resized_crop")
    moves = True

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        if data.random_resized_crop is not None:
            shapes = random_shapes(sizes, data.random_resized_crop, random("height, width", 20))
            rows["height"], rows["width"] = shapes.T
        for start, length, whole in [("y", "height", sizes[:, 0]), ("x", "width", sizes[:, 1])]:
            rows[start] = random(start, 1)[:, 0] * (whole - rows[length] + 1)


def random_shapes(sizes: np.ndarray, share: Sequence[float], numbers: np.ndarray) -> np.ndarray:
    """Return (N, 2) heights and widths of shares of images of these sizes, by uniform (N, 20)."""
    low, high = share
    shares, ratios = np.split(numbers, 2, axis=1)
    area = sizes.prod(axis=1)[:, None] * (low + (high - low) * shares)
    ratio = np.exp(np.log(4 / 3) * (2 * ratios - 1))
    shapes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(int)
    fits = ((shapes > 0) & (shapes <= sizes[:, None])).all(axis=2)
    first = shapes[np.arange(len(sizes)), fits.argmax(axis=1)]
    return np.where(fits.any(axis=1)[:, None], first, sizes.min(axis=1)[:, None])


class Flips(Augmentation):
    """Left-right and upside-down flips."""

    keys = ("hflip", "vflip")  # columns of every row
    moves = True

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["hflip"] = random("hflip", 1)[:, 0] < data.hflip
        rows["vflip"] = random("vflip", 1)[:, 0] < data.vflip


class Affine(Augmentation):
    """A rotation about the centre and a change of scale. Pixels from outside the image become 0
    (`data.mean`) in inputs and target images, and `ignore_index` in masks."""

    keys = ("rotation", "random_scale")
    moves = True
    columns = (("angle", "f4"), ("scale", "f4"))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["angle"] = data.rotation * (2 * random("angle", 1)[:, 0] - 1)
        low, high = data.random_scale or (1, 1)
        rows["scale"] = low + (high - low) * random("scale", 1)[:, 0]

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        # From pixels of the output to those of the input, in units of half the height and width.
        height, width = inputs.shape[2:]
        angle = np.radians(rows["angle"].astype(float))
        cos, sin, zero = np.cos(angle) / rows["scale"], np.sin(angle) / rows["scale"], 0 * angle
        lines = [cos, sin * height / width, zero, -sin * width / height, cos, zero]
        matrices = to_device(np.stack(lines, axis=1).astype(np.float32), inputs.device)

        def moved(images: Tensor, mode: str) -> Tensor:
            grid = F.affine_grid(matrices.view(-1, 2, 3), list(images.shape), align_corners=False)
            return images.copy_(F.grid_sample(images, grid, mode, align_corners=False))

        inputs = moved(inputs, "bilinear")
        if target.kind == "images":
            targets = moved(targets, "bilinear")
        elif target.kind == "masks":
            above = (targets - target.ignore_index).float()[:, None]  # grid_sample puts 0 outside
            targets = moved(above, "nearest")[:, 0].long() + target.ignore_index
        return inputs, targets


class RandomErasing(Augmentation):
    """Sets a rectangle of inputs to 0, which is `data.mean` (Zhong et al. 2020, "Random erasing
    data augmentation"). Its share of the area is in `ERASED_SHARES` and its height / width in
    `ERASED_RATIOS`, but both sides are at most those of the image."""

    keys = ("random_erasing",)
    columns = tuple((f"erased_{name}", "f4") for name in ("share", "ratio", "y", "x"))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        chance, share, ratio, y, x = random("erased", 5).T
        chosen = chance < data.random_erasing
        low, high = ERASED_SHARES
        rows["erased_share"] = np.where(chosen, low + (high - low) * share, 0)
        low, high = np.log(ERASED_RATIOS)
        rows["erased_ratio"] = np.where(chosen, np.exp(low + (high - low) * ratio), 1)
        rows["erased_y"], rows["erased_x"] = chosen * y, chosen * x

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        where = np.flatnonzero(rows["erased_share"])
        boxes = to_device(self.boxes(rows[where], *inputs.shape[2:]), inputs.device)
        chosen = to_device(where, inputs.device)
        inputs[chosen] = inputs[chosen].masked_fill_(inside(boxes, *inputs.shape[2:]), 0)
        return inputs, targets

    def boxes(self, rows: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the top, bottom, left and right of what is erased in images of this size,
        (len(rows), 4) int."""
        area, ratio = rows["erased_share"].astype(float) * height * width, rows["erased_ratio"]
        lines = np.minimum(np.rint(np.sqrt(area * ratio)), height)
        columns = np.minimum(np.rint(np.sqrt(area / ratio)), width)
        top = np.minimum(rows["erased_y"] * (height - lines + 1), height - lines).astype(int)
        left = np.minimum(rows["erased_x"] * (width - columns + 1), width - columns).astype(int)
        return np.stack([top, top + lines, left, left + columns], axis=1).astype(int)


def inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return a mask of the pixels in (B, 4) boxes of top, bottom, left and right; (B, 1, height,
    width) bool."""
    top, bottom, left, right = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    y = torch.arange(height, device=boxes.device).view(-1, 1)
    x = torch.arange(width, device=boxes.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)
