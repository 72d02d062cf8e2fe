"""Each experiment of the write-ups learns something from data that the generator made."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.generate import generate
from tests.processes import train
from tests.results import scalars_of

# name -> number of images, how they are made, and the overrides of a short run
EXPERIMENTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "caltech256": (
        *(24, {"num_classes": 2}),
        "model=small_cnn optimizer=adamw optimizer.lr=0.01 data.resize=48 data.crop=40 "
        "data.val_fraction=0.25",
    ),
    "cells": (
        *(140, {}),
        "data.resize=null data.crop=null data.val_fraction=0.2 model.kwargs.width=16",
    ),
    "deblur": (
        *(18, {"height": 72, "width": 96}),
        "data.crop=[32,32] model.kwargs.width=4 optimizer.lr=0.003",
    ),
    "lowlight": (
        *(20, {"height": 48, "width": 64}),
        "data.resize=[32,32] data.val_fraction=0.2 model.kwargs.width=4 optimizer.lr=0.003",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_learns_from_data_of_the_generator(name: str, tmp_path: Path) -> None:
    size, kind, options = EXPERIMENTS[name]
    root = tmp_path / name
    generate(name, root / "256_ObjectCategories" if name == "caltech256" else root, size, **kind)
    overrides = [f"experiment={name}", f"data.cache_dir={tmp_path / 'cache'}", *options.split()]
    overrides += [f"data.root={tmp_path if name == 'caltech256' else root}", "epochs=5"]
    overrides += ["global_batch_size=8", "optimizer.warmup_epochs=0", "log.images=0"]
    train("train.py", tmp_path / "run", *overrides)
    losses = [loss for _, loss in scalars_of(tmp_path / "run", "val/loss")]
    assert min(losses) < 0.9 * losses[0]
