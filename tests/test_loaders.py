"""Normalisation, threads, CPUs."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from loaders.limits import cpus_per_rank, default_workers
from tests.helpers import workers_of
from tests.images import loaders_of


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
    loader, _ = loaders_of()
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


@pytest.mark.parametrize(
    ("device", "num_cpus", "num_threads", "workers"),
    [
        *[("cuda", 16, 0, 15), ("cuda", 64, 0, 16), ("cuda", 16, 4, 3), ("cuda", 1, 0, 0)],
        ("cpu", 16, 0, 0),
    ],
)
def test_a_gpu_has_worker_processes(device, num_cpus, num_threads, workers, monkeypatch) -> None:
    """One per CPU but one, and one per 64 samples."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    assert default_workers(torch.device(device), 1000, num_threads) == workers


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
