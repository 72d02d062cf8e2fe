"""`loader.num_workers=auto`: choose the numbers of workers and threads by a short measurement."""

import copy
import gc
import logging
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from conf.schema import Config
from loaders.backends.common.loader import ImageLoader
from loaders.common import cpus_per_rank
from loaders.plan import PlanSampler

log = logging.getLogger(__name__)

WINDOW_S = 1.0
OPERATIONS = 1000
"""Operations of a simulated training step, about those of ResNet-50 and its optimizer on a GPU."""
WORTHWHILE = 1.03
"""Minimum speed-up for which a larger number of workers or threads is chosen."""

Setting = tuple[int, int]
"""Number of worker processes, and of threads in each of them, or in this process if it is 0."""


def with_fastest_parallelism(
    cfg: Config,
    new_loader: Callable[[PlanSampler, Config, torch.device], ImageLoader],
    new_sampler: Callable[[], PlanSampler],
    device: torch.device,
) -> Config:
    """Copy the configuration, with numbers in place of `loader.num_workers=auto`.

    Each rank measures at about the same time as the other ranks of its machine, with which it
    shares the CPUs. Between two batches it starts as many operations as a training step does, since
    threads that load compete with it for Python's interpreter lock and worker processes do not.
    The choice does not change the batches.
    """
    cfg = copy.deepcopy(cfg)
    if cfg.loader.name == "synthetic":
        cfg.loader.num_workers = 0
        return cfg
    speeds = {}
    for setting in _candidates(cfg, cpus_per_rank()):
        cfg.loader.num_workers, cfg.loader.num_threads = setting
        speeds[setting] = _images_per_s(new_loader(new_sampler(), copy.deepcopy(cfg), device))
        gc.collect()  # ends its workers
    best = max(speeds.values())
    chosen = next(s for s, speed in sorted(speeds.items()) if speed * WORTHWHILE >= best)
    shown = ", ".join(f"{_name(*setting)} {speed:.0f}" for setting, speed in speeds.items())
    log.info("loader.num_workers=auto: %s; images/s by setting: %s", _name(*chosen), shown)
    cfg.loader.num_workers, cfg.loader.num_threads = chosen
    return cfg


def _candidates(cfg: Config, num_cpus: int) -> list[Setting]:
    """Return the settings to try on `num_cpus` CPUs; a given `loader.num_threads` is kept."""
    counts = sorted({min(2**power, num_cpus) for power in range(num_cpus.bit_length() + 1)})
    given = cfg.loader.num_threads
    settings = [(0, n) for n in ([given] if given else counts)]
    if not cfg.loader.name.startswith("dali"):  # which has no worker processes
        settings += [(n, given or num_cpus // n) for n in counts]
    return settings


def _images_per_s(loader: ImageLoader) -> float:
    """Measure images per second over `WINDOW_S` and at least two batches."""
    batches, options = _endless(loader), loader.cfg.loader
    # Batches that were prefetched before the measurement do not count.
    ahead = options.prefetch_factor * max(1, int(options.num_workers))
    for _ in range(ahead + 4):
        next(batches)
    counter = torch.zeros((), device=loader.device)
    start, images, drawn = time.perf_counter(), 0, 0
    while drawn < 2 or time.perf_counter() - start < WINDOW_S:
        images += len(next(batches)[0])
        drawn += 1
        for _ in range(OPERATIONS):
            counter.add_(1)
    if loader.device.type == "cuda":
        torch.cuda.synchronize(loader.device)
    return images / (time.perf_counter() - start)


def _endless(loader: ImageLoader) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def _name(num_workers: int, num_threads: int) -> str:
    threads = f"loader.num_threads={num_threads}"
    return f"loader.num_workers={num_workers} {threads}" if num_workers else threads
