"""U-Net: numbers at each pixel of images of any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from tests.model_contract import build, check_contract, fit


@pytest.mark.parametrize("in_channels", [1, 3, 5])
def test_it_keeps_the_contract(in_channels: int) -> None:
    check_contract("unet", 5, (in_channels, 16, 24), "width", "num_levels", "batch_norm")


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (16, 16), (33, 18)])
@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_it_takes_any_size(size: tuple[int, int], num_levels: int) -> None:
    model = build("unet", 3, 5, width=4, num_levels=num_levels).eval()
    assert model(torch.rand(2, 3, *size)).shape == (2, 5, *size)


def test_it_doubles_its_channels_at_each_level() -> None:
    model = build("unet", 3, 5, width=8, batch_norm=False)
    convolutions = [module for module in model.down.modules() if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convolutions] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("wrong", [{"width": 0}, {"num_levels": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, Any]) -> None:
    [(key, value)] = wrong.items()
    with pytest.raises(UserError, match=f"{key}={value}"):
        build("unet", 3, 5, **wrong)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_it_learns_to_find_squares_and_their_surroundings(batch_norm: bool) -> None:
    """A pixel is noise, inside a square or its frame, which 3x3 windows cannot tell from noise."""
    torch.manual_seed(0)
    model = build("unet", 1, 3, width=8, num_levels=3, batch_norm=batch_norm)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        masks = torch.zeros(size, 24, 24, dtype=torch.int64)
        for mask in masks:
            y, x = torch.randint(3, 12, (2,)).tolist()
            mask[y - 3 : y + 11, x - 3 : x + 11] = 2
            mask[y : y + 8, x : x + 8] = 1
        images = (masks == 1).float() + 0.3 * torch.randn(masks.shape)
        return images[:, None], masks

    def loss_of_a_batch() -> Tensor:
        inputs, masks = batch(16)
        return F.cross_entropy(model(inputs), masks)

    fit(model, 60, loss_of_a_batch)
    inputs, masks = batch(64)
    guesses = model.eval()(inputs).argmax(dim=1)
    for c in range(3):
        overlap = ((guesses == c) & (masks == c)).sum() / ((guesses == c) | (masks == c)).sum()
        assert overlap > 0.8
