"""An answer for each pixel: metrics of segmentation, and losses and metrics of restoration."""

import math
from typing import Any

import pytest
import torch

from loaders.targets import Target
from tests.helpers import refused
from tests.test_tasks import build, images, masks, metrics_of, names


def segmentation(num_classes: int = 4) -> Any:
    return build("segmentation", Target("masks", names=names(num_classes), ignore_index=255))


def test_miou_and_accuracy_are_those_of_scikit_learn_without_classes_that_are_absent() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score

    outputs, targets = masks()
    metrics = metrics_of(segmentation(), outputs, targets)
    counted, guesses = targets != 255, outputs.argmax(dim=1)
    true, guess = targets[counted], guesses[counted]
    assert metrics["miou"] == pytest.approx(jaccard_score(true, guess, average="macro"), rel=1e-9)
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(true, guess), rel=1e-9)
    wide = torch.cat([outputs, torch.full_like(outputs[:, :2], -100)], dim=1)
    six = metrics_of(segmentation(num_classes=6), wide, targets)
    assert six["miou"] == pytest.approx(metrics["miou"], rel=1e-12)
    undefined = metrics_of(segmentation(), outputs, torch.full_like(targets, 255))
    assert all(map(math.isnan, undefined.values()))


def restoration(*overrides: str) -> Any:
    return build("restoration", Target("images"), "data.mean=null", "data.std=null", *overrides)


@pytest.mark.parametrize(("loss", "epsilon"), [("charbonnier", 0.001), ("l1", 0.0)])
def test_losses_of_restoration_are_those_of_the_papers(loss: str, epsilon: float) -> None:
    """What cannot be compared or written is refused: images smaller than the border of SSIM, and
    channels that no PNG has."""
    task, (outputs, targets) = restoration(f"task.loss={loss}"), images()
    expected = ((outputs - targets).double() ** 2 + epsilon**2).sqrt().mean().item()
    assert task.loss(outputs, targets).item() == pytest.approx(expected, rel=1e-6)
    with refused("5x9"):
        task.sums(torch.rand(1, 1, 5, 9), torch.rand(1, 1, 5, 9))
    for channels in (2, 4, 5):
        with refused(f"{channels} channels", "export.py"):
            task.table_rows(torch.rand(1, channels, 8, 8))


# From torchmetrics 1.9.0: structural_similarity_index_measure and peak_signal_noise_ratio with
# data_range=1.0 and reduction="none", on images() with the outputs clamped to [0, 1].
TORCHMETRICS_SSIM = [0.9694901704788208, 0.5039369463920593]
TORCHMETRICS_PSNR = [29.514734268188477, 14.78222370147705]


def test_psnr_and_ssim_are_those_of_torchmetrics_in_any_value_range_also_under_autocast() -> None:
    outputs, targets = images()
    task, wide_task = (
        restoration("task.loss=l1", f"data.value_range=[{low},1]") for low in (0, -1)
    )
    for image in (0, 1):
        part = slice(image, image + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            metrics = metrics_of(task, outputs[part], targets[part])
        assert metrics["psnr"] == pytest.approx(TORCHMETRICS_PSNR[image], abs=1e-4)
        assert metrics["ssim"] == pytest.approx(TORCHMETRICS_SSIM[image], abs=2e-6)
        other = metrics_of(wide_task, 2 * outputs[part] - 1, 2 * targets[part] - 1)
        assert other == pytest.approx(metrics | {"loss": 2 * metrics["loss"]}, rel=1e-5)
    metrics = metrics_of(task, targets, targets)
    assert metrics == pytest.approx({"loss": 0.0, "psnr": 100.0, "ssim": 1.0})
