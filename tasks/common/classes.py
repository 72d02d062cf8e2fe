"""What tasks with classes share: their weights in the loss (`loss.weights`), and their metrics."""

import torch
from torch import Tensor

from conf.errors import UserError
from conf.ranges import are_numbers
from conf.schema import Config
from loaders import Loader


def class_weights(cfg: Config, loader: Loader, against_rest: bool = False) -> Tensor | None:
    """Return the weights of classes, (K,) float32 on the loader's device; None: all weigh the same.

    `auto` gives each class the same sum of weights over the training labels, with a mean of 1;
    `against_rest`, the images that have a class the same sum as those that do not have it. A class
    without any label weighs 1.
    """
    weights, info = cfg.loss.weights, loader.info
    if weights is None:
        return None
    if weights == "auto":
        labels = info.class_counts()
        if labels is None:
            raise UserError(
                "loss.weights=auto needs data that counts its classes; use null or numbers"
            )
        counts = torch.as_tensor(labels, dtype=torch.float64)
        share = counts.sum() / (counts > 0).sum()
        weights = (info.num_samples - counts if against_rest else share) / counts
        weights = weights.where(weights.isfinite() & (weights > 0), 1)
    elif not are_numbers(weights, len(info.classes), low=0):
        raise UserError(
            f"loss.weights={weights} is not for {len(info.classes)} classes; use null, auto "
            "or a list of one number of 0 or more for each class"
        )
    return torch.as_tensor(weights, dtype=torch.float32, device=loader.device)


def metrics_by_class(
    classes: tuple[str, ...], right: Tensor, predicted: Tensor, true: Tensor
) -> dict[str, dict[str, float | None]]:
    """Return precision, recall, F1 and number of samples (`support`) of each class; None where one
    is not defined. Waits for the device.

    The counts, (K,), are those of samples of which a class is predicted and true (`right`), is
    predicted, and is true.
    """
    metrics: dict[str, dict[str, float | None]] = {}
    counts = torch.stack([right, predicted, true]).T.tolist()
    for name, (hits, guesses, support) in zip(classes, counts, strict=True):
        metrics[name] = {
            "precision": hits / guesses if guesses else None,
            "recall": hits / support if support else None,
            "f1": 2 * hits / (guesses + support) if guesses + support else None,
            "support": int(support),
        }
    return metrics
