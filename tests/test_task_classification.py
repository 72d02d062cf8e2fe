"""One class per image: the loss, the hits and the confusion matrix follow their definitions."""

from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loaders.targets import Labels, TargetImages
from tests.helpers import refused
from tests.task_contract import (
    build,
    check_by_class,
    check_contract,
    check_weights,
    metrics_of,
    names,
    random,
)


def classification(num_classes: int = 7, **options: Any) -> Any:
    target = Labels(np.zeros(0, np.int64), names(num_classes))
    return build("classification", options.pop("loss", "cross_entropy"), target, **options)


def batch(num_images: int = 12, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(num_classes, (num_images,), generator=generator)
    return 3 * random(num_images, num_classes), targets


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weights": [1, 2, 3, 4, 5, 6, 0]}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    check_contract(classification(**options), *batch())


def test_what_does_not_fit_is_refused() -> None:
    with refused("task.loss=l1"):
        classification(loss="l1")
    with refused("task=classification is for labels", "are images"):
        build("classification", "cross_entropy", TargetImages())
    for weights in ([1, 2], [1, 2, -1], [1, nan, 2]):
        with refused(f"loss.weights={weights}"):
            classification(3, weights=weights)


def test_top1_and_top5_count_hits() -> None:
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    metrics = metrics_of(classification(), outputs, torch.tensor([6, 2, 1, 5]))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)
    assert metrics_of(classification(5), *batch(num_classes=5)).keys() == {"loss", "top1"}


def test_a_weight_multiplies_the_loss_of_its_class() -> None:
    check_weights(classification, lambda c: (torch.zeros(1, 3), torch.tensor([c])))


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    """And so are the metrics of each class. Class 5 is true and never predicted, class 4 the
    reverse, class 6 neither."""
    from sklearn.metrics import confusion_matrix

    outputs, targets = batch(300)
    outputs[:, [5, 6]] = -9.0
    targets[(targets == 4) | (targets == 6)] = 5
    task, guesses = classification(), outputs.argmax(dim=1)
    sums = task.sums(outputs, targets)
    expected = confusion_matrix(targets, guesses, labels=range(7))
    assert np.array_equal(sums[-49:].view(7, 7).numpy(), expected)
    check_by_class(task.class_metrics(sums), targets, guesses)


def test_a_row_of_the_table_names_the_likeliest_classes() -> None:
    outputs, _ = batch()
    task = classification()
    row = dict(zip(task.columns, task.table_rows(outputs)[3], strict=True))
    shares, order = outputs[3].softmax(0).sort(descending=True)
    likeliest = [row["prediction"], *(row[f"top{i}"] for i in range(2, 6))]
    assert likeliest == [f"class {n}" for n in order[:5].tolist()]
    assert row["probability2"] == pytest.approx(float(shares[1]), abs=1e-6)
