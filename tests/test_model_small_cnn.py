"""A small CNN: any size from eight pixels, with and without BatchNorm."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model_contract import build, check_contract, check_learning, check_refused


def test_it_keeps_the_contract() -> None:
    check_contract("small_cnn", 7, (3, 64, 96), "classifier", ["width", "batch_norm"])


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 8, 31), (3, 28, 28), (5, 50, 50)])
def test_it_takes_any_size_from_eight_pixels(shape: tuple[int, ...]) -> None:
    assert build("small_cnn", shape[0], 10)(torch.rand(2, *shape)).shape == (2, 10)


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
    check_learning(model.float(), inputs.float(), targets)


@pytest.mark.parametrize("width", [0, 7, -2])
def test_it_refuses_a_width_without_a_half(width: int) -> None:
    check_refused("small_cnn", 1, 10, {"width": width})
