"""`loader.num_workers=auto`: the number of workers and threads that a short measurement finds fastest."""

import copy
import gc
import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from loaders.base import Loader, cpus_per_rank
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

WINDOW_S = 0.4
ROUNDS = 5
TRIAL_ROUNDS = 2
CLEARLY = 1.25
"""How much faster the fastest must be after the trial rounds to rule a setting out."""

WORTHWHILE = 1.03
"""How much faster a larger number of workers or threads has to be."""

Setting = tuple[int, int]
"""Worker processes, and threads in each of them or, without any, in the training process."""


def with_fastest_parallelism(
    cfg: "Config",
    backend: type[Loader],
    new_sampler: Callable[[], PlanSampler],
    device: torch.device,
) -> "Config":
    """A copy of the configuration with numbers in place of `loader.num_workers=auto`.

    The answer is kept in `data.cache_dir`, for this machine, data set and batch size. All ranks measure
    at the same time, because they share the machine, and get the same answer.
    """
    cfg = copy.deepcopy(cfg)
    if cfg.loader.name == "synthetic":
        cfg.loader.num_workers = 0
        return cfg
    kept = Path(cfg.data.cache_dir) / "parallelism.json"
    sampler = new_sampler()
    key = _key(cfg, sampler, device)
    found: Setting | None = _agree(_read(kept).get(key))
    if found is None:
        settings = candidates(cfg, cpus_per_rank())
        speeds = _measure(settings, cfg, backend, new_sampler, device)
        found = _agree(fastest(speeds))
        if sampler.rank == 0:
            _write(kept, key, found)
        told = ", ".join(f"{_name(*setting)} {speed:.0f}" for setting, speed in speeds.items())
        log.info("loader.num_workers=auto: images/s by setting: %s", told)
    log.info("loader.num_workers=auto: %s (kept in %s)", _name(*found), kept)
    cfg.loader.num_workers, cfg.loader.num_threads = found
    return cfg


def candidates(cfg: "Config", num_cpus: int) -> list[Setting]:
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
    cfg: "Config",
    backend: type[Loader],
    new_sampler: Callable[[], PlanSampler],
    device: torch.device,
) -> dict[Setting, float]:
    """Images per second of all ranks together: of each setting the median over its rounds."""
    # The DataLoader draws from torch's generator, on which the initial weights depend.
    with torch.random.fork_rng(devices=[]):
        endless = {}
        # Processes first: they are forked, which should not happen beside running threads.
        for setting in sorted(settings, reverse=True):
            tried = copy.deepcopy(cfg)
            tried.loader.num_workers, tried.loader.num_threads = setting
            endless[setting] = _endless(backend(new_sampler(), tried, device))
            next(endless[setting])
        samples: dict[Setting, list[float]] = {setting: [] for setting in endless}
        for number in range(ROUNDS):
            if number == TRIAL_ROUNDS:
                speeds = _medians(samples)
                slow = [s for s in endless if speeds[s] * CLEARLY < max(speeds.values())]
                for setting in slow:
                    del endless[setting]
            for setting, batches in endless.items():
                # What was prepared ahead while others were timed does not count.
                ahead = cfg.loader.prefetch_factor * max(1, setting[0])
                _speed(
                    batches, 0.0, least=ahead + cfg.loader.prefetch_queue_depth + 1, device=device
                )
                if dist.is_initialized():
                    dist.barrier()
                samples[setting].append(_speed(batches, WINDOW_S, least=2, device=device))
        del batches
        endless.clear()
        gc.collect()  # ends the workers
    return _medians(samples)


def _medians(samples: dict[Setting, list[float]]) -> dict[Setting, float]:
    """Of each setting, the sum over all ranks of their medians."""
    total = torch.tensor([statistics.median(values) for values in samples.values()])
    if dist.is_initialized():
        dist.all_reduce(total)
    return dict(zip(samples, total.tolist(), strict=True))


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


def _agree(answer: Any) -> Any:
    """The answer of rank 0, on every rank."""
    if not dist.is_initialized():
        return answer
    answers = [answer]
    dist.broadcast_object_list(answers, src=0)
    return answers[0]


def _key(cfg: "Config", sampler: PlanSampler, device: torch.device) -> str:
    """What the answer depends on: the machine, the data and what is done with it."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    facts = {
        "machine": [platform.node(), cpus_per_rank(), gpu],
        "loader": [cfg.loader.name, cfg.loader.num_threads, cfg.loader.prefetch_factor],
        "batch": [sampler.global_batch_size, sampler.num_replicas],
        "plan": sampler.description() | {"seed": ""},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _name(num_workers: int, num_threads: int) -> str:
    threads = f"loader.num_threads={num_threads}"
    return f"loader.num_workers={num_workers} {threads}" if num_workers else threads


def _read(path: Path) -> dict[str, Setting]:
    try:
        return {
            key: (setting[0], setting[1]) for key, setting in json.loads(path.read_text()).items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # it is measured again


def _write(path: Path, key: str, setting: Setting) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(_read(path) | {key: setting}, indent=2) + "\n")
    temporary.replace(path)
