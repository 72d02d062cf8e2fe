"""Normalisation, threads, CPUs."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from loaders.backends import default_workers
from loaders.common import cpus_per_rank
from tests.helpers import workers_of
from tests.images import loaders_of, make_photos, reading
from tests.test_runtime import Operations


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


def test_a_jpeg_takes_few_calls_in_which_other_threads_go_on(tmp_path) -> None:
    """To open, check, read and close the file, resize in two parts and flip; to decode and fill in:
    after each, a thread waits for the interpreter's lock behind all the others."""
    few = ["loader.num_threads=1", "data.resize=null", "global_batch_size=8"]
    data = ["data=imagefolder", *reading(make_photos(tmp_path / "photos", 40)), "data.crop=24"]
    loader, _ = loaders_of(*data, "data.random_resized_crop=[0.2,1]", *few)
    dataset: Any = loader.dataset  # type: ignore[attr-defined]
    rows = loader.sampler.plan(np.arange(32))
    rows["hflip"] = True
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__module__ == "posix":
            calls[function.__name__] += 1

    with Operations() as operations:
        dataset.load(rows)
        operations.num_calls = 0
        sys.setprofile(note)
        try:
            dataset.load(rows)
        finally:
            sys.setprofile(None)
    of_system = calls.total() - calls["fspath"]  # which calls nobody
    per_batch = 8  # what is done to the whole batch
    assert of_system + operations.num_calls <= 7 * len(rows) + per_batch, calls


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
