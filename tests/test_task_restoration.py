"""Images from images: losses follow their definitions, PSNR and SSIM are those of torchmetrics."""

from typing import Any

import pytest
import torch
from torch import Tensor

from loaders.targets import TargetImages
from tests.helpers import refused
from tests.task_contract import build, check_contract, check_refused, metrics_of


def restoration(loss: str = "l1", **options: Any) -> Any:
    return build("restoration", loss, TargetImages(), **options)


def batch() -> tuple[Tensor, Tensor]:
    """(2, 3, 13, 17): targets in [0, 1], outputs partly outside of it."""
    steps = torch.arange(2 * 3 * 13 * 17, dtype=torch.float64).reshape(2, 3, 13, 17)
    targets = 0.5 + 0.5 * torch.sin(0.37 * steps)
    noise = torch.tensor([0.05, 0.3], dtype=torch.float64).view(2, 1, 1, 1)
    return (targets + noise * torch.cos(1.7 * steps)).float(), targets.float()


# From torchmetrics 1.9.0: structural_similarity_index_measure and peak_signal_noise_ratio with
# data_range=1.0 and reduction="none", on batch() with the outputs clamped to [0, 1].
TORCHMETRICS_SSIM = [0.9694901704788208, 0.5039369463920593]
TORCHMETRICS_PSNR = [29.514734268188477, 14.78222370147705]


@pytest.mark.parametrize(("loss", "low"), [("charbonnier", 0.0), ("l1", -1.0)])
def test_it_keeps_the_contract(loss: str, low: float) -> None:
    check_contract(restoration(loss, value_range=[low, 1.0]), *batch())
    check_refused(restoration, ("loss", "mse"), ("label_smoothing", 0.1), ("weights", "auto"))


@pytest.mark.parametrize(("loss", "epsilon"), [("l1", 0.0), ("charbonnier", 0.001)])
def test_a_loss_follows_its_definition(loss: str, epsilon: float) -> None:
    task, (outputs, targets) = restoration(loss), batch()
    expected = ((outputs - targets).double() ** 2 + epsilon**2).sqrt().mean().item()
    assert task.loss(outputs, targets).item() == pytest.approx(expected, rel=1e-6)


def test_psnr_and_ssim_are_those_of_torchmetrics_in_any_value_range_also_under_autocast() -> None:
    outputs, targets = batch()
    for image in (0, 1):
        part = slice(image, image + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            metrics = metrics_of(restoration(), outputs[part], targets[part])
        assert metrics["psnr"] == pytest.approx(TORCHMETRICS_PSNR[image], abs=1e-4)
        assert metrics["ssim"] == pytest.approx(TORCHMETRICS_SSIM[image], abs=2e-6)
        wide = 2 * outputs[part] - 1, 2 * targets[part] - 1
        other = metrics_of(restoration(value_range=[-1.0, 1.0]), *wide)
        assert other == pytest.approx(metrics | {"loss": 2 * metrics["loss"]}, rel=1e-5)
    metrics = metrics_of(restoration(), targets, targets)
    assert metrics == pytest.approx({"loss": 0.0, "psnr": 100.0, "ssim": 1.0})


def test_ssim_refuses_images_smaller_than_its_border() -> None:
    with refused("5x9"):
        restoration().sums(torch.rand(1, 1, 5, 9), torch.rand(1, 1, 5, 9))
