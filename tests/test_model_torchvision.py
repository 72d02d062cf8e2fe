"""torchvision's classification models, as they are but for the number of channels."""

import pytest
import torch
import torchvision.models

from tests.model_contract import build, check_family, check_refusals

ONE_OF_EACH_FAMILY = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_1", "swin_t", "vgg11", "vit_b_32"),
)


@pytest.mark.parametrize("arch", ONE_OF_EACH_FAMILY)
def test_every_family_takes_other_channels_and_outputs_and_trains_its_head_alone(arch) -> None:
    check_family("torchvision", arch, 224)


def test_for_three_channels_it_is_torchvisions_and_follows_the_seed() -> None:
    torch.manual_seed(0)
    state = build("torchvision", 3, 7, "resnet18").state_dict()
    torch.manual_seed(0)
    original = torchvision.models.resnet18(num_classes=7).state_dict()
    torch.testing.assert_close(state, original, rtol=0, atol=0)


def test_what_torchvision_does_not_take_is_refused() -> None:
    check_refusals("torchvision", "fcn_resnet50")  # of segmentation
