"""Points: a loss in pixels of the crop, and an error in pixels of the photo.

From where the points of `frame` are, `in_source()` knows how to undo crops, flips and rotations.
"""

from torch import Tensor
from torch.linalg import inv
from torch.nn import functional as F

from loaders.own.dots import CROP
from tasks import Task, sum_columns


class Keypoints(Task):
    """Outputs: `points` (N, 3, 2) in pixels of the crop, `frame` (N, 3, 2). Targets: (N, 3, 2)."""

    best_metric, best_mode = "error_px", "min"
    metric_names = ("loss", "error_px")
    num_outputs, num_sums = 3, 3
    columns = ("red_x", "red_y", "green_x", "green_y", "blue_x", "blue_y")

    def loss_per_image(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        losses = F.smooth_l1_loss(outputs["points"], targets, reduction="none").mean(dim=2)
        is_inside = ((targets >= 0) & (targets < CROP)).all(dim=2)
        return (losses * is_inside).mean(dim=1)

    def sums(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        found, true = (in_source(p, outputs["frame"]) for p in (outputs["points"], targets))
        errors = (found - true).norm(dim=2).mean(dim=1)
        return sum_columns(self.loss_per_image(outputs, targets), errors)

    def table_rows(self, outputs: dict[str, Tensor]) -> list[tuple[str | float, ...]]:
        points = in_source(outputs["points"], outputs["frame"])
        return [tuple(row) for row in points.flatten(1).tolist()]


def in_source(points: Tensor, frame: Tensor) -> Tensor:
    """Points in pixels of the source; in float64, which autocast leaves alone."""
    points, frame = points.double(), frame.double()
    return (points - frame[:, :1]) @ inv(frame[:, 1:] - frame[:, :1])
