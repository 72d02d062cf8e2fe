"""Numbers from an image: the metrics are those of scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loaders.targets import RegressionTargets
from tests.helpers import refused
from tests.task_contract import build, check_contract, check_refused, metrics_of, random


def regression(loss: str = "mse", labels: Tensor | None = None, **options: Any) -> Any:
    values = np.zeros((0, 2), np.float32) if labels is None else labels.numpy()
    return build("regression", loss, RegressionTargets(values, ("a", "b")), **options)


def batch(num_images: int = 12) -> tuple[Tensor, Tensor]:
    targets = random(num_images, 2, seed=1) * torch.tensor([3.0, 0.1]) + 20
    return targets + random(num_images, 2), targets


@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_it_keeps_the_contract(loss: str) -> None:
    check_contract(regression(loss, labels=batch()[1]), *batch())


def test_what_does_not_fit_is_refused() -> None:
    check_refused(regression, ("loss", "bce"), ("label_smoothing", 0.1))
    check_refused(regression, ("weights", "auto"), ("weights", 0))


def test_numbers_of_own_data_that_float32_merges_are_refused() -> None:
    seconds = torch.arange(24, dtype=torch.float64).view(-1, 2)
    regression(labels=seconds)
    seconds[:, 1] += 1.6e9
    with refused("numbers of b", "1600000023 is 1600000000"):
        regression(labels=seconds)


def test_mae_and_r2_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score

    outputs, targets = batch(300)
    metrics = metrics_of(regression(), outputs, targets)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-6)
    assert metrics["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-6)
    constant = torch.full((5, 2), 3.0)
    for guess, r2 in ((constant, 1.0), (constant + 1, 0.0)):
        assert metrics_of(regression(), guess, constant)["r2"] == r2 == r2_score(constant, guess)


def test_r2_keeps_the_digits_of_labels_with_a_small_spread() -> None:
    from sklearn.metrics import r2_score

    spread = torch.arange(32.0).view(-1, 2) / 32
    targets, outputs = (1e6 + spread).float(), (1e6 + 0.9 * spread).float()
    task = regression(labels=targets)
    totals = task.sums(outputs[:5], targets[:5]) + task.sums(outputs[5:], targets[5:])
    expected = r2_score(targets.double(), outputs.double())
    assert task.metrics(totals)["r2"] == pytest.approx(expected, rel=1e-9)
