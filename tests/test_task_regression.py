"""Numbers from an image: the metrics are those of scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loaders.targets import RegressionTargets
from tests.task_contract import build, check_contract, check_refused, metrics_of, random


def regression(loss: str = "mse", **options: Any) -> Any:
    target = RegressionTargets(np.zeros((0, 2), np.float32), ("a", "b"))
    return build("regression", loss, target, **options)


def batch(num_images: int = 12) -> tuple[Tensor, Tensor]:
    targets = random(num_images, 2, seed=1) * torch.tensor([3.0, 0.1]) + 20
    return targets + random(num_images, 2), targets


@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_it_keeps_the_contract(loss: str) -> None:
    check_contract(regression(loss), *batch())
    check_refused(regression, ("loss", "bce"), ("label_smoothing", 0.1), ("weights", "auto"))


def test_mae_and_r2_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score

    outputs, targets = batch(300)
    metrics = metrics_of(regression(), outputs, targets)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-6)
    assert metrics["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-6)
    constant = torch.full((5, 2), 3.0)
    for guess, r2 in ((constant, 1.0), (constant + 1, 0.0)):
        assert metrics_of(regression(), guess, constant)["r2"] == r2 == r2_score(constant, guess)
