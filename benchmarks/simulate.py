"""Simulation of many ranks from constants measured here, with a model that 2 to 8 real ranks check.

A step consists of the computation of the slowest rank, the all-reduce as far as it does not overlap
with computation, and waiting for data. An all-reduce of S bytes over N ranks takes 2 (N - 1)
messages of S / N bytes in a ring, or 2 log2(N) messages of S bytes in a tree, whichever is faster;
a message takes alpha + bytes / beta (Hockney 1994; Thakur et al. 2005). Ranks that share cores
share their time. Failures are exponentially distributed and lose the work since the last
checkpoint. The best interval between checkpoints is compared with sqrt(2 save MTBF) (Young 1974).
"""

import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.bottleneck import SYNTHETIC, train_on_devices
from benchmarks.interleave import CountItems, Workload, measure
from benchmarks.records import Subject, cores
from benchmarks.run import Run, count_batches, log
from benchmarks.step import on_ranks
from benchmarks.template import endless, make_config, parts
from conf.files import write_atomically
from loaders import build_loaders

EFFICIENCY, ERROR, FAILURES = "efficiency", "model's error", "failures and checkpoints"
MEASURED_RANKS, SIMULATED_RANKS = (2, 4, 8), (8, 64, 1024)
FITTED_RANKS = 4  # to which the constants of messages are fitted
KIB = (4, 256, 16384)
NUM_STEPS, NUM_FAILURES = 300, 20_000


@dataclass(frozen=True)
class Cluster:
    """Performance of a rank and of the shared resources, in seconds and bytes per second."""

    step_s: float  # median of a single rank
    jitter: Sequence[float]  # durations of steps divided by their median
    gradient_bytes: float
    alpha_s: float
    beta: float
    load_s: float  # a rank's loader for a batch, in parallel to the previous step
    batch_bytes: float  # stored size of a rank's batch
    save_s: float  # pause of training for a checkpoint
    write_s: float  # writing a checkpoint in the background; shortest interval
    has_trees: bool = True  # gloo has none
    hidden_s: float = 0.0  # overlap of the all-reduce with the backward pass
    cores: float = math.inf  # shared by all ranks
    storage: float = 20e9  # shared by all ranks; assumed
    restart_s: float = 15 + 30 + 15  # detect the failure, wait for a replacement, start the ranks
    # 419 failures in 54 days of 16,384 GPUs: "The Llama 3 Herd of Models", 2024, section 3.3.4
    mtbf_s: float = 16_384 * 54 * 86_400 / 419


GPU_STEP_S = 256 / 2470  # NVIDIA's images/s of an A100, ResNet-50 with AMP
GPUS = Cluster(
    step_s=GPU_STEP_S,
    jitter=np.random.default_rng(0).normal(1, 0.01, 2000).tolist(),  # assumed, as the next five
    alpha_s=10e-6,
    beta=50e9,  # 400 Gbit/s per GPU
    hidden_s=GPU_STEP_S / 2,
    save_s=0.5,
    write_s=5.0,
    gradient_bytes=4 * 25.6e6,
    load_s=256 / 7000,  # NVIDIA's images/s of nvJPEG on an A100
    batch_bytes=256 * 110e3,  # mean file size of ImageNet
)


def all_reduce_s(cluster: Cluster, count: int, num_bytes: float) -> float:
    """Seconds of an all-reduce of `num_bytes` over `count` ranks."""
    ring, tree = (2 * (count - 1), num_bytes / count), (2 * math.ceil(math.log2(count)), num_bytes)
    ways = (ring, tree) if cluster.has_trees else (ring,)
    return min(n * (cluster.alpha_s + size / cluster.beta) for n, size in ways) * max(
        1.0, count / cluster.cores
    )


