"""torchvision's classification models, as they are but for the number of channels."""

from typing import Any

import pytest
import torch
import torchvision.models

from conf.errors import UserError
from conf.schema import ModelConfig
from models import build_model
from tests.model_contract import check_family

ONE_OF_EACH_FAMILY = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_1", "swin_t", "vgg11", "vit_b_32"),
)


def build(arch: str | None, **kwargs: Any) -> Any:
    cfg = ModelConfig(name="torchvision", arch=arch, kwargs=kwargs, channels_last=True)
    return build_model(cfg, in_channels=3, num_outputs=7)


@pytest.mark.parametrize("arch", ONE_OF_EACH_FAMILY)
def test_every_family_takes_other_channels_and_outputs_and_trains_its_head_alone(arch) -> None:
    check_family("torchvision", arch, 224)


def test_for_three_channels_it_is_torchvisions_and_follows_the_seed() -> None:
    torch.manual_seed(0)
    state = build("resnet18").state_dict()
    torch.manual_seed(0)
    original = torchvision.models.resnet18(num_classes=7).state_dict()
    assert state.keys() == original.keys()
    assert all(torch.equal(state[key], original[key]) for key in state)
    assert not torch.equal(build("resnet18").fc.weight, state["fc.weight"])


@pytest.mark.parametrize(
    ("arch", "kwargs", "message"),
    [
        ("resnet_18", {}, r"model.arch=resnet_18 .*did you mean resnet18\?"),
        (None, {}, "model.arch=None"),
        ("fcn_resnet50", {}, "model.arch=fcn_resnet50"),  # of segmentation
        ("resnet18", {"widht": 8}, "model.kwargs.*widht"),
        ("resnet18", {"num_classes": 3}, "model.kwargs.*num_classes"),
        ("resnet18", {"num_outputs": 3}, "model.kwargs={'num_outputs'"),
        ("resnet18", {"in_channels": 5}, "model.kwargs={'in_channels'"),
    ],
)
def test_what_torchvision_does_not_take_is_refused(
    arch: str | None, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(arch, **kwargs)
