"""The numbers of worker processes and threads: the default ones, and (`auto`) the fastest ones."""

import copy
import gc
import logging
import time
from collections.abc import Callable

import torch

from conf.schema import Config
from loaders.backends.common.loader import ImageLoader
from loaders.common import cpus_per_rank

log = logging.getLogger(__name__)

MIN_ROWS = 64
"""Rows that a worker loads at once, or more: each time costs the training process about 0.1 ms."""
WINDOW_S = 1.0
OPERATIONS = 1000
"""Operations of a simulated training step, about those of ResNet-50 and its optimizer on a GPU."""
WORTHWHILE = 1.03
"""Minimum speed-up for which a larger number of workers or threads is chosen."""


def default_workers(device: torch.device, num_samples: int, num_threads: int) -> int:
    """Return the number of worker processes where `loader.num_workers` is null.

    On a GPU there is one per CPU but one (per `num_threads` CPUs), for 64 samples or more: threads
    of the training process would hold up the one that launches kernels, since each call passes
    Python's interpreter lock around. On a CPU, which has no kernels to launch, there is none.
    """
    if device.type != "cuda":
        return 0
    return min((cpus_per_rank() - 1) // (num_threads or 1), -(-num_samples // MIN_ROWS))


def with_fastest_parallelism(cfg: Config, new_loader: Callable[[Config], ImageLoader]) -> Config:
    """Copy the configuration, with numbers in place of `loader.num_workers=auto`.

    Each rank measures at about the same time as the other ranks of its machine, with which it
    shares the CPUs. The choice does not change the batches.
    """
    cfg = copy.deepcopy(cfg)
    options, speeds = cfg.loader, {}
    counts = sorted({min(2**n, cpus_per_rank()) for n in range(cpus_per_rank().bit_length() + 1)})
    given = options.num_threads
    settings = [(0, n) for n in ([given] if given else counts)]
    if not options.name.startswith("dali"):  # which has no worker processes
        settings += [(n, given or cpus_per_rank() // n) for n in counts]
    for setting in settings:
        options.num_workers, options.num_threads = setting
        speeds[setting] = _images_per_s(new_loader(copy.deepcopy(cfg)))
        gc.collect()  # ends its workers
    chosen = min(s for s, speed in speeds.items() if speed * WORTHWHILE >= max(speeds.values()))
    shown = ", ".join(f"{_name(*setting)} {speed:.0f}" for setting, speed in speeds.items())
    log.info("loader.num_workers=auto: %s; samples/s by setting: %s", _name(*chosen), shown)
    options.num_workers, options.num_threads = chosen
    return cfg


def _name(num_workers: int, num_threads: int) -> str:
    threads = f"loader.num_threads={num_threads}"
    return f"loader.num_workers={num_workers} {threads}" if num_workers else threads


def _images_per_s(loader: ImageLoader) -> float:
    """Measure images per second over `WINDOW_S` and at least two batches.

    Between two batches it starts as many operations as a training step does, since threads that
    load compete with it for Python's interpreter lock and worker processes do not.
    """
    counter, options = torch.zeros((), device=loader.device), loader.cfg.loader
    # Batches that were prefetched before the measurement do not count.
    num_unmeasured = options.prefetch_factor * max(1, options.num_workers) + 4
    num_batches = images = 0
    start = time.perf_counter()
    while True:
        loader.set_epoch(loader.epoch + 1)
        for inputs, _ in loader:
            num_batches += 1
            if num_batches <= num_unmeasured:
                start = time.perf_counter()
                continue
            images += len(inputs)
            for _ in range(OPERATIONS):
                counter.add_(1)
            if num_batches >= num_unmeasured + 2 and time.perf_counter() - start > WINDOW_S:
                if loader.device.type == "cuda":
                    torch.cuda.synchronize(loader.device)
                return images / (time.perf_counter() - start)
