"""Weights of classes in the loss (`loss.weights`), for data with rare classes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config
from loaders import Loader


class ClassWeights:
    """Weights of the classes on the device of the loss, copied there once."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor | None:
        """Return (classes,) float32 for PyTorch's losses; None if all classes weigh the same."""
        if self.weights and device not in self.copies:
            self.copies[device] = torch.tensor(self.weights, device=device)
        return self.copies.get(device)


def class_weights(cfg: Config, loader: Loader) -> list[float]:
    """Return one weight for each class; an empty list if all are equal.

    `auto` gives each class the same sum of weights over the training labels, with a mean of 1. A
    class without any label weighs 1.

    Raises:
        UserError: `loss.weights` is neither null, `auto` nor one number for each class.
    """
    return _weights(cfg, loader, lambda counts: counts.sum() / (counts > 0).sum() / counts)


def positive_weights(cfg: Config, loader: Loader) -> list[float]:
    """For each class, return the weight of the images that have it relative to those that do not.

    `auto` gives both groups the same sum, unless one is empty. Raises UserError as `class_weights`.
    """
    num_images = loader.info.num_samples if cfg.loss.weights == "auto" else 0
    return _weights(cfg, loader, lambda counts: (num_images - counts) / counts)


def _weights(
    cfg: Config, loader: Loader, automatic: Callable[[np.ndarray], np.ndarray]
) -> list[float]:
    weights = cfg.loss.weights
    if weights is None:
        return []
    if weights == "auto":
        if loader.info.class_counts is None:
            raise UserError(
                "loss.weights=auto needs data that counts its classes; use null or numbers"
            )
        counts = loader.info.class_counts()
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = automatic(counts)
        return np.where(np.isfinite(weights) & (weights > 0), weights, 1.0).tolist()
    is_list = not isinstance(weights, str | int | float)
    if not is_list or len(weights) != len(loader.info.classes) or min(weights) < 0:
        raise UserError(
            f"loss.weights={weights} is not for {len(loader.info.classes)} classes; use null, auto "
            "or a list of one number of 0 or more for each class"
        )
    return [float(weight) for weight in weights]


def refuse_weights(cfg: Config) -> None:
    """Raise UserError if `loss.weights` is set for a task without classes."""
    if cfg.loss.weights is not None:
        raise UserError(
            f"loss.weights={cfg.loss.weights}, but task={cfg.task.name} has no classes; use null"
        )
