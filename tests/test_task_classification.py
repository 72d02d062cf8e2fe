"""One class per image: the loss, the hits and the confusion matrix follow their definitions."""

from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loaders.targets import Labels
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
    for weights in ([1, 2], "many", 3, [1, 2, -1], [1, "x", 2], [1, nan, 2]):
        with refused(f"loss.weights={weights}"):
            classification(3, weights=weights)


def test_labels_are_smoothed() -> None:
    loss = classification(label_smoothing=0.1).loss(*batch())
    torch.testing.assert_close(loss, F.cross_entropy(*batch(), label_smoothing=0.1))


def test_top1_and_top5_count_hits_and_with_up_to_five_classes_top5_would_be_one() -> None:
    outputs = torch.arange(7.0).repeat(4, 1)  # class 6 is the first guess, class 2 the fifth
    metrics = metrics_of(classification(), outputs, torch.tensor([6, 2, 1, 5]))
    assert (metrics["top1"], metrics["top5"]) == (0.25, 0.75)
    for num_classes in (1, 5):
        outputs, targets = batch(num_classes=num_classes)
        metrics = metrics_of(classification(num_classes), outputs, targets)
        assert metrics.keys() == {"loss", "top1"}
        assert metrics["top1"] == (outputs.argmax(dim=1) == targets).double().mean().item()


def test_a_weight_multiplies_the_loss_of_its_class() -> None:
    check_weights(classification, lambda c: (torch.zeros(1, 3), torch.tensor([c])))


def test_the_confusion_matrix_is_that_of_scikit_learn_and_left_out_of_many_classes() -> None:
    from sklearn.metrics import confusion_matrix

    outputs, targets = batch(200)
    matrix = classification().sums(outputs, targets)[-49:].view(7, 7)
    expected = confusion_matrix(targets, outputs.argmax(dim=1), labels=range(7))
    assert np.array_equal(matrix.numpy(), expected)
    many = classification(1001)  # its sums would be larger than the model
    sums = many.sums(*batch(num_classes=1001))
    assert (sums.shape, many.plots(sums), many.class_metrics(sums)) == ((4,), {}, {})


def test_metrics_of_each_class_are_those_of_scikit_learn_for_any_parts_of_the_images() -> None:
    """Class 5 is true and never predicted, class 4 the reverse, class 6 neither."""
    outputs, targets = batch(300)
    outputs[:, [5, 6]] = -9.0
    targets[(targets == 4) | (targets == 6)] = 5
    task = classification()
    parts = [slice(0, 7), slice(7, 200), slice(200, 300)]
    totals = sum(task.sums(outputs[part], targets[part]) for part in parts)
    check_by_class(task.class_metrics(totals), targets, outputs.argmax(dim=1))


def test_right_predictions_are_dark_cells_of_the_chart_and_names_are_below_the_images() -> None:
    task, outputs, targets = classification(), 9 * torch.eye(7), torch.arange(7)
    [chart] = task.plots(task.sums(outputs, targets)).values()
    assert (chart[0, 0].diagonal() < 0.1).sum() > 7 * 24  # a cell has room for its number
    inputs = torch.zeros(7, 1, 9, 9)
    [right], [other] = (
        task.visualize(inputs, x, targets).values() for x in (outputs, outputs.flip(0))
    )
    below = right[:, :, right.shape[3] :]  # the images are square
    assert below.any(dim=(1, 2, 3)).all()
    assert [bool(one.equal(two)) for one, two in zip(right, other, strict=True)] == [
        number == 3 for number in range(7)
    ]


def test_a_row_of_the_table_names_the_likeliest_classes() -> None:
    outputs, _ = batch()
    task = classification()
    row = dict(zip(task.columns, task.table_rows(outputs)[3], strict=True))
    shares, order = outputs[3].softmax(0).sort(descending=True)
    likeliest = [row["prediction"], *(row[f"top{i}"] for i in range(2, 6))]
    assert likeliest == [f"class {n}" for n in order[:5].tolist()]
    assert float(row["probability2"]) == pytest.approx(float(shares[1]), abs=1e-6)