def parts_of_step(cluster: Cluster, count: int) -> dict[str, float]:
    """Seconds of a step of `count` ranks, by part."""
    compute_s = cluster.step_s * max(1.0, count / cluster.cores)
    # Probability that each sorted step is the slowest rank's; at most one rank runs per core.
    chances = np.diff(np.linspace(0, 1, len(cluster.jitter) + 1) ** min(count, cluster.cores))
    found = {
        "compute": compute_s,
        "slowest rank": compute_s * (float(np.sort(cluster.jitter) @ chances) - 1),
        "all-reduce": max(
            0.0, all_reduce_s(cluster, count, cluster.gradient_bytes) - cluster.hidden_s
        ),
    }
    data_s = max(cluster.load_s, count * cluster.batch_bytes / cluster.storage)
    return found | {"data": max(0.0, data_s - sum(found.values()))}


def useful_share(cluster: Cluster, count: int, interval_s: float) -> float:
    """Share of the time that remains after checkpoints, failures and lost work; simulated."""
    alive_s = np.random.default_rng(0).exponential(cluster.mtbf_s / count, NUM_FAILURES)
    saved_s = np.floor(alive_s / (interval_s + cluster.save_s)) * interval_s
    return float(saved_s.sum() / (alive_s + cluster.restart_s).sum())


def young_s(cluster: Cluster, count: int) -> float:
    """Seconds between checkpoints by Young's formula."""
    return max(cluster.write_s, math.sqrt(2 * cluster.save_s * cluster.mtbf_s / count))


def best_interval_s(cluster: Cluster, count: int) -> float:
    """Seconds between checkpoints that give the largest useful share."""
    tried = young_s(cluster, count) * 2.0 ** np.arange(-3, 3.1, 0.25)
    return max(tried[tried >= cluster.write_s].tolist(), key=partial(useful_share, cluster, count))


def lost_shares(cluster: Cluster, count: int) -> dict[str, float]:
    """Share of the time that `count` ranks lose, by cause."""
    found = parts_of_step(cluster, count)
    lost = 1 - useful_share(cluster, count, best_interval_s(cluster, count))
    of_step = {
        part: value / sum(found.values()) for part, value in found.items() if part != "compute"
    }
    return of_step | {FAILURES: lost}


def main(run: Run) -> None:
    """Measure the constants on the CPU (gloo, a thread per rank), check the model, and simulate."""
    published = "ResNet-50 on GPUs, published and assumed constants"
    copied = f"{published}, each machine with a copy of the data"
    if run.is_done("simulate", copied, map(subject, SIMULATED_RANKS), EFFICIENCY):
        return
    workloads: dict[tuple[int, int], Workload] = {(0, 0): partial(load_batches, run)}
    for count in (1, *MEASURED_RANKS):
        workloads[count, 0] = partial(train_steps, run, count)
    for count, kib in itertools.product(MEASURED_RANKS, KIB):
        workloads[count, kib] = partial(on_ranks, partial(repeat_all_reduce, kib), count, "gloo")
    sizes = run.sizes
    log(f"simulate: {len(workloads)} subjects, in {sizes.repeats} rounds; the fastest round counts")
    speeds = measure(
        workloads, sizes.warmup_s, sizes.window_s, sizes.repeats, slice_s=sizes.window_s
    )
    seconds = {what: 1 / max(map(float, found)) for what, found in speeds.items()}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        alone = pool.apply(measure_one_rank, (run,))
    num_messages = 2 * (FITTED_RANKS - 1) * max(1.0, FITTED_RANKS / len(cores()))
    short, long = (
        (kib * 1024 / FITTED_RANKS, seconds[FITTED_RANKS, kib] / num_messages)
        for kib in (KIB[0], KIB[-1])
    )
    beta = (long[0] - short[0]) / max(long[1] - short[1], 1e-9)
    here = Cluster(
        step_s=seconds[1, 0],
        alpha_s=max(0.0, short[1] - short[0] / beta),
        beta=beta,
        load_s=seconds[0, 0] * make_config(*run.overrides).global_batch_size,
        has_trees=False,
        **alone,
    )
    log("\n".join(f"{name}: {np.max(value):.4g}" for name, value in vars(here).items()))
    shared = replace(here, cores=len(cores()), load_s=0.0)
    for count, kib in workloads:
        if count > 1:
            step_s = sum(parts_of_step(shared, count).values())
            model_s = all_reduce_s(shared, count, kib * 1024) if kib else step_s
            measured_s = seconds[count, kib]
            found = {("measured", "ms"): [1000 * measured_s], ("model", "ms"): [1000 * model_s]}
            found |= {(ERROR, "%"): [100 * (model_s / measured_s - 1)]}
            case = f"all-reduce of {kib} KiB" if kib else f"a step, {run.title}"
            run.record("simulate", case, subject(count), found)
    record_simulation(run, f"{run.title}, constants of this machine", here)
    record_simulation(run, published, GPUS)
    record_simulation(run, copied, replace(GPUS, storage=math.inf))


