"""A small CNN: any size from eight pixels, with and without BatchNorm."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError
from tests.model_contract import build, check_classifier, fit


def test_it_keeps_the_contract() -> None:
    check_classifier("small_cnn", "width", "batch_norm")


@pytest.mark.parametrize("size", [(8, 8), (8, 31), (28, 28), (50, 50)])
def test_it_takes_any_size_from_eight_pixels(size: tuple[int, int]) -> None:
    assert build("small_cnn", 1, 10)(torch.rand(2, 1, *size)).shape == (2, 10)


@pytest.mark.parametrize(("batch_norm", "is_mean"), [(False, True), (True, False)])
def test_without_batch_norm_a_batchs_gradient_is_the_mean_of_its_parts(
    batch_norm: bool, is_mean: bool
) -> None:
    torch.manual_seed(0)
    model = build("small_cnn", 1, 10, width=8, batch_norm=batch_norm).double()
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == batch_norm
    inputs, targets = torch.rand(8, 1, 16, 16, dtype=torch.float64), torch.arange(8)

    def gradient(rows: slice) -> Tensor:
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])

    parts = (gradient(slice(0, 4)) + gradient(slice(4, 8))) / 2
    assert torch.allclose(gradient(slice(0, 8)), parts, rtol=1e-9, atol=1e-12) == is_mean


@pytest.mark.parametrize("batch_norm", [True, False])
def test_it_learns(batch_norm: bool) -> None:
    """Stripes of three directions at random phases under noise, from 30 steps to 95 % right."""
    torch.manual_seed(0)
    model = build("small_cnn", 1, 3, width=8, batch_norm=batch_norm)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns])

    def batch(size: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(3, (size,))
        images = torch.sin(waves[targets] + 6.3 * torch.rand(size, 1, 1))
        return (images + 0.5 * torch.randn_like(images)).unsqueeze(1), targets

    def loss_of_a_batch() -> Tensor:
        inputs, targets = batch(64)
        return F.cross_entropy(model(inputs), targets)

    fit(model, 30, loss_of_a_batch)
    inputs, targets = batch(256)
    assert (model.eval()(inputs).argmax(dim=1) == targets).float().mean() > 0.95


@pytest.mark.parametrize("width", [0, 7, -2])
def test_it_refuses_a_width_without_a_half(width: int) -> None:
    with pytest.raises(UserError, match=f"width={width} "):
        build("small_cnn", 1, 10, width=width)
