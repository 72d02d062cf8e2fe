"""Each experiment of the write-ups learns something from data that the generator made."""

from pathlib import Path

import torch

from benchmarks.generate import generate
from loaders import build_loaders
from tasks import build_task
from tests.helpers import make_config, summary_of, train


def learn(name: str, root: Path, *overrides: str) -> tuple[dict, list[str]]:
    """Summary of a short run, and the overrides it was made with."""
    options = [f"experiment={name}", f"data.root={root}", f"data.cache_dir={root.parent / 'cache'}"]
    options += overrides
    train("train.py", root.parent / "run", *options)
    return summary_of(root.parent / "run"), options


def test_caltech256_beats_chance(tmp_path: Path) -> None:
    """4 classes: chance is 0.25."""
    root = tmp_path / "caltech256" / "256_ObjectCategories"
    generate("caltech256", root, 120, num_classes=4)
    summary, _ = learn(
        "caltech256",
        root.parent,
        "data.root=" + str(tmp_path),
        "model=small_cnn",
        "optimizer=adamw",
        "data.resize=64",
        "data.crop=[56,56]",
        "data.val_fraction=0.25",
        "epochs=6",
        "global_batch_size=15",
        "model.channels_last=true",
    )
    assert summary["val/top1"] > 0.25 + 0.25


def test_cells_beat_chance(tmp_path: Path) -> None:
    """7 classes: chance is 0.14."""
    generate("cells", tmp_path / "cells", 420)
    summary, _ = learn(
        "cells",
        tmp_path / "cells",
        "data.resize=null",
        "data.crop=null",
        "data.val_fraction=0.2",
        "epochs=8",
        "global_batch_size=32",
    )
    assert summary["val/top1"] > 0.14 + 0.4


def metrics_of_unchanged_input(options: list[str]) -> dict[str, float]:
    cfg = make_config(*options)
    _, val_loader = build_loaders(cfg, torch.device("cpu"))
    task = build_task(cfg, val_loader)
    totals = sum(task.sums(inputs, targets) for inputs, targets in val_loader)
    assert isinstance(totals, torch.Tensor)
    return task.metrics(totals)


def test_deblurring_improves_the_image(tmp_path: Path) -> None:
    generate("deblur", tmp_path / "deblur", 36, height=120, width=160)
    summary, options = learn(
        "deblur",
        tmp_path / "deblur",
        "data.crop=[64,64]",
        "epochs=30",
        "global_batch_size=8",
        "model.kwargs.width=8",
        "optimizer.lr=0.003",
    )
    assert summary["val/psnr"] > metrics_of_unchanged_input(options)["psnr"] + 0.3


def test_low_light_enhancement_improves_the_image(tmp_path: Path) -> None:
    generate("lowlight", tmp_path / "lowlight", 60, height=96, width=128)
    summary, options = learn(
        "lowlight",
        tmp_path / "lowlight",
        "data.resize=[48,48]",
        "data.val_fraction=0.2",
        "epochs=12",
        "global_batch_size=8",
        "model.kwargs.width=8",
        "optimizer.lr=0.003",
        "optimizer.warmup_epochs=0.5",
    )
    unchanged = metrics_of_unchanged_input(options)
    assert summary["val/psnr"] > unchanged["psnr"] + 3
    assert 1 > summary["val/ssim"] > unchanged["ssim"] + 0.05
