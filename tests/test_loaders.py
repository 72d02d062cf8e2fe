"""Loaders: threads, processes, normalisation, refused values."""

import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from loaders.image_loaders import build_loaders
from loaders.limits import cpus_per_rank
from tests.helpers import REPOSITORY, make_config
from tests.images import make_photos, opening, reading, save_tiff

CPU = torch.device("cpu")


def test_inputs_are_normalised_with_mean_and_std() -> None:
    loader, _ = build_loaders(make_config("global_batch_size=1000"), CPU)
    inputs, _ = next(iter(loader))
    assert abs(inputs.mean()) < 0.05
    assert abs(inputs.std() - 1) < 0.05
    pictures: Any = loader.info.pictures(inputs)
    assert 0 <= pictures.min() < 1e-3
    assert 0.99 < pictures.max() <= 1


# part: ranks
@pytest.mark.parametrize(("size", "fix"), [(100, "99 or 102"), (2, "use 3")])
def test_a_batch_that_ranks_cannot_share_is_refused(size: int, fix: str) -> None:
    with pytest.raises(UserError, match=f"global_batch_size={size} .*world_size=3.*{fix}"):
        build_loaders(make_config(f"global_batch_size={size}"), CPU, 0, 3)


def test_the_training_keeps_its_number_of_threads() -> None:
    """Otherwise a fresh run trains with one; a resumed one, which loads large tensors, with all."""
    loader, _ = build_loaders(make_config(), CPU)
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def train() -> int:  # in a thread that has not computed anything yet
        next(iter(loader))
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(train).result() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_stop_when_an_epoch_is_left(tmp_path: Path) -> None:
    options = ["data=imagefolder", *reading(make_photos(tmp_path / "photos", 100))]
    options += ["data.resize=null", "data.crop=40", "global_batch_size=2"]
    options += ["loader.prefetch_factor=300", "loader.num_threads=2"]
    loader, _ = build_loaders(make_config(*options), CPU)
    read: list[str] = []

    def listen(path: str) -> None:
        if path.endswith(".jpg"):
            read.append(path)
            time.sleep(0.05)

    with opening(listen):
        batches = iter(loader)
        next(batches)
        del batches  # ends the epoch
        gc.collect()
        number_when_left = len(read)
        time.sleep(0.2)
    assert len(read) <= number_when_left + 2  # each thread ends the image that it has begun
    assert number_when_left < 50


def test_a_program_may_end_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Python aborts if it ends while a thread computes with torch."""
    folder = tmp_path / "t" / "a"
    save_tiff(folder / "0.tif", np.zeros((1000, 1000, 5), np.uint8))
    for number in range(1, 20):
        (folder / f"{number}.tif").symlink_to(folder / "0.tif")
    options = ["data=cells", f"data.root={tmp_path / 't'}", f"data.cache_dir={tmp_path}"]
    options += ["data.crop=[990,990]", "data.mean=null", "data.std=null", "data.val_fraction=0.1"]
    options += ["data.resize=null", "global_batch_size=2", "loader.prefetch_factor=50"]
    program = f"""
import sys, torch
from conf.cli import load_config
from loaders.image_loaders import build_loaders

loader, _ = build_loaders(load_config({options}), torch.device("cpu"))
sys.kept = [iter(loader) for _ in range(3)]
for batches in sys.kept:
    next(batches)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("mine", "torchruns", "num_ranks", "limit", "expected"),
    [
        (64, 64, 1, None, 64),
        (8, 64, 8, None, 8),  # torchrun --numa-binding=exclusive
        (32, 64, 8, None, 8),  # --numa-binding=node, with 4 ranks on each of two nodes
        (64, 64, 8, "max 100000", 8),
        (8, 64, 8, "1600000 100000", 2),
        (64, 64, 1, "150000 100000", 1),
        (2, 2, 8, None, 1),
    ],
)
def test_the_cpus_of_a_machine_are_shared_by_its_ranks(
    mine: int, torchruns: int, num_ranks: int, limit, expected: int, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    of_process = {0: set(range(mine)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", of_process.__getitem__)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cpus_per_rank(tmp_path) == expected
