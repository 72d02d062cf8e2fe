"""The mean average precision adds up over batches, and is that of torchmetrics."""

import pytest
import torch
from torch import Tensor

from tasks.boxes import (
    mean_average_precision,
    num_precision_sums,
    precision_sums,
)

NUM_CLASSES = 3  # the last of which no image has


def images(count: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Detections and boxes of images: none, nearly right, of another class, and duplicates."""
    random = torch.Generator().manual_seed(0)
    found, true = [], []
    for number in range(count):
        corners = torch.rand(number % 5, 2, generator=random) * 60
        sides = 10 + 20 * torch.rand(corners.shape, generator=random)
        boxes = torch.cat([corners, corners + sides], dim=1)
        labels = torch.randint(0, 2, (len(boxes),), generator=random)
        true.append({"boxes": boxes, "labels": labels})
        others = torch.cat([boxes, boxes, boxes.flip(0)])[: 3 * (number % 7)]
        moved = others + torch.randn(others.shape, generator=random)
        scores = torch.rand(len(moved), generator=random).sort(descending=True).values
        guesses = torch.randint(0, NUM_CLASSES, (len(moved),), generator=random)
        guesses[: len(labels)] = labels[: len(guesses)]
        found.append({"boxes": moved, "labels": guesses, "scores": scores})
    return found, true


def test_it_is_that_of_torchmetrics_however_the_images_are_divided() -> None:
    from torchmetrics.detection import MeanAveragePrecision

    found, true = images(60)
    reference = MeanAveragePrecision()
    reference.update(found, true)
    expected = reference.compute()
    assert 0.1 < expected["map"] < expected["map_50"] < 0.9

    sums = precision_sums(found, true, NUM_CLASSES)
    assert sums.shape == (num_precision_sums(NUM_CLASSES),)
    metrics = mean_average_precision(sums, NUM_CLASSES)
    for name, value in metrics.items():
        assert value == pytest.approx(float(expected[name]), abs=2e-3), name

    ranks = [precision_sums(found[rank::2], true[rank::2], NUM_CLASSES) for rank in range(2)]
    assert torch.equal(ranks[0] + ranks[1], sums)


def test_without_boxes_or_detections_nothing_fails() -> None:
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    box = {"boxes": torch.tensor([[0.0, 0, 9, 9]]), "labels": torch.tensor([1])}
    sums = precision_sums([nothing | {"scores": torch.zeros(0)}], [box], NUM_CLASSES)
    assert mean_average_precision(sums, NUM_CLASSES) == {"map": 0, "map_50": 0}
    sums += precision_sums([box | {"scores": torch.tensor([0.5])}], [nothing], NUM_CLASSES)
    assert mean_average_precision(sums, NUM_CLASSES) == {"map": 0, "map_50": 0}
    sums += precision_sums([box | {"scores": torch.tensor([1.0])}], [box], NUM_CLASSES)
    assert mean_average_precision(sums, NUM_CLASSES)["map_50"] == pytest.approx(51 / 101)
