"""Learning rates fall from layer to layer, from the head down."""

import pytest
import torch
from torch import nn

from models import build_model
from runtime.training import build_optimizer
from tests.helpers import make_config

DECAY = ["optimizer.layer_decay=0.5", "optimizer.lr=0.1", "optimizer.warmup_epochs=0"]


def rates_of(*overrides: str) -> dict[str, float]:
    """The peak learning rate of each weight; the first one is logged."""
    cfg = make_config(*DECAY, *overrides)
    with torch.device("meta"):
        model = build_model(cfg.model, 3, 10)
    optimizer, schedule = build_optimizer(cfg, model, 10)
    assert schedule.get_last_lr()[0] == max(schedule.get_last_lr())
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[p] for name, p in model.named_parameters()}


VIT = {
    **{"class_token": 13, "conv_proj.weight": 13, "encoder.pos_embedding": 13},
    **{f"encoder.layers.encoder_layer_{n}.mlp.0.weight": 12 - n for n in range(12)},
    **{"encoder.ln.weight": 0, "heads.head.weight": 0},
}
TIMM = {
    **{"cls_token": 13, "patch_embed.proj.weight": 13, "pos_embed": 13},
    **{f"blocks.{n}.attn.qkv.bias": 12 - n for n in range(12)},
    **{"norm.weight": 1, "head.weight": 0},  # as timm does
}
RESNET = {"conv1.weight": 12, "layer1.0.conv1.weight": 11, "layer3.5.bn3.weight": 4}
RESNET |= {"layer4.0.conv1.weight": 3, "layer4.2.conv1.weight": 1, "fc.weight": 0}


SMALL = ["model.kwargs.width=8"]


@pytest.mark.parametrize(
    ("overrides", "depths"),
    [
        (["model=torchvision", "model.arch=vit_b_16"], VIT),
        (["model=timm", "model.arch=vit_tiny_patch16_224"], TIMM),
        (["model=torchvision", "model.arch=resnet50"], RESNET),
        ([*SMALL, "optimizer.decay_norms_and_biases=false"], {"features.0.1.bias": 4}),
        ([*SMALL, "optimizer.name=muon"], {"features.0.0.weight": 4, "classifier.bias": 0}),
    ],
)
def test_each_layer_has_its_rate(overrides: list[str], depths: dict[str, int]) -> None:
    rates = rates_of(*overrides)
    for name, depth in depths.items():
        assert rates[name] == pytest.approx(0.1 * 0.5**depth), name


def test_the_backbones_own_rate_is_multiplied_and_one_layer_has_the_whole() -> None:
    rates = rates_of(*SMALL, "optimizer.backbone_lr_scale=0.1")
    assert rates["classifier.weight"] == 0.1
    assert rates["features.6.0.weight"] == pytest.approx(0.1 * 0.1 * 0.5)
    optimizer, _ = build_optimizer(make_config(*DECAY), nn.Linear(2, 2), 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
