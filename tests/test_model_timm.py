"""timm's models, their heads and their pretrained weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conf.errors import UserError
from conf.schema import ModelConfig
from models import build_model
from models.finetune import fitting_weights, initial_weights
from tests.model_contract import check_family

timm = pytest.importorskip("timm")

SEVERAL_FAMILIES = (
    *("convnext_atto", "mixer_s32_224", "regnetx_002", "vgg11"),
    *("test_efficientnet", "test_resnet", "test_vit"),
    *("crossvit_tiny_240", "efficientformer_l1", "levit_128s", "repvit_m0_9"),  # two heads
)


def config(arch: str | None, **settings: Any) -> ModelConfig:
    return ModelConfig(name="timm", arch=arch, channels_last=True, **settings)


@pytest.mark.parametrize("arch", SEVERAL_FAMILIES)
def test_families_take_other_channels_and_outputs_and_train_their_head_alone(arch: str) -> None:
    check_family("timm", arch, timm.models.get_pretrained_cfg_value(arch, "input_size")[-1])


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
