"""Boxes in images: the loss of RetinaNet, and detections.

RetinaNet's loss is a mean over images, so that two ranks compute what one process computes. FCOS,
for example, divides by the number of boxes in the batch, which differs between ranks.
"""

import torch
from torch import Tensor

from loaders.own.shapes import SIZE
from models.detector import Detector
from tasks import Task, sum_columns


class Detection(Task):
    """Outputs: of `Detector`. Targets: of each image `boxes` (M, 4) in pixels, `labels` (M,)."""

    best_metric, best_mode = "loss", "min"
    metric_names = ("loss",)
    num_outputs, num_sums = 2, 2
    columns = ("boxes", "labels", "scores")

    def __init__(self, *_: object) -> None:
        self.net = Detector(3, 2)  # for its matching and decoding, which use no weights

    def loss_per_image(self, outputs: dict[str, Tensor], targets: list) -> Tensor:
        losses = []
        for number, target in enumerate(targets):
            one = {name: value[number : number + 1].float() for name, value in outputs.items()}
            losses.append(sum(self.net.compute_loss([target], one, one["anchors"]).values()))
        return torch.stack(losses)

    def detections(self, outputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        levels = {name: [value.float()] for name, value in outputs.items()}
        anchors = [[boxes] for boxes in outputs["anchors"]]
        return self.net.postprocess_detections(levels, anchors, [(SIZE, SIZE)] * len(anchors))

    def sums(self, outputs: dict[str, Tensor], targets: list) -> Tensor:
        return sum_columns(self.loss_per_image(outputs, targets))

    def table_rows(self, outputs: dict[str, Tensor]) -> list[tuple[str | float, ...]]:
        found = self.detections(outputs)
        return [tuple(str(one[name].tolist()) for name in self.columns) for one in found]
