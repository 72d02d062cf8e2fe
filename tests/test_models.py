"""Models by name: the template's own, those of torchvision and timm, and how all are built."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import ModelConfig
from models import build_model
from models.pretrained import first_convolution, fitting_weights, head_of, is_in
from runtime.resume import initial_weights
from tests.helpers import refused
from tests.rows import rows

TORCHVISION = ["convnext_tiny", "googlenet", "resnet18", "squeezenet1_1", "vit_b_32"]
TIMM = ["test_efficientnet", "test_resnet", "test_vit", "levit_128s"]  # two heads
# Name, layer that is replaced for other outputs, keyword arguments, wrong values of these, and the
# smallest side of an image.
OWN = [
    ("small_cnn", "classifier", "width, batch_norm", {"width": [0, 7, -2]}, 8),
    *rows(
        ("unet", "head", "width, num_levels, batch_norm", {"width": [0], "num_levels": [0]}, 1),
        (
            *("nafnet", "tail.0", "width, num_blocks, scale"),
            {"width": [0], "scale": [0], "num_blocks": [[], [1, 0, 1]]},
            1,
        ),
        needs="model=unet",
    ),
]


def build(
    name: str, in_channels: int, num_outputs: int, arch: str | None = None, **kwargs: Any
) -> Any:
    """The model, built as a script builds it."""
    return build_model(ModelConfig(name=name, arch=arch, kwargs=kwargs), in_channels, num_outputs)


@pytest.mark.parametrize(("name", "head", "accepted", "wrong", "smallest"), OWN)
def test_an_own_model_takes_any_size(name, head, accepted, wrong, smallest) -> None:
    """And names what arguments it takes."""
    for unknown in ({"widht": 8}, {"arch": "resnet18"}):
        with refused(*unknown, f"it takes only in_channels, num_outputs, {accepted}"):
            build(name, 3, 3, **unknown)
    for key, values in wrong.items():
        for value in values:
            with refused(f"{key}={value}"):
                build(name, 3, 3, **{key: value})
    models = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        cfg = ModelConfig(name=name, channels_last=channels_last)
        models.append(build_model(cfg, 3, 3).eval())
    first = models[1].get_parameter(first_convolution(models[1]))
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert head_of(models[0]) == (head,)
    if name == "small_cnn":  # three times halved, no more
        assert models[0].get_submodule("features")(torch.rand(1, 3, 33, 18)).shape[2:] == (4, 2)
    for size in ((smallest, smallest), (33, 18)):
        images = torch.rand(2, 3, *size)
        outputs, same = models[0](images), models[1](images)
        assert outputs.shape == ((2, 3) if name == "small_cnn" else images.shape)
        torch.testing.assert_close(same, outputs, rtol=1e-3, atol=1e-4)


WITH_AND_WITHOUT = [
    (name, kwargs)
    for name, _, accepted, *_ in OWN
    for kwargs in ({}, {"batch_norm": False})
    if all(key in accepted for key in kwargs)
]


@pytest.mark.parametrize(("name", "kwargs"), WITH_AND_WITHOUT)
def test_an_own_model_learns_by_most_of_its_weights(name: str, kwargs: dict[str, Any]) -> None:
    """The loss of a batch falls to a fifth, and most of each parameter has a part in it. A pixel is
    noise, or in a square, or in its frame, which 3x3 windows cannot tell from noise."""
    torch.manual_seed(0)
    masks = torch.zeros(16, 24, 24, dtype=torch.int64)
    for mask in masks:
        y, x = torch.randint(3, 12, (2,)).tolist()
        mask[y - 3 : y + 11, x - 3 : x + 11] = 2
        mask[y : y + 8, x : x + 8] = 1
    squares = (masks[:, None] == 1).float()
    inputs = squares + 0.3 * torch.randn_like(squares)
    targets = {"small_cnn": torch.arange(16), "unet": masks, "nafnet": squares}[name]
    num_outputs = {"small_cnn": 16, "unet": 3, "nafnet": 1}[name]
    model = build(name, 1, num_outputs, width=8, **kwargs)
    loss_of = F.mse_loss if name == "nafnet" else F.cross_entropy
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    for name, parameter in model.named_parameters():
        assert (parameter != before[name]).float().mean() > 0.6, name


@pytest.mark.parametrize("scale", rows(1, 2, needs="model=nafnet"))
def test_nafnet_corrects_its_enlarged_input_and_its_padding_leaves_no_trace(scale: int) -> None:
    torch.manual_seed(0)
    model = build("nafnet", 3, 3, width=4, scale=scale)
    for name, parameter in model.named_parameters():
        if name.endswith(("beta", "gamma")):  # at the start, the blocks are the identity
            nn.init.normal_(parameter)

    def correction(images: Tensor) -> Tensor:
        return model(images) - F.interpolate(images, scale_factor=scale, mode="bicubic")

    images = torch.rand(1, 3, 16, 20)
    cut = images[:, :, :13, :18]
    images[:, :, 13:] = images[:, :, 12:13]
    images[:, :, :, 18:] = images[:, :, :, 17:18]
    # The enlarged input differs near the cut; the correction may not.
    expected = correction(images)[:, :, : 13 * scale, : 18 * scale]
    assert expected.std() > 0.01
    torch.testing.assert_close(correction(cut), expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_compiled_if_asked_for() -> None:
    eager, compiled = (
        build_model(ModelConfig(name="small_cnn", compile=asked), 3, 10) for asked in (False, True)
    )
    with torch.compiler.set_stance("fail_on_recompile"):
        eager(torch.rand(2, 3, 8, 8))
        with pytest.raises(RuntimeError, match="compile"):
            compiled(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize("arch", TORCHVISION + TIMM)
def test_every_family_takes_other_channels_and_outputs_and_trains_its_head(arch: str) -> None:
    """The rest stays in evaluation mode, also with SyncBatchNorm."""
    name, size = "torchvision", 224
    if arch in TIMM:
        name = "timm"
        timm = pytest.importorskip("timm")
        size = timm.models.get_pretrained_cfg_value(arch, "input_size")[-1]
    cfg = ModelConfig(name=name, arch=arch, channels_last=True, freeze="backbone")
    with torch.device("meta"):  # shapes without the arithmetic
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build_model(cfg, 5, num_outputs=7))
        assert model.training  # in which some return a tuple by default
        assert model(torch.empty(2, 5, size, size)).shape == (2, 7)
    assert model.get_parameter(first_convolution(model)).shape[1] == 5
    parameters = dict(model.named_parameters())
    outputs = {name for name, p in parameters.items() if p.ndim > 1 and p.shape[0] == 7}
    learning = {name for name, p in parameters.items() if p.requires_grad}
    assert outputs
    assert outputs <= learning
    head = head_of(model)
    assert all(is_in(name, head) for name in learning)
    in_training = {name for name, module in model.named_modules() if module.training}
    around = {name for name, _ in model.named_modules() if any(is_in(x, [name]) for x in head)}
    assert in_training - {""} <= around | {x for x in in_training if is_in(x, head)}
    assert around | {*head} <= in_training


def test_what_a_family_does_not_take_is_refused() -> None:
    """`fcn_resnet50` is a model of segmentation."""
    for name, other in (("torchvision", "fcn_resnet50"), ("timm", "mine")):
        pytest.importorskip(name)
        with refused("model.arch=resnet_18 is unknown", "resnet18"):
            build(name, 3, 7, arch="resnet_18")
        for arch in (None, other):
            with refused(f"model.arch={arch}"):
                build(name, 3, 7, arch=arch)
        for kwargs in ({"widht": 8}, {"num_classes": 3}):
            with refused(f"model.kwargs={kwargs} does not fit model.arch=resnet18"):
                build(name, 3, 7, arch="resnet18", **kwargs)


def test_timms_weights_fit_other_sizes_channels_and_outputs(tmp_path: Path) -> None:
    timm, file = pytest.importorskip("timm"), tmp_path / "vit.safetensors"  # as downloaded
    kwargs = {"pretrained_cfg_overlay": {"file": str(file)}, "img_size": 96}
    cfg = ModelConfig(name="timm", arch="test_vit", kwargs=kwargs, weights="imagenet")
    with refused("model.weights=imagenet", "test_vit"):
        initial_weights(cfg, 3)
    whole = timm.create_model("test_vit").state_dict()
    save_file(whole, file)
    for channels in (3, 5):
        weights, facts = initial_weights(cfg, channels)
        model = build_model(cfg, channels, 7)
        fitting = fitting_weights(model, cfg, weights)
        assert facts == {}
        assert model.state_dict().keys() - fitting.keys() == {"head.weight", "head.bias"}
        model.load_state_dict(model.state_dict() | fitting)
        assert torch.equal(model.get_parameter("norm.weight"), whole["norm.weight"])
        assert model(torch.rand(2, channels, 96, 96)).shape == (2, 7)
