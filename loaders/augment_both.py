"""Augmentations of finished batches in which targets have a part, or could have one."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import DataConfig
from loaders.augmentation import Augmentation, Random, on_device, parts
from loaders.targets import Labels, Masks, Target, TargetImages

ERASED_SHARES, ERASED_RATIOS = (0.02, 0.33), (0.3, 3.3)


class GaussianBlur(Augmentation):
    """A blur of inputs with a width in pixels that differs from row to row."""

    keys = ("gaussian_blur",)
    columns = (("sigma", "f4", 0.0),)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        probability, low, high = data.gaussian_blur
        chance, place = random("sigma", 2).T
        rows["sigma"] = np.where(chance < probability, low + (high - low) * place, 0)

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        where = np.flatnonzero(rows["sigma"])
        sigma = rows["sigma"][where, None].astype(float)
        reach = np.minimum(np.ceil(3 * sigma), min(inputs.shape[2:]) - 1)
        radius = int(reach.max())
        offsets = np.arange(-radius, radius + 1)
        # Cut off for each row by itself: what others of the batch want does not matter.
        weights = np.where(abs(offsets) <= reach, np.exp(-0.5 * (offsets / sigma) ** 2), 0)
        weights /= weights.sum(axis=1, keepdims=True)
        index, kernels = on_device(inputs.device, where[:, None], weights)
        for part in parts(inputs[: len(where)]):
            chosen = index[part, 0].long()
            inputs[chosen] = _blurred(inputs[chosen], kernels[part])
        return inputs, targets


def _blurred(images: Tensor, kernels: Tensor) -> Tensor:
    """Each of the (B, C, H, W) images with its own line of the (B, 2 * radius + 1) weights.

    Sums of shifted images, not a convolution, which on a GPU would run in TF32 and on a CPU rounds in
    another way for another number of images.
    """
    radius = kernels.shape[1] // 2
    blurred = F.pad(images, (radius,) * 4, mode="reflect")
    first, *others = kernels[..., None, None, None].unbind(1)
    for dim in (2, 3):
        size = blurred.shape[dim] - 2 * radius
        total = blurred.narrow(dim, 0, size) * first
        for start, weight in enumerate(others, start=1):
            total.addcmul_(blurred.narrow(dim, start, size), weight)
        blurred = total
    return blurred


class Affine(Augmentation):
    """A rotation about the centre and a change of scale. Where nothing is, inputs and target images are
    0 (`data.mean`) and masks without a class."""

    keys = ("rotation", "random_scale")
    columns = (("angle", "f4", 0.0), ("scale", "f4", 1.0))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["angle"] = data.rotation * (2 * random("angle", 1)[:, 0] - 1)
        if data.random_scale is not None:
            low, high = data.random_scale
            rows["scale"] = low + (high - low) * random("scale", 1)[:, 0]

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        # For each pixel of the output where it comes from, in units of half the height and width.
        height, width = inputs.shape[2:]
        angle = np.radians(rows["angle"].astype(float))
        cos, sin, zero = np.cos(angle) / rows["scale"], np.sin(angle) / rows["scale"], 0 * angle
        lines = [cos, sin * height / width, zero, -sin * width / height, cos, zero]
        [matrices] = on_device(inputs.device, np.stack(lines, axis=1))

        def moved(images: Tensor, mode: str) -> Tensor:
            for part in parts(images):
                size, theta = list(images[part].shape), matrices[part].view(-1, 2, 3)
                grid = F.affine_grid(theta, size, align_corners=False)
                images[part] = F.grid_sample(images[part], grid, mode, align_corners=False)
            return images

        inputs = moved(inputs, "bilinear")
        if isinstance(target, TargetImages):
            targets = moved(targets, "bilinear")
        elif isinstance(target, Masks):
            above = (targets - target.ignore_index).float()[:, None]  # 0 is what is put outside
            targets = moved(above, "nearest")[:, 0].long() + target.ignore_index
        return inputs, targets


class RandomErasing(Augmentation):
    """A rectangle of inputs becomes 0, which is `data.mean` (Zhong et al. 2020, "Random erasing data
    augmentation"): its area is a share of the image's in `ERASED_SHARES`, its height by its width in
    `ERASED_RATIOS`, both at most the image's."""

    keys = ("random_erasing",)
    columns = (
        *(("erased_share", "f4", 0.0), ("erased_ratio", "f4", 1.0)),
        *(("erased_y", "f4", 0.0), ("erased_x", "f4", 0.0)),
    )

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
        index, boxes = on_device(
            inputs.device, where[:, None], self.boxes(rows[where], *inputs.shape[2:])
        )
        chosen = index[:, 0].long()
        inputs[chosen] = inputs[chosen].masked_fill_(inside(boxes, *inputs.shape[2:]), 0)
        return inputs, targets

    def boxes(self, rows: np.ndarray, height: int, width: int) -> np.ndarray:
        """(len(rows), 4) int: top, bottom, left and right of what is erased in images of this size."""
        area, ratio = rows["erased_share"].astype(float) * height * width, rows["erased_ratio"]
        lines = np.minimum(np.rint(np.sqrt(area * ratio)), height)
        columns = np.minimum(np.rint(np.sqrt(area / ratio)), width)
        top = np.minimum(rows["erased_y"] * (height - lines + 1), height - lines).astype(int)
        left = np.minimum(rows["erased_x"] * (width - columns + 1), width - columns).astype(int)
        return np.stack([top, top + lines, left, left + columns], axis=1).astype(int)


class Mixing(Augmentation):
    """Every sample is mixed with a partner, either as a whole (MixUp, Zhang et al. 2018, "mixup: beyond
    empirical risk minimization") or by a rectangle of it (CutMix, Yun et al. 2019, "CutMix: regularization
    strategy to train strong classifiers with localizable features"). With both, half of the samples each.

    The partner of a row is the one half a global batch further, around its end. Every `world_size`-th row
    is a rank's, so this is the row half the rank's own batch further, on any number of ranks. Each row
    has a weight and a rectangle of its own, where the papers' programs draw them once for a batch.

    Labels become (B, classes) float32 probabilities; several labels, numbers and target images are
    mixed as the inputs are, and masks cut.
    """

    keys = ("mixup", "cutmix")
    columns = (
        *(("is_mixed", "?", False), ("weight", "f4", 1.0)),
        *(("cut_share", "f4", 0.0), ("cut_y", "f4", 0.0), ("cut_x", "f4", 0.0)),
    )

    def check(
        self, data: DataConfig, target: Target, global_batch_size: int, world_size: int
    ) -> None:
        if data.mixup and target.kind == "masks":
            raise ValueError(
                f"data.mixup={data.mixup} would need masks of mixed classes; use data.mixup=0, and "
                "data.cutmix=1, for example"
            )
        if data.cutmix and target.kind == "numbers":
            raise ValueError(
                f"data.cutmix={data.cutmix} pastes parts of images, which says nothing about their numbers; "
                "use data.cutmix=0, and data.mixup=0.2, for example"
            )
        if self.active_keys(data) and global_batch_size % (2 * world_size):
            near = max(1, round(global_batch_size / (2 * world_size))) * 2 * world_size
            raise ValueError(
                f"data.{self.active_keys(data)[0]} mixes the halves of each rank's batch, but of "
                f"global_batch_size={global_batch_size} each of world_size={world_size} has "
                f"{global_batch_size // world_size} samples; use {near}, for example"
            )

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        if not self.active_keys(data):
            return
        choice, u, v, y, x = random("mixing", 5).T
        is_cut = choice < (0.5 if data.mixup and data.cutmix else bool(data.cutmix))
        weight = symmetric_beta(np.where(is_cut, data.cutmix, data.mixup), u, v)
        rows["is_mixed"] = True
        rows["weight"] = np.where(is_cut, 1, weight)
        rows["cut_share"] = np.where(is_cut, weight, 0)
        rows["cut_y"], rows["cut_x"] = is_cut * y, is_cut * x

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        half, (height, width) = len(rows) // 2, inputs.shape[2:]
        cuts = self.boxes(rows, height, width)
        kept = 1 - (cuts[:, 1] - cuts[:, 0]) * (cuts[:, 3] - cuts[:, 2]) / (height * width)
        boxes, weight, weight_of_label = on_device(
            *(inputs.device, cuts, rows["weight"][:, None], (rows["weight"] * kept)[:, None])
        )

        def mixed(images: Tensor) -> Tensor:
            own = weight[..., None, None]
            if rows["cut_share"].any():
                factor = images.shape[2] // height
                own = own * ~inside(factor * boxes, *images.shape[2:])
            one, other = images.split(half)
            of_one, of_other = own.split(half)
            for part in parts(one):
                both = (
                    torch.lerp(other[part], one[part], of_one[part]),
                    torch.lerp(one[part], other[part], of_other[part]),
                )
                one[part], other[part] = both
            return images

        if isinstance(target, TargetImages):
            targets = mixed(targets)
        elif isinstance(target, Masks):
            cut = inside(boxes, height, width)[:, 0]
            targets = torch.where(cut, targets.roll(half, 0), targets)
        else:
            if isinstance(target, Labels):
                targets = probabilities(targets, len(target.classes))
            targets = torch.lerp(targets.roll(half, 0), targets, weight_of_label)
        return mixed(inputs), targets

    def boxes(self, rows: np.ndarray, height: int, width: int) -> np.ndarray:
        """(len(rows), 4) int: top, bottom, left and right of what images of this size have of partners."""
        side = np.sqrt(rows["cut_share"].astype(float))
        ends = []
        for middle, length in ((rows["cut_y"], height), (rows["cut_x"], width)):
            centre, reach = (middle * length).astype(int), (0.5 * side * length).astype(int)
            ends += [np.maximum(centre - reach, 0), np.minimum(centre + reach, length)]
        return np.stack(ends, axis=1)


def symmetric_beta(alpha: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(N,) Beta(alpha, alpha) from two (N,) uniform numbers in [0, 1) each: exact, without trying again
    (Devroye 1996, "Random variate generation in one line of code")."""
    rest, cos = (1 - u) ** (1 / alpha), np.cos(2 * np.pi * v)
    return (0.5 + 0.5 * cos * np.sqrt((1 - rest) / (rest + (1 - rest) * cos**2))).clip(0, 1)


def inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """(B, 1, height, width) bool: the pixels in (B, 4) boxes of top, bottom, left and right."""
    top, bottom, left, right = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    y = torch.arange(height, device=boxes.device).view(-1, 1)
    x = torch.arange(width, device=boxes.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def probabilities(labels: Tensor, num_classes: int) -> Tensor:
    """(B, num_classes) float32: 1 for each one's class, else 0."""
    empty = torch.zeros((len(labels), num_classes), device=labels.device)
    return empty.scatter_(1, labels[:, None], 1.0)
