"""timm's models, their heads and their pretrained weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conf.errors import UserError
from conf.schema import ModelConfig
from models import build_model
from models.finetune import fitting_weights, head_of, initial_weights, is_in

timm = pytest.importorskip("timm")

SEVERAL_FAMILIES = {
    "convnext_atto": 224,
    "crossvit_tiny_240": 240,  # two images of other sizes, two heads
    "efficientformer_l1": 224,  # two heads
    "levit_128s": 224,  # two heads with norms
    "mixer_s32_224": 224,
    "regnetx_002": 224,
    "repvit_m0_9": 224,  # a head of two
    "test_efficientnet": 160,
    "test_resnet": 160,
    "test_vit": 160,
    "vgg11": 224,
}


def config(arch: str | None, **settings: Any) -> ModelConfig:
    return ModelConfig(name="timm", arch=arch, channels_last=True, **settings)


@pytest.mark.parametrize("arch", SEVERAL_FAMILIES)
def test_families_take_other_channels_and_outputs_and_train_their_head_alone(arch: str) -> None:
    size = SEVERAL_FAMILIES[arch]
    with torch.device("meta"):  # shapes without the arithmetic
        model = build_model(config(arch, freeze="backbone"), 5, num_outputs=7)
        assert model.training
        assert model(torch.empty(2, 5, size, size)).shape == (2, 7)
    outputs = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == 7
    }
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert outputs
    assert all(is_in(name, head_of(model)) for name in [*outputs, *learning])
    assert learning >= {f"{name}.weight" for name in outputs}


@pytest.mark.parametrize(
    ("arch", "kwargs", "message"),
    [
        ("resnet_18", {}, r"model.arch=resnet_18 .*did you mean resnet18\?"),
        ("resnet18.mine", {}, "model.arch=resnet18.mine"),
        (None, {}, "model.arch=None"),
        ("test_resnet", {"widht": 8}, "model.kwargs.*widht"),
        ("test_resnet", {"num_classes": 3}, "model.kwargs.*num_classes"),
        ("test_vit", {"img_size": -1}, "model.kwargs.*-1"),
    ],
)
def test_what_timm_does_not_take_is_refused(
    arch: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        build_model(config(arch, kwargs=kwargs), 3, 7)
    assert len(str(raised.value)) < 500  # not all of its names


def test_pretrained_weights_fit_other_sizes_channels_and_outputs(tmp_path: Path) -> None:
    whole = timm.create_model("test_vit").state_dict()
    save_file(whole, tmp_path / "vit.safetensors")
    # What timm would download.
    kwargs = {"pretrained_cfg_overlay": {"file": str(tmp_path / "vit.safetensors")}, "img_size": 96}
    cfg = config("test_vit", kwargs=kwargs, weights="imagenet")
    for channels in (3, 5):
        weights, facts = initial_weights(cfg, channels)
        model = build_model(cfg, channels, 7)
        fitting = fitting_weights(model, cfg, weights)
        assert facts == {}
        assert model.state_dict().keys() - fitting.keys() == {"head.weight", "head.bias"}
        model.load_state_dict(model.state_dict() | fitting)
        assert torch.equal(model.get_parameter("norm.weight"), whole["norm.weight"])
        assert model(torch.rand(2, channels, 96, 96)).shape == (2, 7)


def test_pretrained_weights_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    kwargs = {"pretrained_cfg_overlay": {"file": str(tmp_path / "nothing.pth")}}
    cfg = config("test_vit", kwargs=kwargs, weights="imagenet")
    with pytest.raises(UserError, match=r"model\.weights=imagenet.*test_vit"):
        initial_weights(cfg, 3)
