"""A model starts from weights that are there already."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from conf.schema import Config
from loaders import build_loaders
from models import build_model
from models.finetune import fitting_weights, initial_weights
from runtime import build_optimizer
from runtime.finetune import start_from
from runtime.group import SingleProcess
from tests.helpers import checkpoint_of, make_config, refused, run_all, train
from tests.images import make_photos

TINY = ["model.kwargs.width=8", "optimizer.warmup_epochs=0", "epochs=1"]
STEPS = [*TINY, "global_batch_size=100", "log.images=0"]


def small(*overrides: str, in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    return started(make_config(*TINY, *overrides), in_channels, num_classes)


def started(cfg: Config, in_channels: int, num_classes: int) -> nn.Module:
    """A model with what fits of `model.weights`."""
    model = build_model(cfg.model, in_channels, num_classes)
    if cfg.model.weights is not None:
        saved, _ = initial_weights(cfg.model, in_channels)
        fitting = fitting_weights(model, cfg.model, saved)
        model.load_state_dict(model.state_dict() | fitting)
    return model


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, Tensor]]:
    """A file of weights, and what is in it."""
    weights = small().state_dict()
    for value in weights.values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value))
    save_file(weights, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", weights


@pytest.mark.parametrize("form", ["safetensors", "pt", "checkpoint", "wrapped", "run", "newest"])
def test_weights_come_from_files_checkpoints_and_runs(saved, tmp_path, form: str) -> None:
    path, weights = saved
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    others = {
        "pt": weights,
        "checkpoint": {"model": weights, "step": 3},
        "wrapped": {f"module.{name}": value for name, value in weights.items()},
    }
    if form in others:
        torch.save(others[form], path := tmp_path / "weights.pt")
    elif form == "run":
        path = shutil.copy(path, run / "checkpoints" / "model.safetensors").parents[1]
    elif form == "newest":
        torch.save({"model": small().state_dict()}, run / "checkpoints" / "step-00000002.pt")
        torch.save({"model": weights}, run / "checkpoints" / "step-00000010.pt")
        path = run
    model = small(f"model.weights={path}")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_head_of_another_size_starts_fresh_and_two_lines_say_so(saved, caplog) -> None:
    path, weights = saved
    with caplog.at_level(logging.INFO):
        model = small(f"model.weights={path}", num_classes=3)
    for name, value in model.state_dict().items():
        if name.startswith("classifier"):
            assert value.shape[0] == 3
        else:
            assert torch.equal(value, weights[name])
    first, second = caplog.messages
    assert first.endswith("12 of 14 parameter tensors are loaded")
    assert second.endswith("classifier.weight (3x16), classifier.bias (3) starts fresh")


def test_the_first_convolution_is_adapted_to_other_channels(saved, caplog) -> None:
    path, _ = saved
    images = torch.rand(4, 1, 16, 16)
    one = small(f"model.weights={path}").eval()
    with caplog.at_level(logging.INFO):
        several = small(f"model.weights={path}", in_channels=3).eval()
    assert "is adapted from 1 to 3 channels" in caplog.messages[0]
    # Alike in all channels, an image has the same response.
    torch.testing.assert_close(several(images.expand(-1, 3, -1, -1)), one(images))
    save_file(several.state_dict(), path)
    back = small(f"model.weights={path}").eval()
    torch.testing.assert_close(back(images), one(images))


def test_weights_of_which_nothing_fits_are_refused(saved) -> None:
    path, _ = saved
    names = ("classifier.weight (10x16)", "features.0.0.weight (8x1x3x3)")
    with refused("nothing fits model=small_cnn", *names):
        small(f"model.weights={path}", "model.kwargs.width=16")


@pytest.mark.parametrize("content", [None, b"noise", b"", {}, "folder"])
def test_files_that_hold_no_weights_are_named(tmp_path, content: Any) -> None:
    path = tmp_path / "weights.pt"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with refused(str(path)):
        small(f"model.weights={path}")


@pytest.mark.parametrize("override", ["model.weights=imagenet", "model.freeze=all"])
def test_what_a_model_does_not_have_is_refused(override: str) -> None:
    with refused(override):
        small(override)


@pytest.mark.usefixtures("no_downloads")
def test_imagenet_weights_are_loaded_from_their_place_or_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    resnet18 = ["model=torchvision", "model.arch=resnet18"]
    cfg = make_config(*resnet18, "model.weights=imagenet")
    place = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    with refused(str(place), f"https://download.pytorch.org/models/{place.name}"):
        initial_weights(cfg.model, 3)
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = build_model(make_config(*resnet18).model, 3, 1000).state_dict()
    torch.save(whole, place)
    own = started(cfg, 1, 10).state_dict()
    assert torch.equal(own["layer4.1.conv2.weight"], whole["layer4.1.conv2.weight"])
    torch.testing.assert_close(own["conv1.weight"], whole["conv1.weight"].sum(1, keepdim=True))


def test_a_frozen_backbone_stays_as_it_is_with_its_statistics() -> None:
    cfg = make_config(*TINY, "model.freeze=backbone")
    model = build_model(cfg.model, 1, 10)
    copied = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    steps, schedule = build_optimizer(cfg, model, 10)
    for _ in range(3):
        model.train()
        model(torch.rand(8, 1, 16, 16)).square().mean().backward()
        steps.step()
        schedule.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("classifier"), name
    assert model.training
    assert model.get_submodule("classifier").training
    assert not any(module.training for module in model.get_submodule("features").modules())
    # A copy, such as an average of the weights, is frozen by itself.
    copied.eval()
    assert model.training
    model.eval()
    assert not model.get_submodule("classifier").training


def test_the_backbone_learns_with_its_own_rate() -> None:
    cfg = make_config(*TINY, "optimizer.backbone_lr_scale=0.1", "optimizer.lr=0.5")
    model = build_model(cfg.model, 1, 10)
    optimizer, schedule = build_optimizer(cfg, model, 10)
    for _ in range(3):
        head, backbone = schedule.get_last_lr()
        assert backbone == pytest.approx(head / 10)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["params"] == list(
        model.get_submodule("classifier").parameters()
    )
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}


def test_scripts_need_no_new_line_to_train_the_head_only(saved, tmp_path) -> None:
    path, before = saved
    run, script = tmp_path / "head", "train_fsdp.py"
    head = [*STEPS, f"model.weights={path}", "model.freeze=backbone", "resume=auto"]
    commands = [
        [script, f"output_dir={run}", *head, "max_steps=4"],
        [script, f"output_dir={run}", *head, "max_steps=6", "model.weights=nothing"],  # not read
    ]
    first, resumed = run_all(commands, tmp_path, 2)
    assert "14 of 14 parameter tensors are loaded" in first
    assert "parameter tensors are loaded" not in resumed
    state = checkpoint_of(run)
    assert state["step"] == 6
    for name, value in state["model"].items():
        assert torch.equal(value, before[name]) != name.startswith("classifier"), name


def test_a_head_for_other_classes_starts_fresh_although_its_size_fits(tmp_path, caplog) -> None:
    data = ["data=imagefolder", "data.resize=null", "data.crop=40", f"data.cache_dir={tmp_path}"]
    data += [*STEPS, "global_batch_size=4", "data.val_count=3"]
    roots = [make_photos(tmp_path / name, 12) for name in ("first photos", "others")]
    (roots[1] / "c").rename(roots[1] / "d")
    train("train.py", tmp_path / "first", *data, "max_steps=2", f"data.root={roots[0]}")
    caplog.set_level(logging.INFO)
    for root in roots:
        weights = f"model.weights={tmp_path / 'first'}"
        cfg = make_config(*data, f"data.root={root}", weights)
        loader, _ = build_loaders(cfg, torch.device("cpu"))
        start_from(cfg, build_model(cfg.model, 3, 3), loader, SingleProcess())
    said = [message for message in caplog.messages if "model.weights" in message]
    assert [message.split(": ")[1][:8] for message in said[::2]] == ["14 of 14", "12 of 14"]
    assert said[3].endswith("classifier.weight (3x16), classifier.bias (3) starts fresh")
