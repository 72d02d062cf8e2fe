"""Each experiment of the write-ups learns something from data that the generator made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.generate import generate
from loaders import build_loaders
from tasks import build_task
from tests.helpers import make_config, summary_of, train

# name -> number of images, how they are made, and the overrides of a short run
EXPERIMENTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "caltech256": (
        *(120, {"num_classes": 4}),
        "model=small_cnn optimizer=adamw model.channels_last=true data.resize=64 data.crop=[56,56] "
        "data.val_fraction=0.25 epochs=6 global_batch_size=15",
    ),
    "cells": (
        *(420, {}),
        "data.resize=null data.crop=null data.val_fraction=0.2 epochs=8 global_batch_size=32",
    ),
    "deblur": (
        *(36, {"height": 120, "width": 160}),
        "data.crop=[64,64] epochs=30 global_batch_size=8 model.kwargs.width=8 optimizer.lr=0.003",
    ),
    "lowlight": (
        *(60, {"height": 96, "width": 128}),
        "data.resize=[48,48] data.val_fraction=0.2 epochs=12 optimizer.warmup_epochs=0.5 "
        "global_batch_size=8 model.kwargs.width=8 optimizer.lr=0.003",
    ),
}


def learn(name: str, folder: Path) -> tuple[dict, list[str]]:
    """Summary of a short run, and the overrides it was made with."""
    count, kind, options = EXPERIMENTS[name]
    root = folder / name
    generate(name, root / "256_ObjectCategories" if name == "caltech256" else root, count, **kind)
    overrides = [f"experiment={name}", f"data.cache_dir={folder / 'cache'}", *options.split()]
    overrides.append(f"data.root={folder if name == 'caltech256' else root}")
    train("train.py", folder / "run", *overrides)
    return summary_of(folder / "run"), overrides


@pytest.mark.parametrize(("name", "least"), [("caltech256", 1 / 4 + 0.25), ("cells", 1 / 7 + 0.4)])
def test_a_classifier_beats_chance(name: str, least: float, tmp_path: Path) -> None:
    assert learn(name, tmp_path)[0]["val/top1"] > least


@pytest.mark.parametrize(("name", "psnr", "ssim"), [("deblur", 0.3, -1), ("lowlight", 3, 0.05)])
def test_a_restorer_improves_the_image(name: str, psnr: float, ssim: float, tmp_path: Path) -> None:
    summary, overrides = learn(name, tmp_path)
    cfg = make_config(*overrides)
    _, val_loader = build_loaders(cfg, torch.device("cpu"))
    task = build_task(cfg, val_loader)
    totals = sum(task.sums(inputs, targets) for inputs, targets in val_loader)
    assert isinstance(totals, torch.Tensor)
    unchanged = task.metrics(totals)
    assert summary["val/psnr"] > unchanged["psnr"] + psnr
    assert 1 > summary["val/ssim"] > unchanged["ssim"] + ssim
