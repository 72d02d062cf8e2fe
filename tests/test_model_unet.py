"""U-Net: numbers at each pixel of images of any size."""

import pytest
import torch

from tests.model_contract import build, check_contract, check_learning


def test_it_keeps_the_contract_for_images_of_any_size() -> None:
    wrong = [("width", 0), ("num_levels", 0)]
    check_contract("unet", "head", "width, num_levels, batch_norm", *wrong)
    for num_levels, shape in ((1, (1, 5, 7)), (4, (3, 1, 1)), (4, (3, 33, 18))):
        model = build("unet", shape[0], 5, width=4, num_levels=num_levels).eval()
        assert model(torch.rand(2, *shape)).shape == (2, 5, *shape[1:])


@pytest.mark.parametrize("batch_norm", [True, False])
def test_it_learns_to_find_squares_and_their_surroundings(batch_norm: bool) -> None:
    """A pixel is noise, inside a square or its frame, which 3x3 windows cannot tell from noise."""
    torch.manual_seed(0)
    masks = torch.zeros(16, 24, 24, dtype=torch.int64)
    for mask in masks:
        y, x = torch.randint(3, 12, (2,)).tolist()
        mask[y - 3 : y + 11, x - 3 : x + 11] = 2
        mask[y : y + 8, x : x + 8] = 1
    images = (masks == 1).float() + 0.3 * torch.randn(masks.shape)
    model = build("unet", 1, 3, width=8, num_levels=3, batch_norm=batch_norm)
    check_learning(model, images[:, None], masks)
