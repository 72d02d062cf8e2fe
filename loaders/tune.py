"""`loader.num_workers=auto`: the number of workers and threads that a short measurement finds fastest."""

import copy
import gc
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from conf.schema import Config
from loaders.limits import cpus_per_rank
from loaders.loader import Loader
from loaders.sampler import PlanSampler

log = logging.getLogger(__name__)

WINDOW_S = 0.4
ROUNDS = 3
WORTHWHILE = 1.03
"""How much faster a larger number of workers or threads has to be."""

Setting = tuple[int, int]
"""Worker processes, and threads in each of them or, without any, in the training process."""


def with_fastest_parallelism(
    cfg: Config,
    backend: type[Loader],
    new_sampler: Callable[[], PlanSampler],
    device: torch.device,
) -> Config:
    """A copy of the configuration with numbers in place of `loader.num_workers=auto`.

    The answer is kept in `data.cache_dir`, for this machine, data set and batch size. Each rank measures
    for itself, at about the same time as the others, with which it shares the machine; what it chooses
    does not change its batches.
    """
    cfg = copy.deepcopy(cfg)
    if cfg.loader.name == "synthetic":
        cfg.loader.num_workers = 0
        return cfg
    kept = Path(cfg.data.cache_dir) / f"parallelism-{_key(cfg, new_sampler(), device)}.json"
    chosen = _read(kept)
    if chosen is None:
        speeds = _measure(candidates(cfg, cpus_per_rank()), cfg, backend, new_sampler, device)
        told = ", ".join(f"{_name(*setting)} {speed:.0f}" for setting, speed in speeds.items())
        log.info("loader.num_workers=auto: images/s by setting: %s", told)
        chosen = fastest(speeds)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            unfinished = kept.with_suffix(f".{os.getpid()}.tmp")  # several ranks may write at once
            unfinished.write_text(json.dumps(chosen))
            unfinished.replace(kept)
        except OSError as error:  # read-only or full: it is measured again next time
            log.warning("data.cache_dir=%s cannot be written to: %s", cfg.data.cache_dir, error)
    log.info("loader.num_workers=auto: %s (kept in %s)", _name(*chosen), kept)
    cfg.loader.num_workers, cfg.loader.num_threads = chosen
    return cfg


def candidates(cfg: Config, num_cpus: int) -> list[Setting]:
    """The settings to try on so many CPUs; where `loader.num_threads` is set, it stays."""
    counts = sorted({min(2**power, num_cpus) for power in range(num_cpus.bit_length() + 1)})
    threads = [cfg.loader.num_threads] if cfg.loader.num_threads else counts
    settings = [(0, n) for n in threads]
    if cfg.loader.name != "dali":  # which has no worker processes
        settings += [(n, cfg.loader.num_threads or num_cpus // n) for n in counts]
    return settings


def fastest(speeds: dict[Setting, float]) -> Setting:
    """The least parallel setting that is within `WORTHWHILE` of the fastest."""
    best = max(speeds.values())
    return next(setting for setting, speed in sorted(speeds.items()) if speed * WORTHWHILE >= best)


def _measure(
    settings: list[Setting],
    cfg: Config,
    backend: type[Loader],
    new_sampler: Callable[[], PlanSampler],
    device: torch.device,
) -> dict[Setting, float]:
    """Images per second: of each setting the median over its rounds."""
    # The DataLoader draws from torch's generator, on which the initial weights depend.
    with torch.random.fork_rng(devices=[]):
        endless = {}
        for setting in settings:
            tried = copy.deepcopy(cfg)
            tried.loader.num_workers, tried.loader.num_threads = setting
            endless[setting] = _endless(backend(new_sampler(), tried, device))
            next(endless[setting])
        samples: dict[Setting, list[float]] = {setting: [] for setting in endless}
        for _ in range(ROUNDS):
            for setting, batches in endless.items():
                # What was prepared ahead while others were timed does not count.
                ahead = cfg.loader.prefetch_factor * max(1, setting[0])
                ahead += cfg.loader.prefetch_queue_depth + 1
                _speed(batches, 0.0, ahead, device)
                samples[setting].append(_speed(batches, WINDOW_S, 2, device))
        del batches
        endless.clear()
        gc.collect()  # ends the workers
    return {setting: median(values) for setting, values in samples.items()}


def _endless(loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def _speed(
    batches: Iterator[tuple[Tensor, Tensor]], seconds: float, least: int, device: torch.device
) -> float:
    """Images per second of at least so many seconds and batches."""
    start = time.perf_counter()
    images = drawn = 0
    while drawn < least or time.perf_counter() - start < seconds:
        images += len(next(batches)[0])
        drawn += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return images / (time.perf_counter() - start)


def _key(cfg: Config, sampler: PlanSampler, device: torch.device) -> str:
    """What the answer depends on: the machine, the data and what is done with it."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    facts = {
        "machine": [platform.node(), cpus_per_rank(), gpu],
        "loader": [cfg.loader.name, cfg.loader.num_threads, cfg.loader.prefetch_factor],
        "batch": [sampler.global_batch_size, sampler.world_size],
        "plan": sampler.description() | {"seed": ""},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _name(num_workers: int, num_threads: int) -> str:
    threads = f"loader.num_threads={num_threads}"
    return f"loader.num_workers={num_workers} {threads}" if num_workers else threads


def _read(path: Path) -> Setting | None:
    try:
        num_workers, num_threads = json.loads(path.read_text())
        return int(num_workers), int(num_threads)
    except (OSError, ValueError, TypeError):
        return None  # it is measured
