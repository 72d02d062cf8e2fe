"""Normalisation, threads, worker processes, CPUs."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from loaders.backends import build_loaders, default_workers
from loaders.common import cpus_per_rank
from runtime.setup import resolve_device
from tests.helpers import DEVICES, Operations, make_config, workers_of
from tests.images import FOLDERS, loaders_of, make_photos, reading
from tests.parts import rows_of


def test_inputs_are_normalised_with_mean_and_std() -> None:
    loader, _ = loaders_of("global_batch_size=1000")
    inputs, _ = next(iter(loader))
    assert abs(inputs.mean()) < 0.05
    assert abs(inputs.std() - 1) < 0.05
    pictures: Any = loader.info.pictures(inputs)
    assert 0 <= pictures.min() < 1e-3
    assert 0.99 < pictures.max() <= 1


def test_the_training_keeps_its_number_of_threads() -> None:
    """Otherwise a fresh run trains with one; a resumed one, which loads large tensors, with all."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)

    def train() -> int:  # in a thread that has not computed anything yet
        loader, _ = loaders_of()
        next(iter(loader))
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(train).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_jpeg_takes_few_operations(tmp_path) -> None:
    """To resize in two parts, flip and fill in: after each, a thread waits for the interpreter's
    lock behind all the others."""
    options = [*FOLDERS, *reading(make_photos(tmp_path / "photos", 40)), "data.crop=24"]
    options += ["data.random_resized_crop=[0.2,1]", "data.resize=null", "data.hflip=1"]
    loader: Any = loaders_of(*options, "loader.num_threads=1", "global_batch_size=32")[0]
    with Operations() as operations:  # it counts those of this thread
        loader.dataset.load(loader.sampler.plan(np.arange(32)))
    per_batch = 8  # what is done to the whole batch
    assert operations.num_calls <= 3 * 32 + per_batch


@pytest.mark.parametrize(
    ("mine", "torchruns", "ranks", "limit", "cpus"),
    [
        (64, 64, 1, "max 100000", 64),
        (8, 64, 8, None, 8),  # torchrun --numa-binding=exclusive
        (8, 64, 8, "1600000 100000", 2),
        (64, 64, 1, "150000 100000", 1),
    ],
)
def test_ranks_share_cpus(mine, torchruns, ranks, limit, cpus, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    of_process = {0: set(range(mine)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", of_process.__getitem__)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cpus_per_rank(tmp_path) == cpus


def test_a_gpu_has_worker_processes() -> None:
    """One per CPU but one, and one per 64 samples; with threads, one per so many CPUs."""
    cpus, cuda, cpu = cpus_per_rank(), torch.device("cuda"), torch.device("cpu")
    assert default_workers(cuda, 10**9, 0) == default_workers(cuda, 10**9, 1) == cpus - 1
    assert default_workers(cuda, 64, 0) == min(1, cpus - 1)
    assert default_workers(cuda, 10**9, 2) == (cpus - 1) // 2
    assert default_workers(cpu, 10**9, 0) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loader", ["pytorch", *dict(rows_of("WAYS"))])
def test_with_num_workers_auto_the_fastest_setting_is_chosen(
    loader: str, device: str, caplog
) -> None:
    """Every speed is logged, and the batches of a rank stay as they are."""
    options = ["loader.num_threads=1", f"loader={loader}", "data.random_crop=true"]
    cfg = make_config("loader.num_workers=auto", *options)
    with caplog.at_level(logging.INFO):
        measured, _ = build_loaders(cfg, resolve_device(device), 1, 2)
    fixed, _ = build_loaders(make_config(*options), resolve_device(device), 1, 2)
    for batch, other in zip(measured, fixed, strict=True):
        assert all(map(torch.equal, batch, other))
    chosen = measured.cfg.loader
    assert cfg.loader.num_workers == "auto"  # what the user gave stays as it is
    speeds = caplog.text.partition("samples/s by setting: ")[2].split(", ")
    with_workers = {"loader.num_workers=" in speed for speed in speeds}
    assert with_workers == ({False, True} if loader == "pytorch" else {False})
    images_per_s = {name: int(speed) for name, _, speed in (s.rpartition(" ") for s in speeds)}
    name = f"loader.num_workers={chosen.num_workers} " if chosen.num_workers else ""
    # A little less with fewer workers is as good.
    assert images_per_s[f"{name}loader.num_threads=1"] >= 0.96 * max(images_per_s.values())


def test_worker_processes_share_batches_and_mix_none_up() -> None:
    """Also after an epoch was left early, and with more batches than fit into their memory. They
    have little memory of their own."""
    options = ["data.random_resized_crop=[0.5,1]", "data.hflip=0.5", "global_batch_size=160"]
    threads, _ = loaders_of(*options)
    workers, _ = loaders_of(*options, "loader.num_workers=2", "loader.prefetch_factor=1")
    next(iter(workers))
    for loader in (threads, workers):
        loader.set_epoch(1)
    assert len(workers) >= 20
    for batch, other in zip(threads, workers, strict=True):
        assert all(map(torch.equal, batch, other))
    processes = workers_of(psutil.Process())
    assert len(processes) >= 2
    assert max(process.memory_full_info().uss for process in processes) < 150e6
