"""An answer for each pixel: segmentation and restoration."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loaders.targets import Target
from tests.helpers import refused
from tests.test_tasks import (
    build,
    check_contract,
    check_refused,
    check_weights,
    metrics_of,
    names,
    random,
)


def segmentation(*overrides: str, num_classes: int = 4, **options: Any) -> Any:
    target = Target("masks", names=names(num_classes), ignore_index=255)
    return build("segmentation", target, *overrides, **options)


def masks() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(4, (6, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * random(6, 4, 9, 7), targets


@pytest.mark.parametrize("option", ["task.label_smoothing=0.1", "loss.weights=[1,2,3,4]"])
def test_segmentation_keeps_the_contract(option: str) -> None:
    """Ignored pixels have no loss, those of a class have it times its weight."""
    check_contract(segmentation(option), *masks())
    pixels = torch.zeros(1, 3, 1, 2)
    check_weights(segmentation, lambda c: (pixels, torch.tensor([[[c, 255]]])))


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


def images() -> tuple[Tensor, Tensor]:
    """(2, 3, 13, 17): targets in [0, 1], outputs partly outside of it."""
    steps = torch.arange(2 * 3 * 13 * 17, dtype=torch.float64).reshape(2, 3, 13, 17)
    targets = 0.5 + 0.5 * torch.sin(0.37 * steps)
    noise = torch.tensor([0.05, 0.3], dtype=torch.float64).view(2, 1, 1, 1)
    return (targets + noise * torch.cos(1.7 * steps)).float(), targets.float()


# From torchmetrics 1.9.0: structural_similarity_index_measure and peak_signal_noise_ratio with
# data_range=1.0 and reduction="none", on images() with the outputs clamped to [0, 1].
TORCHMETRICS_SSIM = [0.9694901704788208, 0.5039369463920593]
TORCHMETRICS_PSNR = [29.514734268188477, 14.78222370147705]


@pytest.mark.parametrize(("loss", "epsilon", "low"), [("charbonnier", 0.001, 0), ("l1", 0.0, -1)])
def test_restoration_keeps_the_contract(loss: str, epsilon: float, low: int) -> None:
    task, (outputs, targets) = (
        restoration(f"task.loss={loss}", f"data.value_range=[{low},1]"),
        images(),
    )
    expected = ((outputs - targets).double() ** 2 + epsilon**2).sqrt().mean().item()
    assert task.loss(outputs, targets).item() == pytest.approx(expected, rel=1e-6)
    check_contract(task, outputs, targets)
    wrong = "task.loss=mse", "task.label_smoothing=0.1", "loss.weights=auto"
    check_refused(restoration, *wrong)
    with refused("5x9"):  # smaller than the border of SSIM
        task.sums(torch.rand(1, 1, 5, 9), torch.rand(1, 1, 5, 9))
    for channels in (2, 4, 5):
        with refused(f"{channels} channels", "export.py"):
            task.table_rows(torch.rand(1, channels, 8, 8))


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
