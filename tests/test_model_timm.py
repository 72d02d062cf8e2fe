"""timm's models, their heads and their pretrained weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conf.schema import ModelConfig
from models import build_model
from models.pretrained import fitting_weights, initial_weights
from tests.helpers import refused
from tests.model_contract import build, check_family, check_refusals

timm = pytest.importorskip("timm")

SEVERAL_FAMILIES = (
    *("convnext_atto", "mixer_s32_224", "regnetx_002", "vgg11"),
    *("test_efficientnet", "test_resnet", "test_vit"),
    *("crossvit_tiny_240", "efficientformer_l1", "levit_128s", "repvit_m0_9"),  # two heads
)


@pytest.mark.parametrize("arch", SEVERAL_FAMILIES)
def test_families_take_other_channels_and_outputs_and_train_their_head_alone(arch: str) -> None:
    check_family("timm", arch, timm.models.get_pretrained_cfg_value(arch, "input_size")[-1])


def test_what_timm_does_not_take_is_refused() -> None:
    check_refusals("timm", "resnet18.mine")
    with refused("model.kwargs={'img_size': -1}"):
        build("timm", 3, 7, arch="test_vit", img_size=-1)


def test_pretrained_weights_are_named_if_missing_and_fit_other_sizes_channels_and_outputs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "vit.safetensors"  # what timm would download
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
