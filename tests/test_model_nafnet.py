"""NAFNet: a correction of its input, of any size and scale."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from tests.model_contract import build, check_contract, check_learning, check_refused


def trained(**kwargs: Any) -> Any:
    """The net as if trained: its blocks are the identity only at the start."""
    torch.manual_seed(0)
    model = build("nafnet", 3, 3, width=4, **kwargs)
    for name, parameter in model.named_parameters():
        if name.endswith(("beta", "gamma")):
            nn.init.normal_(parameter)
    return model


def enlarged(images: Tensor, scale: int) -> Tensor:
    return images if scale == 1 else F.interpolate(images, scale_factor=scale, mode="bicubic")


def test_it_keeps_the_contract() -> None:
    check_contract("nafnet", 3, (3, 16, 24), "tail.0", ["width", "num_blocks", "scale"])


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 5, 7), (5, 16, 16), (3, 33, 18)])
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_it_takes_any_size_and_enlarges_by_its_scale(shape: tuple[int, ...], scale: int) -> None:
    channels, height, width = shape
    model = build("nafnet", channels, channels, width=4, scale=scale)
    outputs = model(torch.rand(2, *shape))
    assert outputs.shape == (2, channels, scale * height, scale * width)


@pytest.mark.parametrize("scale", [1, 2])
def test_its_padding_leaves_no_trace(scale: int) -> None:
    model = trained(scale=scale)
    images = torch.rand(1, 3, 16, 20)
    cut = images[:, :, :13, :18]
    images[:, :, 13:] = images[:, :, 12:13]
    images[:, :, :, 18:] = images[:, :, :, 17:18]
    # The enlarged input differs near the cut; the correction may not.
    correction = model(images) - enlarged(images, scale)
    expected = correction[:, :, : 13 * scale, : 18 * scale]
    assert expected.std() > 0.01
    torch.testing.assert_close(model(cut) - enlarged(cut, scale), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1, 2])
def test_it_adds_a_correction_to_its_input(scale: int) -> None:
    model, inputs = trained(scale=scale), torch.rand(1, 3, 9, 10)
    assert not torch.equal(model(inputs), enlarged(inputs, scale))
    for parameter in model.tail.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(model(inputs), enlarged(inputs, scale))


def test_it_learns_to_remove_noise() -> None:
    torch.manual_seed(0)
    images = 4 * F.avg_pool2d(torch.rand(4, 1, 24, 24) - 0.5, 5, stride=1)
    check_learning(build("nafnet", 1, 1, width=8), images + 0.3 * torch.randn_like(images), images)


def test_other_numbers_of_outputs_are_refused() -> None:
    with pytest.raises(UserError, match="(?s)nafnet.* 3 channels.* 257 outputs"):
        build("nafnet", 3, 257)


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"scale": 0}, {"num_blocks": []}, {"num_blocks": [1, 0, 1]}]
)
def test_sizes_below_one_are_refused(wrong: dict[str, Any]) -> None:
    check_refused("nafnet", 3, 3, wrong)
