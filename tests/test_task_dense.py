"""An answer for each pixel: U-Net and NAFNet, segmentation and restoration."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loaders.targets import Masks, TargetImages
from tests.helpers import refused
from tests.model_contract import build as build_model
from tests.model_contract import check_contract as check_model
from tests.model_contract import check_learning
from tests.task_contract import (
    build,
    check_contract,
    check_refused,
    check_weights,
    metrics_of,
    names,
    random,
)


def test_a_unet_keeps_the_contract_for_images_of_any_size() -> None:
    wrong = [("width", 0), ("num_levels", 0)]
    check_model("unet", "head", "width, num_levels, batch_norm", *wrong)
    for num_levels, shape in ((1, (1, 5, 7)), (4, (3, 1, 1)), (4, (3, 33, 18))):
        model = build_model("unet", shape[0], 5, width=4, num_levels=num_levels).eval()
        assert model(torch.rand(2, *shape)).shape == (2, 5, *shape[1:])


@pytest.mark.parametrize("batch_norm", [True, False])
def test_a_unet_learns_to_find_squares_and_their_surroundings(batch_norm: bool) -> None:
    """A pixel is noise, inside a square or its frame, which 3x3 windows cannot tell from noise."""
    torch.manual_seed(0)
    masks = torch.zeros(16, 24, 24, dtype=torch.int64)
    for mask in masks:
        y, x = torch.randint(3, 12, (2,)).tolist()
        mask[y - 3 : y + 11, x - 3 : x + 11] = 2
        mask[y : y + 8, x : x + 8] = 1
    images = (masks == 1).float() + 0.3 * torch.randn(masks.shape)
    model = build_model("unet", 1, 3, width=8, num_levels=3, batch_norm=batch_norm)
    check_learning(model, images[:, None], masks)


def test_nafnet_keeps_the_contract() -> None:
    wrong = [("width", 0), ("scale", 0), ("num_blocks", []), ("num_blocks", [1, 0, 1])]
    check_model("nafnet", "tail.0", "width, num_blocks, scale", *wrong)


@pytest.mark.parametrize("scale", [1, 2])
def test_nafnet_corrects_its_enlarged_input_and_its_padding_leaves_no_trace(
    scale,
) -> None:
    torch.manual_seed(0)
    model = build_model("nafnet", 3, 3, width=4, scale=scale)
    for name, parameter in model.named_parameters():
        if name.endswith(("beta", "gamma")):  # at the start, the blocks are the identity
            nn.init.normal_(parameter)

    def correction(images: Tensor) -> Tensor:
        return model(images) - F.interpolate(images, scale_factor=scale, mode="bicubic")

    assert model(torch.rand(2, 3, 1, 1)).shape == (2, 3, scale, scale)
    images = torch.rand(1, 3, 16, 20)
    cut = images[:, :, :13, :18]
    images[:, :, 13:] = images[:, :, 12:13]
    images[:, :, :, 18:] = images[:, :, :, 17:18]
    # The enlarged input differs near the cut; the correction may not.
    expected = correction(images)[:, :, : 13 * scale, : 18 * scale]
    assert expected.std() > 0.01
    torch.testing.assert_close(correction(cut), expected, rtol=1e-4, atol=1e-4)


def test_nafnet_learns_to_remove_noise() -> None:
    torch.manual_seed(0)
    images = 4 * F.avg_pool2d(torch.rand(4, 1, 24, 24) - 0.5, 5, stride=1)
    check_learning(
        build_model("nafnet", 1, 1, width=8), images + 0.3 * torch.randn_like(images), images
    )


def segmentation(num_classes: int = 4, **options: Any) -> Any:
    target = Masks(names(num_classes), ignore_index=255)
    return build("segmentation", "cross_entropy", target, **options)


def masks() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(4, (6, 9, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    targets[-1] = 255  # an image without a pixel that counts
    return 2 * random(6, 4, 9, 7), targets


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weights": [1.0, 2, 3, 4]}])
def test_segmentation_keeps_the_contract(options: dict[str, Any]) -> None:
    check_contract(segmentation(**options), *masks())


def test_a_weight_multiplies_the_loss_of_its_class_and_ignored_pixels_have_none() -> None:
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
    six = metrics_of(segmentation(6), wide, targets)
    assert six["miou"] == pytest.approx(metrics["miou"], rel=1e-12)
    undefined = metrics_of(segmentation(), outputs, torch.full_like(targets, 255))
    assert all(map(math.isnan, undefined.values()))


def restoration(loss: str = "l1", **options: Any) -> Any:
    return build("restoration", loss, TargetImages(), **options)


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


@pytest.mark.parametrize(("loss", "low"), [("charbonnier", 0.0), ("l1", -1.0)])
def test_restoration_keeps_the_contract(loss: str, low: float) -> None:
    check_contract(restoration(loss, value_range=[low, 1.0]), *images())
    check_refused(restoration, ("loss", "mse"), ("label_smoothing", 0.1), ("weights", "auto"))


@pytest.mark.parametrize(("loss", "epsilon"), [("l1", 0.0), ("charbonnier", 0.001)])
def test_a_loss_follows_its_definition(loss: str, epsilon: float) -> None:
    task, (outputs, targets) = restoration(loss), images()
    expected = ((outputs - targets).double() ** 2 + epsilon**2).sqrt().mean().item()
    assert task.loss(outputs, targets).item() == pytest.approx(expected, rel=1e-6)


def test_psnr_and_ssim_are_those_of_torchmetrics_in_any_value_range_also_under_autocast() -> None:
    outputs, targets = images()
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
