"""Restoration: an image for each image, as in deblurring."""

import math
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from tasks import Task, check_shape, sum_columns
from tasks.pictures import as_pictures


class Restoration(Task):
    """Outputs and targets: (N, C, H, W) images with pixels in [low, high], of any float type.

    The loss sees the outputs as they are, PSNR and SSIM see them clamped to [low, high].
    """

    target_kind = "images"
    metric_names = ("loss", "psnr", "ssim")
    best_metric = "psnr"
    losses = ("charbonnier", "l1")
    num_sums = 4
    columns = ("image",)

    def __init__(self, cfg: Config, loader: Loader) -> None:
        self.pixel_loss = charbonnier if cfg.task.loss == "charbonnier" else torch.abs
        self.low, self.high = cfg.data.value_range
        target: Any = loader.info.target
        self.num_outputs = target.channels

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, tuple(targets.shape))
        return self.pixel_loss(outputs.float() - targets.float()).mean(dim=(1, 2, 3))

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, sum of PSNRs in dB, sum of SSIMs]."""
        losses = self.loss_per_image(outputs, targets)
        outputs = self._to_unit_range(outputs).clamp(0, 1)
        targets = self._to_unit_range(targets)
        return sum_columns(losses, psnr(outputs, targets), ssim(outputs, targets))

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {
            "input": as_pictures(inputs),
            "output": as_pictures(self._to_unit_range(outputs)),
            "target": as_pictures(self._to_unit_range(targets)),
        }

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return (N, H, W, C) float32 images with pixels in [0, 1]."""
        return self._to_unit_range(outputs).clamp(0, 1).permute(0, 2, 3, 1)

    def table_rows(self, outputs: Tensor) -> list[tuple[Any, ...]]:
        pixels = (self.predictions(outputs) * 255).round().byte().cpu().numpy()
        if pixels.shape[3] not in (1, 3):
            raise UserError(
                f"the predicted images have {pixels.shape[3]} channels, but a PNG has 1 or 3; use "
                "export.py, whose files return all channels"
            )
        if pixels.shape[3] == 1:
            pixels = pixels[..., 0]
        return [(Image.fromarray(image),) for image in pixels]

    def _to_unit_range(self, images: Tensor) -> Tensor:
        # SSIM compares mean intensities as ratios, so black has to be 0 for it.
        return (images.float() - self.low) / (self.high - self.low)


def charbonnier(difference: Tensor, eps: float = 1e-3) -> Tensor:
    """Return sqrt(d^2 + eps^2): the absolute value, but smooth at 0 (Lai et al., LapSRN, CVPR
    2017)."""
    return (difference**2 + eps**2).sqrt()


def psnr(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each image's peak signal-to-noise ratio in dB, (N,), for float32 pixels in [0, 1];
    identical images have 100 dB."""
    mse = ((outputs - targets) ** 2).mean(dim=(1, 2, 3))
    return -10 * mse.clamp(min=1e-10).log10()


def ssim(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the structural similarity of each image, (N,), for float32 pixels in [0, 1].

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity",
    equation 13, with images mirrored at their borders, as in torchmetrics. Raises UserError for
    images smaller than 6x6.
    """
    height, width = outputs.shape[-2:]
    if min(height, width) < 6:
        raise UserError(f"SSIM mirrors 5 pixels, but images have {height}x{width}; use 6x6 or more")
    c1, c2 = 0.01**2, 0.03**2
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = gaussian_means(
        torch.stack([outputs, targets, outputs**2, targets**2, outputs * targets])
    )
    variances = (mean_xx - mean_x**2).clamp(min=0) + (mean_yy - mean_y**2).clamp(min=0)
    covariance = mean_xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variances + c2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def gaussian_means(stacked: Tensor) -> Tensor:
    """Return the means under an 11x11 Gaussian window with sigma 1.5; same shape.

    Computed as a sum of shifted images: a convolution would run in TF32 on a GPU and in half
    precision under autocast, but a variance, a small difference of large means, needs float32.
    """
    window = [math.exp(-((offset / 1.5) ** 2) / 2) for offset in range(-5, 6)]
    means = F.pad(stacked.flatten(0, 1), (5, 5, 5, 5), mode="reflect")
    for dim in (2, 3):
        size = means.shape[dim] - 10
        shifted = [means.narrow(dim, start, size) for start in range(11)]
        means = torch.zeros_like(shifted[0])
        for weight, image in zip(window, shifted, strict=True):
            means.add_(image, alpha=weight / sum(window))
    return means.unflatten(0, stacked.shape[:2])