def subject(count: int) -> Subject:
    return Subject(f"{count:,} ranks")


def record_simulation(run: Run, case: str, cluster: Cluster) -> None:
    """Record results of many ranks; log the number of ranks at which each loss exceeds 10 %."""
    for count in SIMULATED_RANKS:
        step_s, interval_s = (
            sum(parts_of_step(cluster, count).values()),
            best_interval_s(cluster, count),
        )
        lost = lost_shares(cluster, count)
        efficiency = cluster.step_s / step_s * (1 - lost[FAILURES])
        found = {(EFFICIENCY, "%"): 100 * efficiency, ("step", "ms"): 1000 * step_s}
        found |= {(f"lost to: {part}", "%"): 100 * share for part, share in lost.items()}
        found |= {("best interval", "s"): interval_s, ("Young's", "s"): young_s(cluster, count)}
        run.record(
            "simulate", case, subject(count), {what: [value] for what, value in found.items()}
        )
    for part in lost:
        reached = (2**power for power in range(1, 21) if lost_shares(cluster, 2**power)[part] > 0.1)
        log(f"{case}: {part}: over 10 % from {next(reached, math.inf):,} ranks on")


def repeat_all_reduce(kib: int, rank: int, count_items: CountItems) -> None:
    torch.set_num_threads(1)
    numbers = torch.zeros(kib * 256)
    while True:
        dist.all_reduce(numbers)
        count_items(1)


def train_steps(run: Run, num_ranks: int, count_items: CountItems) -> None:
    """Train on several ranks with synthetic data and fixed batch size per rank; count the steps."""
    torch.set_num_threads(1)
    batch_size = num_ranks * make_config(*run.overrides).global_batch_size
    train_on_devices(
        run, num_ranks, (SYNTHETIC, f"global_batch_size={batch_size}"), lambda _: count_items(1)
    )


def load_batches(run: Run, count_items: CountItems) -> None:
    count_batches(
        endless(build_loaders(make_config(*run.overrides), run.device)[0]), None, count_items
    )


def measure_one_rank(run: Run) -> Mapping[str, Any]:
    """Constants of one rank: its steps and its training state, as large as with AdamW."""
    times: list[float] = []

    def note(_: int) -> None:
        times.append(time.perf_counter())
        if len(times) > NUM_STEPS:
            raise SystemExit

    with suppress(SystemExit):
        train_steps(run, 1, note)
    loader, _, model, *_ = parts(make_config(*run.overrides, SYNTHETIC), run.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    state = torch.rand(3 * num_parameters)
    start = time.perf_counter()
    copy = state.clone()
    copied = time.perf_counter()
    run.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=run.folder) as folder,
        write_atomically(Path(folder) / "state.pt") as file,
    ):
        torch.save(copy, file)
    lasted = [end - begin for begin, end in itertools.pairwise(times)]
    return {
        "jitter": [seconds / statistics.median(lasted) for seconds in lasted],
        "gradient_bytes": 4.0 * num_parameters,
        "batch_bytes": float(next(iter(loader))[0].numel()),  # one byte per value
        "save_s": copied - start,
        "write_s": time.perf_counter() - copied,
    }
