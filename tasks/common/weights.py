"""Weights of classes in the loss (`loss.weights`), for data with rare classes."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.ranges import are_numbers
from conf.schema import Config
from loaders import Loader


def class_weights(cfg: Config, loader: Loader, against_rest: bool = False) -> tuple[float, ...]:
    """Return one weight for each class, as `loss.weights` says; an empty tuple if all are equal.

    `auto` gives each class the same sum of weights over the training labels, with a mean of 1. A
    class without any label weighs 1.

    Args:
        cfg: the configuration.
        loader: the training loader.
        against_rest: a weight is that of the images that have the class, relative to those that do
            not; `auto` gives both groups the same sum, unless one is empty.

    Raises:
        UserError: `loss.weights` is neither null, `auto` nor one number for each class.
    """
    weights, info = cfg.loss.weights, loader.info
    if weights is None:
        return ()
    if weights == "auto":
        if info.class_counts is None:
            raise UserError(
                "loss.weights=auto needs data that counts its classes; use null or numbers"
            )
        counts = info.class_counts()
        with np.errstate(divide="ignore", invalid="ignore"):
            share = counts.sum() / (counts > 0).sum()
            weights = (info.num_samples - counts if against_rest else share) / counts
        return tuple(np.where(np.isfinite(weights) & (weights > 0), weights, 1.0).tolist())
    if not are_numbers(weights, len(info.classes)) or min(weights) < 0:
        raise UserError(
            f"loss.weights={weights} is not for {len(info.classes)} classes; use null, auto "
            "or a list of one number of 0 or more for each class"
        )
    return tuple(map(float, weights))


@cache
def on_device(weights: tuple[float, ...], device: torch.device) -> Tensor | None:
    """Return (classes,) float32 for PyTorch's losses, copied to the device once; None if all
    classes weigh the same."""
    return torch.tensor(weights, device=device) if weights else None
