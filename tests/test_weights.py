"""A model starts from weights that are there already."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from conf.errors import UserError
from conf.schema import Config
from loaders import build_loaders
from models import MODELS, build_model
from models.finetune import first_convolution, fitting_weights, head_of, initial_weights
from runtime import build_optimizer
from runtime.finetune import start_from
from runtime.group import SingleProcess
from tests.helpers import (
    REPOSITORY,
    checkpoint_of,
    has_ranks,
    make_config,
    run_all,
    summary_of,
    train,
)

TINY = ["model.kwargs.width=8", "optimizer.warmup_epochs=0", "epochs=1"]
STEPS = [*TINY, "global_batch_size=100", "log.images=0"]


def digit_folders(root: Path, digits: range, num_train: int, num_val: int) -> Path:
    """Real digits as PNG files in class folders, so many of each."""
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        for split, count in [("train", num_train), ("val", num_val)]:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
            for digit in digits:
                folder = root / split / f"digit {digit}"
                folder.mkdir(parents=True)
                for number in np.flatnonzero(labels == digit)[:count]:
                    Image.fromarray(images[number]).save(folder / f"{number:05d}.png")
    return root


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
    with pytest.raises(ValueError, match="nothing fits model=small_cnn") as raised:
        small(f"model.weights={path}", "model.kwargs.width=16")
    assert "classifier.weight (10x16)" in str(raised.value)
    assert "features.0.0.weight (8x1x3x3)" in str(raised.value)


@pytest.mark.parametrize("content", [None, b"noise", b"", {}, "folder"])
def test_files_that_hold_no_weights_are_named(tmp_path, content: Any) -> None:
    path = tmp_path / "weights.pt"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError) as raised:
        small(f"model.weights={path}")
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("override", ["model.weights=imagenet", "model.freeze=all"])
def test_what_a_model_does_not_have_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=override):
        small(override)


@pytest.mark.usefixtures("no_downloads")
def test_without_network_imagenet_names_the_file_and_its_place(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cfg = make_config("model=torchvision", "model.arch=resnet18", "model.weights=imagenet")
    with pytest.raises(UserError) as raised:
        initial_weights(cfg.model, 3)
    place = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    assert f"{place} is not there" in str(raised.value)
    assert "download https://download.pytorch.org/models/resnet18-f37072fd.pth" in str(raised.value)


def test_imagenet_weights_that_lie_in_their_place_are_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    whole = build_model(
        make_config("model=torchvision", "model.arch=resnet18").model, 3, 1000
    ).state_dict()
    place = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    place.parent.mkdir(parents=True)
    torch.save(whole, place)
    model = started(
        make_config("model=torchvision", "model.arch=resnet18", "model.weights=imagenet"), 1, 10
    )
    own = model.state_dict()
    assert torch.equal(own["layer4.1.conv2.weight"], whole["layer4.1.conv2.weight"])
    torch.testing.assert_close(own["conv1.weight"], whole["conv1.weight"].sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("small_cnn", "classifier"),
        ("torchvision", "fc"),
        ("nafnet", "tail.0"),
        ("unet", "head"),
    ],
)
def test_every_model_has_a_head(name: str, head: str) -> None:
    if name not in MODELS:
        pytest.skip(f"{name} was deleted")
    cfg = make_config(f"model={name}")
    model = build_model(cfg.model, 3, 3 if name == "nafnet" else 10)
    assert head_of(model) == (head,)
    assert first_convolution(model) in model.state_dict()
    model.head_name = "features"  # type: ignore[assignment]  # a model may say so itself
    assert head_of(model) == ("features",)
    model.head_name = ("tail", "head")  # type: ignore[assignment]
    assert head_of(model) == ("tail", "head")


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
    copied.train()
    assert copied.training
    assert not copied.get_submodule("features").training
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


def test_fine_tuning_from_a_run_beats_starting_from_scratch(tmp_path) -> None:
    digits = [
        "data=imagefolder",
        "data.resize=null",
        "data.crop=null",
        f"data.cache_dir={tmp_path}",
    ]
    digits += ["model.kwargs.width=16", "optimizer.warmup_epochs=0"]
    low = digit_folders(tmp_path / "low", range(5), 300, 20)
    high = digit_folders(tmp_path / "high", range(5, 10), 40, 80)
    first = [f"data.root={low}", "epochs=4"]
    again = [f"data.root={high}", "epochs=2", "global_batch_size=25"]
    runs = {"first": first, "scratch": again}
    runs["tuned"] = [*again, f"model.weights={tmp_path / 'first'}"]
    run_all(
        [
            ["train.py", f"output_dir={tmp_path / name}", *digits, *options]
            for name, options in runs.items()
        ],
        tmp_path,
    )
    scratch, tuned = (summary_of(tmp_path / name) for name in ("scratch", "tuned"))
    assert tuned["steps"] == scratch["steps"] == 16
    assert tuned["val/top1"] > scratch["val/top1"] + 0.1
    assert tuned["val/loss"] < scratch["val/loss"]


# part: compose
@pytest.mark.parametrize("script", ["train.py", "train_fsdp.py"])
def test_scripts_need_no_new_line_to_train_the_head_only(saved, tmp_path, script: str) -> None:
    path, before = saved
    head = [*STEPS, f"model.weights={path}", "model.freeze=backbone", "resume=auto"]
    commands = [
        [script, f"output_dir={tmp_path / 'head'}", *options]
        for options in (
            [*head, "max_steps=4"],
            [*head, "max_steps=6", "model.weights=nothing"],  # which is not read any more
        )
    ]
    first, resumed = run_all(commands, tmp_path, 1 + has_ranks(script))
    assert "14 of 14 parameter tensors are loaded" in first
    assert "parameter tensors are loaded" not in resumed
    for name, value in checkpoint_of(tmp_path / "head")["model"].items():
        assert torch.equal(value, before[name]) != name.startswith("classifier"), name
    if script == "train.py":
        with pytest.raises(AssertionError, match="model.freeze: backbone then"):
            train(script, tmp_path / "head", *STEPS, "resume=auto", "max_steps=8")


def test_a_head_for_other_classes_starts_fresh_although_its_size_fits(tmp_path, caplog) -> None:
    data = ["data=imagefolder", "data.resize=null", "data.crop=null", f"data.cache_dir={tmp_path}"]
    low = digit_folders(tmp_path / "low", range(3), 60, 4)
    high = digit_folders(tmp_path / "high", range(1, 4), 60, 4)
    train("train.py", tmp_path / "first", *STEPS, *data, "max_steps=2", f"data.root={low}")
    caplog.set_level(logging.INFO)
    for root in (low, high):
        weights = f"model.weights={tmp_path / 'first'}"
        cfg = make_config(*STEPS, *data, f"data.root={root}", weights)
        loader, _ = build_loaders(cfg, torch.device("cpu"))
        start_from(cfg, build_model(cfg.model, 3, 3), loader, SingleProcess())
    said = [message for message in caplog.messages if "model.weights" in message]
    assert [message.split(": ")[1][:8] for message in said[::2]] == ["14 of 14", "12 of 14"]
    assert said[3].endswith("classifier.weight (3x16), classifier.bias (3) starts fresh")
