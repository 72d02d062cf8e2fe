"""Any number of classes, or numbers, from an image: the metrics are those of scikit-learn."""

import math
from typing import Any

import pytest
import torch

from loaders.targets import Target
from tests.test_tasks import build, check_by_class, labels, metrics_of, names, numbers


def multilabel(*overrides: str, num_classes: int = 4, **options: Any) -> Any:
    target = Target("several labels", names=names(num_classes))
    return build("multilabel", target, *overrides, **options)


def test_outputs_that_are_no_numbers_are_counted_too() -> None:
    outputs, targets = labels(4)
    outputs[0, 0], outputs[1, 1], outputs[2, 2] = math.nan, math.inf, -math.inf
    assert multilabel().sums(outputs, targets)[2:].sum() == 4 * 4 + targets.sum()


def test_automatic_weights_balance_present_and_absent() -> None:
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    for counts, weights in (((100, 50, 20), [1, 1, 4]), ((50, 10, 0), [1, 9, 1])):
        task = multilabel("loss.weights=auto", num_classes=3, counts=counts)
        mean = sum(weights) / 3 * math.log(2)
        assert task.loss(zeros, ones).item() == pytest.approx(mean)
        assert task.loss(zeros, 1 - ones).item() == pytest.approx(math.log(2))


def test_average_precision_f1_and_metrics_of_each_class_are_those_of_scikit_learn() -> None:
    """Class 2 is true and never predicted, class 3 neither: it does not count in the mean."""
    from sklearn.metrics import average_precision_score, f1_score

    outputs, targets = labels(500)
    outputs[0] = 0.0  # a probability of exactly one half counts as positive
    outputs[1, 0] = -1e-6
    outputs[2:4] *= 100  # beyond the bins
    targets[2:4] = 1
    metrics = metrics_of(multilabel(), outputs, targets)
    expected = average_precision_score(targets, outputs, average="macro")
    assert metrics["map"] == pytest.approx(expected, abs=0.005)
    expected = f1_score(targets, outputs >= 0, average="micro")
    assert metrics["f1"] == pytest.approx(expected, abs=1e-12)

    outputs[:, 2:] = -9.0
    targets[:, 3] = 0
    task = multilabel()
    check_by_class(task.class_metrics(task.sums(outputs, targets)), targets, outputs >= 0)
    three = metrics_of(multilabel(num_classes=3), outputs[:, :3], targets[:, :3])
    assert metrics_of(task, outputs, targets)["map"] == pytest.approx(three["map"])
    none = metrics_of(task, outputs, torch.zeros_like(targets))
    assert (none["map"], none["f1"]) == (0, 0)


def test_mae_and_r2_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score

    outputs, targets = numbers(300)
    task = build("regression", Target("numbers", names=("a", "b")))
    metrics = metrics_of(task, outputs, targets)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(targets, outputs), rel=1e-6)
    assert metrics["r2"] == pytest.approx(r2_score(targets, outputs), rel=1e-6)
    for constant in (torch.full((5, 2), 3.0), torch.zeros(5, 2)):
        for guess, r2 in ((constant, 1.0), (constant + 1, 0.0)):
            found = metrics_of(task, guess, constant)["r2"]
            assert found == r2 == r2_score(constant, guess)
