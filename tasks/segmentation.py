"""Segmentation: a class for each pixel."""

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks import Task, check_shape, class_weights, count_of_each, divide_by_count, sum_columns
from tasks.pictures import as_pictures, class_colours, coloured


class Segmentation(Task):
    """Outputs: (N, num_classes, H, W) logits of any float type. Targets: (N, H, W) int64 indices.

    Metrics: `loss` (cross-entropy, the mean over an image's pixels, then over images), `miou`
    (intersection over union, the mean over the classes that occur in masks or predictions) and
    `pixel_accuracy`. Pixels of `ignore_index` count nowhere; an image of these alone has loss 0.
    """

    target_kind = "masks"
    best_metric = "miou"
    losses = ("cross_entropy",)
    metric_names = ("loss", "miou", "pixel_accuracy")
    columns = ("image",)

    def __init__(self, cfg: Config, loader: Loader) -> None:
        target: Any = loader.info.target
        self.num_outputs = len(loader.info.classes)
        self.num_sums = 2 + 3 * self.num_outputs
        self.label_smoothing, self.ignore_index = cfg.task.label_smoothing, target.ignore_index
        self.weights = class_weights(cfg, loader)
        self.colours = class_colours(self.num_outputs)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        count, *size = targets.shape
        check_shape(outputs, (count, self.num_outputs, *size))
        losses = F.cross_entropy(
            outputs.float(),
            targets,
            weight=self.weights,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        num_pixels = (targets != self.ignore_index).sum(dim=(1, 2)).clamp(min=1)
        return losses.sum(dim=(1, 2)) / num_pixels

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, and for each class the pixels that are right, predicted,
        and in the masks]."""
        sums = sum_columns(self.loss_per_image(outputs, targets))
        guesses, counted = outputs.argmax(dim=1), targets != self.ignore_index
        true = torch.where(counted, targets, 0)
        right = counted & (guesses == true)
        pixels = [(true, right), (guesses, counted), (true, counted)]
        counts = [count_of_each(indices, self.num_outputs, of) for indices, of in pixels]
        return torch.cat([sums, *counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics: NaN without a pixel that counts."""
        loss = divide_by_count(("loss",), totals)
        right, predicted, true = totals[2:].cpu().view(3, self.num_outputs)
        if not true.any():
            return dict.fromkeys(self.metric_names, math.nan)
        union = predicted + true - right
        occurs = union > 0
        miou = float((right[occurs] / union[occurs]).mean())
        return loss | {"miou": miou, "pixel_accuracy": float(right.sum() / true.sum())}

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities, (N, H, W, num_classes) float32."""
        return outputs.float().softmax(dim=1).permute(0, 2, 3, 1)

    def table_rows(self, outputs: Tensor) -> list[tuple[Any, ...]]:
        """Return pictures of class indices, in colours or, above 256 classes, of 16 bits."""
        dtype = np.uint8 if self.num_outputs <= 256 else np.uint16
        indices = outputs.argmax(dim=1).cpu().numpy().astype(dtype)
        pictures = [Image.fromarray(image) for image in indices]
        if dtype is np.uint8:
            for picture in pictures:
                picture.putpalette(self.colours.tobytes())
        return [(picture,) for picture in pictures]

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Draw the images, masks and predicted masks; pixels without a class are white."""
        return {
            "image": as_pictures(inputs),
            "mask": coloured(targets, self.colours, self.ignore_index),
            "prediction": coloured(outputs.argmax(dim=1), self.colours),
        }
