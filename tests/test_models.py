"""Models by name: the small CNN, those of torchvision and timm, and how all are built."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conf.schema import ModelConfig
from models import build_model
from models.pretrained import first_convolution, fitting_weights, head_of, initial_weights, is_in
from tests.helpers import refused
from tests.model_contract import build, check_contract, check_learning

FAMILIES = {
    "torchvision": ("convnext_tiny", "googlenet", "resnet18", "squeezenet1_1", "vit_b_32"),
    "timm": ("test_efficientnet", "test_resnet", "test_vit", "levit_128s"),  # two heads
}


def test_the_small_cnn_keeps_the_contract() -> None:
    wrong = [("width", width) for width in (0, 7, -2)]  # it needs a half
    check_contract("small_cnn", "classifier", "width, batch_norm", *wrong)
    for shape in [(1, 8, 8), (1, 8, 31), (5, 50, 50)]:
        assert build("small_cnn", shape[0], 10)(torch.rand(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_the_small_cnn_learns_with_and_without_batch_norm(batch_norm: bool) -> None:
    torch.manual_seed(0)
    model = build("small_cnn", 1, 10, width=8, batch_norm=batch_norm)
    check_learning(model, torch.rand(8, 1, 16, 16), torch.arange(8))


def test_a_model_is_compiled_if_asked_for() -> None:
    eager, compiled = (
        build_model(ModelConfig(name="small_cnn", compile=asked), 3, 10) for asked in (False, True)
    )
    with torch.compiler.set_stance("fail_on_recompile"):
        eager(torch.rand(2, 3, 8, 8))
        with pytest.raises(RuntimeError, match="compile"):
            compiled(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name in FAMILIES for arch in FAMILIES[name]]
)
def test_every_family_takes_other_channels_and_outputs_and_trains_its_head_alone(
    name: str, arch: str
) -> None:
    size = 224
    if name == "timm":
        timm = pytest.importorskip("timm")
        size = timm.models.get_pretrained_cfg_value(arch, "input_size")[-1]
    cfg = ModelConfig(name=name, arch=arch, channels_last=True, freeze="backbone")
    with torch.device("meta"):  # shapes without the arithmetic
        model = build_model(cfg, 5, num_outputs=7)
        assert model.training  # in which some return a tuple by default
        assert model(torch.empty(2, 5, size, size)).shape == (2, 7)
    assert model.get_parameter(first_convolution(model)).shape[1] == 5
    parameters = dict(model.named_parameters())
    outputs = {name for name, p in parameters.items() if p.ndim > 1 and p.shape[0] == 7}
    learning = {name for name, p in parameters.items() if p.requires_grad}
    assert outputs
    assert outputs <= learning
    assert all(is_in(name, head_of(model)) for name in learning)


def test_what_a_model_does_not_take_is_refused() -> None:
    """`fcn_resnet50` is a model of segmentation."""
    with refused("model.arch=resnet18", "it takes only in_channels, num_outputs, width"):
        build("small_cnn", 3, 10, arch="resnet18")
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


def test_timms_weights_are_named_if_missing_and_fit_other_sizes_channels_and_outputs(
    tmp_path: Path,
) -> None:
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
