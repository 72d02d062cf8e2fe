"""Normalisation, threads, worker processes, CPUs."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from loaders.limits import cpus_per_rank
from loaders.workers import default_workers
from tests.images import loaders_of
from tests.processes import workers_of


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


@pytest.mark.parametrize(
    ("mine", "torchruns", "ranks", "limit", "cpus"),
    [
        (64, 64, 1, "max 100000", 64),
        (8, 64, 8, None, 8),  # torchrun --numa-binding=exclusive
        (8, 64, 8, "1600000 100000", 2),
        (64, 64, 1, "150000 100000", 1),
    ],
)
def test_ranks_share_cpus_and_a_gpu_has_workers_for_all_but_one(
    mine, torchruns, ranks, limit, cpus, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    of_process = {0: set(range(mine)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", of_process.__getitem__)
    if limit:
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert cpus_per_rank(tmp_path) == cpus
    most = cpus_per_rank() - 1
    for device, num_samples, num_threads, count in (
        ("cuda", 10**9, 0, most),
        ("cuda", 10**9, 2, most // 2),
        ("cuda", 64, 0, min(1, most)),
        ("cuda", 0, 0, 0),  # pixels in memory
        ("cpu", 10**9, 0, 0),
    ):
        assert default_workers(torch.device(device), num_samples, num_threads) == count


def test_worker_processes_load_what_threads_load(tmp_path) -> None:
    """Also after an epoch was left early. They have little memory of their own."""
    options = [
        f"data.cache_dir={tmp_path}",
        "data.random_resized_crop=[0.5,1]",
        "data.hflip=0.5",
        "global_batch_size=160",
    ]
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
