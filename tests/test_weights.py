"""A model starts from weights that are there already."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from loaders import build_loaders
from models import build_model
from models.pretrained import fitting_weights
from runtime.checkpoint import CheckpointWriter
from runtime.process_group import ProcessGroup
from runtime.resume import initial_weights, start_from_weights
from tests.helpers import make_config, refused
from tests.images import make_photos, photos_in
from tests.processes import train
from tests.results import checkpoint_of
from tests.rows import rows

SHORT = ["optimizer.warmup_epochs=0", "epochs=1", "log.images=0", "data.crop=[12,12]"]


def started(*overrides: str, in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """A model with what fits of `model.weights`."""
    cfg = make_config(*overrides).model
    model = build_model(cfg, in_channels, num_classes)
    if cfg.weights is not None:
        saved, _ = initial_weights(cfg, in_channels)
        model.load_state_dict(model.state_dict() | fitting_weights(model, cfg, saved))
    return model


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, Tensor]]:
    """A file of weights, and what is in it."""
    weights = started().state_dict()
    for value in weights.values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value))
    save_file(weights, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", weights


def test_weights_come_from_files_checkpoints_and_runs(saved, tmp_path) -> None:
    path, weights = saved
    published, newest, best = (tmp_path / name / "checkpoints" for name in ("a", "b", "c"))
    published.mkdir(parents=True)
    shutil.copy(path, published / "model.safetensors")
    files = {
        tmp_path / "plain.pt": weights,
        **{
            tmp_path / f"{key}.pt": {key: weights, "step": 3}
            for key in ("model", "state_dict", "model_state_dict", "net")
        },
        **{
            tmp_path / f"{front}pt": {f"{front}{name}": value for name, value in weights.items()}
            for front in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
        },
    }
    for file, content in files.items():
        torch.save(content, file)
    for folder, right in ((newest, 10), (best, 2)):
        writer = CheckpointWriter(make_config().checkpoint, folder)
        for step in (2, 10):
            content = weights if step == right else started().state_dict()
            writer.write({"step": step, "model": content, "facts": {}}, is_best=step == 2 == right)
            writer.wait()
    (best / "model.safetensors").unlink()  # as with FSDP
    runs = [folder.parent for folder in (published, newest, best)]
    for source in [path, *tmp_path.glob("*.pt"), *runs, newest / "step-00000010"]:
        found = started(f"model.weights={source}").state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in found.items()), source


def test_what_holds_no_weights_or_none_that_fit_is_refused(saved, tmp_path) -> None:
    path, _ = saved
    names = ("classifier.weight (10x64)", "features.0.0.weight (8x1x3x3)")
    with refused("nothing fits model=small_cnn", *names):
        started(f"model.weights={path}", "model.kwargs.width=16")
    missing, noise, code, empty, folder = (tmp_path / f"{n}.pt" for n in range(5))
    noise.write_bytes(b"noise")
    torch.save(nn.Linear(2, 2), code)  # which reading it would run
    torch.save({}, empty)
    folder.mkdir()
    for source in (missing, noise, code, empty, folder, "imagenet"):
        with refused(str(source)):
            started(f"model.weights={source}")
    with refused("model.freeze=all"):
        started("model.freeze=all")


@pytest.mark.usefixtures("no_downloads")
def test_imagenet_weights_are_loaded_from_their_place_or_named(
    tmp_path, monkeypatch, caplog
) -> None:
    """The first convolution is adapted: to channels that are alike, it responds as before."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    resnet18 = ["model=torchvision", "model.arch=resnet18"]
    place = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    with refused("model.weights=imagenet", "resnet18", "TORCH_HOME"):
        started(*resnet18, "model.weights=imagenet")
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = started(*resnet18, in_channels=3, num_classes=1000).state_dict()
    torch.save(whole, place)
    own = started(*resnet18, "model.weights=imagenet").state_dict()
    assert torch.equal(own["layer4.1.conv2.weight"], whole["layer4.1.conv2.weight"])
    assert "conv1.weight is adapted from 3 to 1 channels" in caplog.text
    torch.testing.assert_close(own["conv1.weight"], whole["conv1.weight"].sum(1, keepdim=True))
    more = started(*resnet18, "model.weights=imagenet", in_channels=5).state_dict()["conv1.weight"]
    torch.testing.assert_close(more.sum(1), whole["conv1.weight"].sum(1))
    torch.testing.assert_close(more, more[:, :1].expand_as(more))


SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in rows("train_fsdp.py")]


@pytest.mark.parametrize("script", ["train.py", *SLOW])
def test_the_head_learns_alone_for_ever_or_in_the_first_epoch(script, saved, tmp_path) -> None:
    """Also after a resume. Epochs have five steps. A backbone keeps BatchNorm's statistics, too."""
    path, before = saved
    parameters = dict(started().named_parameters()).keys()
    head = {name for name in parameters if name.startswith("classifier")}
    first = ["model.freeze=statistics", "optimizer.head_epochs=1"]
    table: list[tuple[str, list[str], dict[int, Any]]] = [
        ("for ever", ["model.freeze=backbone"], {4: head}),
        ("first", first, {3: head, 5: head, 6: parameters}),
    ]
    for name, options, changes in table:
        options = [*SHORT, "epochs=2", "global_batch_size=2000", "resume=auto", *options]
        weights = f"model.weights={path}"
        for num_steps, expected in changes.items():
            more = [weights, f"max_steps={num_steps}"]
            text = train(script, tmp_path / name, *options, *more)
            assert ("14 of 14 parameter tensors are loaded" in text) == (str(path) in weights)
            after = checkpoint_of(tmp_path / name)["model"]
            changed = {name for name in after if not torch.equal(after[name], before[name])}
            assert changed == expected, num_steps
            weights = "model.weights=nothing"  # not read by a run that goes on


def test_a_head_for_other_classes_starts_at_zero_although_its_size_fits(tmp_path, caplog) -> None:
    """A head of another size does, too. Two lines say so."""
    first, others = (make_photos(tmp_path / name, 12) for name in ("first photos", "others"))
    (others / "c").rename(others / "d")
    options = [*SHORT, "data.val_count=3"]
    train("train.py", tmp_path / "run", *photos_in(first, *options, "max_steps=2"))
    saved = checkpoint_of(tmp_path / "run")["model"]
    caplog.set_level(logging.INFO)
    for root, num_classes, count in ((first, 3, 14), (others, 3, 12), (first, 4, 12)):
        caplog.clear()
        cfg = make_config(*photos_in(root, *options, f"model.weights={tmp_path / 'run'}"))
        loader, _ = build_loaders(cfg, torch.device("cpu"))
        model = build_model(cfg.model, 3, num_classes)
        start_from_weights(cfg, model, loader, ProcessGroup())
        loaded, *fresh = [line for line in caplog.messages if "model.weights" in line]
        assert loaded.endswith(f"{count} of 14 parameter tensors are loaded")
        for name, value in model.state_dict().items():
            is_fresh = count == 12 and name.startswith("classifier")
            assert torch.equal(value, saved[name]) != is_fresh, name
        if count == 12:
            assert not model.state_dict()["classifier.weight"].any()
            names = f"classifier.weight ({num_classes}x64), classifier.bias ({num_classes})"
            assert fresh[0].endswith(names)
