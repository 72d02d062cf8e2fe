"""NAFNet: a correction of its input, of any size and scale."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model_contract import build, check_contract, check_learning


def test_it_keeps_the_contract() -> None:
    wrong = [("width", 0), ("scale", 0), ("num_blocks", []), ("num_blocks", [1, 0, 1])]
    check_contract("nafnet", "tail.0", "width, num_blocks, scale", *wrong)


@pytest.mark.parametrize("scale", [1, 2])
def test_it_corrects_its_enlarged_input_of_any_size_and_its_padding_leaves_no_trace(scale) -> None:
    torch.manual_seed(0)
    model = build("nafnet", 3, 3, width=4, scale=scale)
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


def test_it_learns_to_remove_noise() -> None:
    torch.manual_seed(0)
    images = 4 * F.avg_pool2d(torch.rand(4, 1, 24, 24) - 0.5, 5, stride=1)
    check_learning(build("nafnet", 1, 1, width=8), images + 0.3 * torch.randn_like(images), images)
