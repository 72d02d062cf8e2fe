"""The models: every name builds what the data needs, and every error says what to do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import ModelConfig
from models import MODELS, build_model
from models.nafnet import ChannelAttention, LayerNorm2d, Level, NAFBlock, NAFNet, SimpleGate
from models.small_cnn import SmallCNN
from models.unet import UNet

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are small: a second thread costs more than it brings."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def config(name: str, channels_last: bool = False, **kwargs: Any) -> ModelConfig:
    return ModelConfig(name=name, channels_last=channels_last, kwargs=kwargs)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def with_random_scales(net: NAFNet) -> NAFNet:
    """The net as if trained: its blocks are the identity only at the start."""
    for block in net.modules():
        if isinstance(block, NAFBlock):
            nn.init.normal_(block.beta)
            nn.init.normal_(block.gamma)
    return net


# build_model


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "resnet50", "alexnet"])
@pytest.mark.parametrize("in_channels", [1, 3, 5])
def test_a_classifier_takes_any_number_of_channels_and_classes(name: str, in_channels: int) -> None:
    with torch.device("meta"):  # shapes without the arithmetic
        model = build_model(config(name), in_channels, num_outputs=7)
        assert model(torch.empty(2, in_channels, 64, 96)).shape == (2, 7)


@pytest.mark.parametrize("in_channels", [1, 3, 5])
def test_a_restoration_net_returns_the_shape_of_its_input(in_channels: int) -> None:
    model = build_model(config("nafnet"), in_channels, num_outputs=in_channels)
    assert model(torch.rand(2, in_channels, 16, 24)).shape == (2, in_channels, 16, 24)


def test_every_model_is_built_by_name() -> None:
    assert set(MODELS) >= {"small_cnn", "resnet18", "resnet50", "alexnet", "nafnet", "unet"}


def test_kwargs_reach_the_model() -> None:
    narrow = build_model(config("small_cnn", width=8, batch_norm=False), 1, 10)
    assert isinstance(narrow, SmallCNN)
    assert narrow.classifier.in_features == 16
    assert not any(isinstance(module, nn.BatchNorm2d) for module in narrow.modules())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model.name=resnet19 is unknown.*resnet18.*nafnet"):
        build_model(config("resnet19"), 3, 10)


def test_a_restoration_net_refuses_other_numbers_of_outputs() -> None:
    message = (
        "model=nafnet returns images of 3 channels .* but the task needs 257 outputs; use model="
    )
    with pytest.raises(ValueError, match=message):
        build_model(config("nafnet"), 3, 257)


@pytest.mark.parametrize(
    ("name", "num_outputs", "accepted"),
    [
        ("small_cnn", 10, "width, batch_norm"),
        ("resnet18", 10, "zero_init_residual"),
        ("resnet50", 10, "zero_init_residual"),
        ("alexnet", 10, "dropout"),
        ("nafnet", 3, "width, num_blocks, scale"),
        ("unet", 3, "width, num_levels, batch_norm"),
    ],
)
def test_an_unknown_kwarg_is_named_with_the_accepted_ones(
    name: str, num_outputs: int, accepted: str
) -> None:
    message = f"widht, which model={name} does not take; use only: {accepted}$"
    with pytest.raises(ValueError, match=message):
        build_model(config(name, widht=8), 3, num_outputs)


@pytest.mark.parametrize("kwarg", ["in_channels", "num_outputs"])
def test_sizes_that_the_data_decides_are_not_kwargs(kwarg: str) -> None:
    kwargs: dict[str, Any] = {kwarg: 3}
    with pytest.raises(ValueError, match=f"model.kwargs has {kwarg}"):
        build_model(config("small_cnn", **kwargs), 3, 10)


@pytest.mark.parametrize(("name", "num_outputs"), [("small_cnn", 10), ("nafnet", 3), ("unet", 5)])
def test_channels_last_changes_the_memory_format_and_not_the_result(
    name: str, num_outputs: int
) -> None:
    torch.manual_seed(0)
    model = build_model(config(name), 3, num_outputs)
    torch.manual_seed(0)
    channels_last = build_model(config(name, channels_last=True), 3, num_outputs)

    def is_channels_last(net: nn.Module) -> bool:
        weights = [parameter for parameter in net.parameters() if parameter.ndim == 4]
        return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)

    assert is_channels_last(channels_last)
    assert not is_channels_last(model)
    inputs = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(channels_last(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_a_model_is_compiled_if_asked_for(monkeypatch) -> None:
    compiled: list[Any] = []

    def note(call: Any, **options: Any) -> Any:
        compiled.append(call)
        return call

    monkeypatch.setattr(torch, "compile", note)
    for asked in (False, True):
        cfg = config("small_cnn")
        cfg.compile = asked
        model = build_model(cfg, 3, 10)
        assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)
        assert len(compiled) == asked
        assert not any(key.startswith("_orig_mod") for key in model.state_dict())


def test_importing_the_models_does_not_import_torchvision() -> None:
    code = "import sys, models; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "models.resnet" in modules
    assert "torchvision" not in modules


def test_models_import_no_other_part_of_the_repository() -> None:
    imported: set[str] = set()
    for path in (REPOSITORY / "models").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert "torch" in imported
    # conf: the type of build_model's argument, imported for type checkers only.
    assert imported & {"runtime", "loaders", "conf", "benchmarks", "train"} == {"conf"}


# SmallCNN


@pytest.mark.parametrize("size", [(8, 8), (8, 31), (28, 28), (50, 50)])
def test_small_cnn_takes_any_size_from_eight_pixels(size: tuple[int, int]) -> None:
    model = SmallCNN(in_channels=1, num_outputs=10)
    assert model(torch.rand(2, 1, *size)).shape == (2, 10)


def test_small_cnn_has_batch_norm_unless_switched_off() -> None:
    norms = [m for m in SmallCNN(1, 10).modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 4


@pytest.mark.parametrize(("batch_norm", "is_mean"), [(False, True), (True, False)])
def test_without_batch_norm_a_batchs_gradient_is_the_mean_of_its_parts(
    batch_norm: bool, is_mean: bool
) -> None:
    torch.manual_seed(0)
    model = SmallCNN(1, 10, width=8, batch_norm=batch_norm).double()
    inputs = torch.rand(8, 1, 16, 16, dtype=torch.float64)
    targets = torch.arange(8)

    def gradient(rows: slice) -> Tensor:
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])

    whole = gradient(slice(0, 8))
    parts = (gradient(slice(0, 4)) + gradient(slice(4, 8))) / 2
    assert torch.allclose(whole, parts, rtol=1e-9, atol=1e-12) == is_mean


@pytest.mark.parametrize("batch_norm", [True, False])
def test_small_cnn_learns(batch_norm: bool) -> None:
    """Stripes of three directions at random phases under noise, from 30 steps to 95 % right."""
    torch.manual_seed(0)
    model = SmallCNN(1, 3, width=8, batch_norm=batch_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([rows, columns, rows + columns])

    def batch(size: int) -> tuple[Tensor, Tensor]:
        targets = torch.randint(3, (size,))
        images = torch.sin(waves[targets] + 6.3 * torch.rand(size, 1, 1))
        return (images + 0.5 * torch.randn_like(images)).unsqueeze(1), targets

    for _ in range(30):
        inputs, targets = batch(64)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    model.eval()
    inputs, targets = batch(256)
    assert (model(inputs).argmax(dim=1) == targets).float().mean() > 0.95


@pytest.mark.parametrize("width", [0, 7, -2])
def test_small_cnn_refuses_a_width_without_a_half(width: int) -> None:
    with pytest.raises(ValueError, match=f"width={width} is not a positive even number; use 32"):
        SmallCNN(1, 10, width=width)


# torchvision's classifiers


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("alexnet", 61_100_840)],
)
def test_classifiers_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(build_model(config(name), 3, 1000)) == expected


def test_resnets_new_first_convolution_is_initialised_as_the_one_it_replaces() -> None:
    torch.manual_seed(0)
    for in_channels in (3, 5):
        conv = build_model(config("resnet18"), in_channels, 10).conv1
        assert isinstance(conv, nn.Conv2d)
        assert conv.weight.shape == (64, in_channels, 7, 7)
        assert conv.bias is None
        # He et al. 2015, fan-out mode: variance 2 / (64 * 7 * 7)
        assert conv.weight.std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)


def test_resnets_weights_are_fresh_and_follow_the_seed() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(build_model(config("resnet18"), 1, 10).state_dict()["fc.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_resnet_for_three_channels_is_torchvisions() -> None:
    import torchvision.models

    torch.manual_seed(0)
    state = build_model(config("resnet18"), 3, 10).state_dict()
    torch.manual_seed(0)
    original = torchvision.models.resnet18(num_classes=10).state_dict()
    assert state.keys() == original.keys()
    assert all(torch.equal(state[key], original[key]) for key in state)


@pytest.mark.parametrize("zero", [True, False])
def test_zero_init_residual_starts_residual_branches_at_zero(zero: bool) -> None:
    state = build_model(config("resnet18", zero_init_residual=zero), 3, 10).state_dict()
    assert (state["layer1.0.bn2.weight"] == 0).all() == zero


def test_alexnet_takes_images_from_63_pixels() -> None:
    with torch.device("meta"):
        model = build_model(config("alexnet"), 1, 10)
        assert model(torch.empty(2, 1, 63, 63)).shape == (2, 10)
        with pytest.raises(RuntimeError, match="too small"):
            model(torch.empty(2, 1, 62, 63))


def test_alexnets_dropout_is_a_kwarg() -> None:
    with torch.device("meta"):
        model = build_model(config("alexnet", dropout=0.25), 1, 10)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.25}


# NAFNet


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (16, 16), (33, 18)])
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_nafnet_takes_any_size_and_enlarges_by_its_scale(size: tuple[int, int], scale: int) -> None:
    model = NAFNet(3, 3, width=4, scale=scale)
    height, width = size
    assert model(torch.rand(2, 3, height, width)).shape == (2, 3, scale * height, scale * width)


@pytest.mark.parametrize("scale", [1, 2])
def test_nafnets_padding_leaves_no_trace(scale: int) -> None:
    torch.manual_seed(0)
    model = with_random_scales(NAFNet(3, 3, width=4, scale=scale))
    images = torch.rand(1, 3, 16, 20)
    cut = images[:, :, :13, :18]
    images[:, :, 13:] = images[:, :, 12:13]
    images[:, :, :, 18:] = images[:, :, :, 17:18]
    # The enlarged input differs near the cut; the correction may not.
    correction = model(images) - enlarged(images, scale)
    expected = correction[:, :, : 13 * scale, : 18 * scale]
    assert expected.std() > 0.01
    torch.testing.assert_close(model(cut) - enlarged(cut, scale), expected, rtol=1e-4, atol=1e-4)


def enlarged(images: Tensor, scale: int) -> Tensor:
    return images if scale == 1 else F.interpolate(images, scale_factor=scale, mode="bicubic")


@pytest.mark.parametrize("scale", [1, 2])
def test_nafnet_adds_a_correction_to_its_input(scale: int) -> None:
    model = with_random_scales(NAFNet(3, 3, width=4, scale=scale))
    inputs = torch.rand(1, 3, 9, 10)
    assert not torch.equal(model(inputs), enlarged(inputs, scale))
    for parameter in model.tail.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(model(inputs), enlarged(inputs, scale))


def test_a_block_starts_as_the_identity() -> None:
    inputs = torch.rand(2, 8, 6, 6)
    block = NAFBlock(8)
    assert torch.equal(block(inputs), inputs)
    nn.init.ones_(block.beta)
    assert not torch.equal(block(inputs), inputs)


def test_a_level_adds_the_lower_one_to_what_it_has() -> None:
    level = Level(4, (1, 1))
    inputs = torch.rand(2, 4, 6, 6)
    assert level.lower is not None
    torch.testing.assert_close(level(inputs), inputs + level.lower(inputs))
    assert level.lower(inputs).abs().sum() > 0


def test_num_blocks_counts_the_blocks_of_each_level() -> None:
    model = NAFNet(3, 3, width=2, num_blocks=[1, 2, 3])
    channels = [block.beta.shape[0] for block in model.modules() if isinstance(block, NAFBlock)]
    # on the way down and up, but once at the lowest level; twice the channels at each level
    assert sorted(channels) == [2, 2, 4, 4, 4, 4, 8, 8, 8]


def test_every_parameter_of_nafnet_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = with_random_scales(NAFNet(3, 3, width=4))
    model(torch.rand(2, 3, 16, 16)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_layer_norm_normalises_the_channels_of_each_position() -> None:
    torch.manual_seed(0)
    inputs = 3 + 2 * torch.randn(2, 16, 5, 6)
    outputs = LayerNorm2d(16)(inputs)
    expected = (inputs - inputs.mean(1, True)) / (inputs.var(1, correction=0, keepdim=True)).sqrt()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


def test_simple_gate_multiplies_halves_of_the_channels() -> None:
    inputs = torch.tensor([2.0, 3.0, 5.0, 7.0]).view(1, 4, 1, 1)
    assert SimpleGate()(inputs).flatten().tolist() == [10.0, 21.0]


def test_channel_attention_scales_channels_by_a_linear_function_of_their_means() -> None:
    torch.manual_seed(0)
    attention = ChannelAttention(3, 3, 1)
    inputs = torch.rand(2, 3, 4, 5)
    weights = F.linear(inputs.mean(dim=(2, 3)), attention.weight[:, :, 0, 0], attention.bias)
    torch.testing.assert_close(attention(inputs), inputs * weights[:, :, None, None])


def test_nafnet_learns_to_remove_noise() -> None:
    torch.manual_seed(0)
    model = NAFNet(1, 1, width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(40):
        targets = 4 * F.avg_pool2d(torch.rand(4, 1, 24, 24) - 0.5, 5, stride=1)
        inputs = targets + 0.2 * torch.randn_like(targets)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert loss < 0.6 * F.mse_loss(inputs, targets)


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"scale": 0}, {"num_blocks": []}, {"num_blocks": [1, 0, 1]}]
)
def test_nafnet_refuses_sizes_below_one(wrong: dict[str, Any]) -> None:
    [(key, value)] = wrong.items()
    with pytest.raises(ValueError, match="use 1 or more") as error:
        NAFNet(3, 3, **wrong)
    assert f"{key}={value}" in str(error.value)


# U-Net


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (16, 16), (33, 18)])
@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_unet_takes_any_size(size: tuple[int, int], num_levels: int) -> None:
    model = UNet(3, 5, width=4, num_levels=num_levels).eval()
    assert model(torch.rand(2, 3, *size)).shape == (2, 5, *size)


def test_unet_doubles_its_channels_at_each_level() -> None:
    widths = [
        m.out_channels for m in UNet(3, 5, width=8).down.modules() if isinstance(m, nn.Conv2d)
    ]
    assert widths == [8, 8, 16, 16, 32, 32, 64, 64]
    norms = [m for m in UNet(3, 5, batch_norm=False).modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms == []


@pytest.mark.parametrize("wrong", [{"width": 0}, {"num_levels": 0}])
def test_unet_refuses_numbers_below_one(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="use 1 or more for each number"):
        UNet(3, 5, **wrong)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_unet_learns_to_find_squares_and_their_surroundings(batch_norm: bool) -> None:
    """Each pixel's class: noise, inside of a square, or its frame, which no 3x3 window tells from noise."""
    torch.manual_seed(0)
    model = UNet(1, 3, width=8, num_levels=3, batch_norm=batch_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        masks = torch.zeros(size, 24, 24, dtype=torch.int64)
        for mask in masks:
            y, x = torch.randint(3, 12, (2,)).tolist()
            mask[y - 3 : y + 11, x - 3 : x + 11] = 2
            mask[y : y + 8, x : x + 8] = 1
        images = (masks == 1).float() + 0.3 * torch.randn(masks.shape)
        return images[:, None], masks

    for _ in range(60):
        inputs, masks = batch(16)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), masks).backward()
        optimizer.step()

    model.eval()
    inputs, masks = batch(64)
    guesses = model(inputs).argmax(dim=1)
    shares = [
        ((guesses == c) & (masks == c)).sum() / ((guesses == c) | (masks == c)).sum()
        for c in range(3)
    ]
    assert min(shares) > 0.8
