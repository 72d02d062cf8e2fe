"""MixUp and CutMix: every sample of a batch is mixed with a partner."""

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.augment.base import Augmentation, Random, to_device
from loaders.augment.spatial import inside
from loaders.targets import Target


class Mixing(Augmentation):
    """Mixes each sample with a partner: MixUp (Zhang et al. 2018, "mixup: beyond empirical risk
    minimization") blends them, CutMix (Yun et al. 2019, "CutMix: regularization strategy to train
    strong classifiers with localizable features") pastes a rectangle of the partner.

    With both, each mixes half of the samples. The partner of a row is half a global batch further,
    modulo the batch; this is half of a rank's own batch, as a rank has every `world_size`-th row.
    Each row has its own weight and rectangle; the papers' programs draw them once for a batch.

    Labels become (B, classes) float32 probabilities; several labels, numbers and target images are
    mixed like the inputs, and masks are cut like them.
    """

    keys = ("mixup", "cutmix")
    columns = tuple((name, "f4") for name in ("weight", "cut_share", "cut_y", "cut_x"))

    def check(self, cfg: Config, target: Target, world_size: int) -> None:
        data, batch_size = cfg.data, cfg.global_batch_size
        if data.mixup and target.kind == "masks":
            raise UserError(
                f"data.mixup={data.mixup} cannot mix the classes of masks; use data.mixup=0, "
                "and data.cutmix=1, for example"
            )
        if data.cutmix and target.kind == "numbers":
            raise UserError(
                f"data.cutmix={data.cutmix} pastes parts of images, which does not fit numbers as "
                "targets; use data.cutmix=0, and data.mixup=0.2, for example"
            )
        if batch_size % (2 * world_size):
            near = max(1, round(batch_size / (2 * world_size))) * 2 * world_size
            raise UserError(
                f"data.{'mixup' if data.mixup else 'cutmix'} mixes the halves of a rank's batch: "
                f"global_batch_size={batch_size} is not a multiple of {2 * world_size}, "
                f"twice world_size={world_size}; use {near}, for example"
            )

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        choice, u, v, y, x = random("mixing", 5).T
        is_cut = choice < (0.5 if data.mixup and data.cutmix else bool(data.cutmix))
        weight = symmetric_beta(np.where(is_cut, data.cutmix, data.mixup), u, v)
        rows["weight"] = np.where(is_cut, 1, weight)
        rows["cut_share"] = np.where(is_cut, weight, 0)
        rows["cut_y"], rows["cut_x"] = is_cut * y, is_cut * x

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        half, (height, width) = len(rows) // 2, inputs.shape[2:]
        cuts = self.boxes(rows, height, width)
        kept = 1 - (cuts[:, 1] - cuts[:, 0]) * (cuts[:, 3] - cuts[:, 2]) / (height * width)
        boxes = to_device(cuts, inputs.device)
        weights = np.stack([rows["weight"], rows["weight"] * kept], axis=1).astype(np.float32)
        weight, weight_of_label = to_device(weights, inputs.device).split(1, dim=1)

        def mixed(images: Tensor) -> Tensor:
            own = weight[..., None, None]
            if rows["cut_share"].any():
                factor = images.shape[2] // height
                own = own * ~inside(factor * boxes, *images.shape[2:])
            return torch.lerp(torch.cat([images[half:], images[:half]]), images, own)

        if target.kind == "images":
            targets = mixed(targets)
        elif target.kind == "masks":
            cut = inside(boxes, height, width)[:, 0]
            targets = torch.where(cut, targets.roll(half, 0), targets)
        else:
            targets = target.as_shares(targets)
            targets = torch.lerp(targets.roll(half, 0), targets, weight_of_label)
        return mixed(inputs), targets

    def boxes(self, rows: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the top, bottom, left and right of the rectangles that come from the partners,
        (len(rows), 4) int."""
        side = np.sqrt(rows["cut_share"].astype(float))
        ends = []
        for middle, length in ((rows["cut_y"], height), (rows["cut_x"], width)):
            centre, reach = (middle * length).astype(int), (0.5 * side * length).astype(int)
            ends += [np.maximum(centre - reach, 0), np.minimum(centre + reach, length)]
        return np.stack(ends, axis=1)


def symmetric_beta(alpha: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Draw from Beta(alpha, alpha), (N,), with two (N,) arrays of uniform numbers in [0, 1): exact,
    without rejection (Devroye 1996, "Random variate generation in one line of code")."""
    rest, cos = (1 - u) ** (1 / alpha), np.cos(2 * np.pi * v)
    return (0.5 + 0.5 * cos * np.sqrt((1 - rest) / (rest + (1 - rest) * cos**2))).clip(0, 1)
