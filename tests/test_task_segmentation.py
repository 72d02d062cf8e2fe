"""The class of each pixel: the metrics are those of scikit-learn and torchmetrics."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from loaders.targets import Masks
from tests.helpers import DEVICES
from tests.task_contract import Batch, build, check_contract, metrics_of, names, random


def segmentation(num_classes: int = 4, **options: Any) -> Any:
    target = Masks(names(num_classes), ignore_index=255)
    return build("segmentation", options.pop("loss", "cross_entropy"), target, **options)


def batch(num_images: int = 6, num_classes: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(num_classes, (num_images, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * random(num_images, num_classes, 9, 7), targets


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weights": [1.0, 2, 3, 4]}])
def test_it_keeps_the_contract(options: dict[str, Any], device: str) -> None:
    check_contract(segmentation(**options), *batch(), device)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UserError, match="task.loss=bce"):
        segmentation(loss="bce")


# part: loss_weights
def test_a_weight_multiplies_the_loss_of_its_class() -> None:
    def weights_of(task: Any) -> list[float]:
        pixels = [torch.tensor([[[c, 255]]]) for c in range(3)]
        return [task.loss(torch.zeros(1, 3, 1, 2), mask).item() / math.log(3) for mask in pixels]

    assert weights_of(segmentation(3, weights=[1, 0.5, 4])) == pytest.approx([1, 0.5, 4])
    automatic = weights_of(segmentation(3, weights="auto", counts=[60.0, 30.0, 10.0]))
    assert automatic == pytest.approx([100 / 3 / count for count in (60, 30, 10)])


def test_miou_and_accuracy_are_those_of_scikit_learn_and_torchmetrics() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score
    from torchmetrics.classification import MulticlassJaccardIndex

    outputs, targets = batch()
    metrics = metrics_of(segmentation(), outputs, targets)
    counted, guesses = targets != 255, outputs.argmax(dim=1)
    true, guess = targets[counted], guesses[counted]
    assert metrics["miou"] == pytest.approx(jaccard_score(true, guess, average="macro"), rel=1e-9)
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(true, guess), rel=1e-9)
    torchmetric = MulticlassJaccardIndex(4, ignore_index=255)
    assert metrics["miou"] == pytest.approx(float(torchmetric(guesses, targets)), rel=1e-6)


def test_a_class_in_neither_masks_nor_predictions_does_not_count() -> None:
    outputs, targets = batch()
    wide = torch.cat([outputs, torch.full_like(outputs[:, :2], -100)], dim=1)
    four, six = (
        metrics_of(segmentation(), outputs, targets),
        metrics_of(segmentation(6), wide, targets),
    )
    assert four["miou"] == pytest.approx(six["miou"], rel=1e-12)


def test_ignored_pixels_have_no_loss_and_no_gradient() -> None:
    outputs, targets = batch()
    outputs.requires_grad_()
    [gradient] = torch.autograd.grad(segmentation().loss(outputs, targets), outputs)
    ignored = (targets == 255)[:, None].expand_as(outputs)
    assert (gradient[ignored] == 0).all()
    assert (gradient[~ignored] != 0).any()
    assert torch.isfinite(gradient).all()


def test_masks_are_shown_in_the_colours_of_their_classes() -> None:
    task, (outputs, targets) = segmentation(), batch()
    pictures = task.visualize(torch.rand(6, 3, 9, 7), outputs, targets)
    assert task.palette.shape == (4, 3)
    assert len({tuple(colour) for colour in task.palette.tolist()}) == 4
    colours = torch.from_numpy(task.palette).float() / 255
    for index in range(4):
        for name, classes in (("mask", targets), ("prediction", outputs.argmax(dim=1))):
            shown = pictures[name].permute(0, 2, 3, 1)[classes == index]
            assert torch.equal(shown, colours[index].expand_as(shown))
    assert (pictures["mask"].permute(0, 2, 3, 1)[targets == 255] == 1).all()


def test_predictions_are_images_of_class_indices() -> None:
    outputs, _ = batch()
    images = segmentation().images(outputs)
    assert (images.dtype, images.shape) == (np.uint8, (6, 9, 7))
    assert np.array_equal(images, outputs.argmax(dim=1))
    wide = torch.zeros(1, 300, 2, 2)
    wide[:, 299] = 1
    assert segmentation(300).images(wide).tolist() == [[[299, 299], [299, 299]]]
