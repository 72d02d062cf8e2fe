"""The class of each pixel: the metrics are those of scikit-learn."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loaders.targets import Masks
from tests.task_contract import build, check_contract, check_weights, metrics_of, names, random


def segmentation(num_classes: int = 4, **options: Any) -> Any:
    target = Masks(names(num_classes), ignore_index=255)
    return build("segmentation", "cross_entropy", target, **options)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(4, (6, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * random(6, 4, 9, 7), targets


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weights": [1.0, 2, 3, 4]}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    check_contract(segmentation(**options), *batch())


def test_a_weight_multiplies_the_loss_of_its_class_and_ignored_pixels_have_none() -> None:
    pixels = torch.zeros(1, 3, 1, 2)
    check_weights(segmentation, lambda c: (pixels, torch.tensor([[[c, 255]]])))


def test_miou_and_accuracy_are_those_of_scikit_learn_without_classes_that_are_absent() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score

    outputs, targets = batch()
    metrics = metrics_of(segmentation(), outputs, targets)
    counted, guesses = targets != 255, outputs.argmax(dim=1)
    true, guess = targets[counted], guesses[counted]
    assert metrics["miou"] == pytest.approx(jaccard_score(true, guess, average="macro"), rel=1e-9)
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(true, guess), rel=1e-9)
    wide = torch.cat([outputs, torch.full_like(outputs[:, :2], -100)], dim=1)
    six = metrics_of(segmentation(6), wide, targets)
    assert six["miou"] == pytest.approx(metrics["miou"], rel=1e-12)
    undefined = metrics_of(segmentation(), outputs, torch.full_like(targets, 255))
    assert all(map(math.isnan, undefined.values()))
