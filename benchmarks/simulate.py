"""What many ranks would do: constants measured here, a model that 2 to 8 ranks check, and simulations of more.

A step: the slowest rank's computation, what of the all-reduce it does not hide, and waiting for data. A ring of N
ranks sends S bytes in 2 (N - 1) messages of S / N, a tree in 2 log2(N) of S; the faster one counts, a message
taking alpha + bytes / beta (Hockney 1994; Thakur et al. 2005); ranks that share cores share their time.
Failures come at random, and what was done since the last checkpoint is done again; the best interval stands
beside sqrt(2 save MTBF) (Young 1974).
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

from benchmarks.bottleneck import SYNTHETIC, work
from benchmarks.records import Subject, cores
from benchmarks.run import Run, fetch, say
from benchmarks.step import on_ranks
from benchmarks.template import endless, make_config, parts
from benchmarks.turns import Count, Program, measure
from conf.files import write_atomically
from loaders import build_loaders

EFFICIENCY, ERROR, FAILURES = "efficiency", "model's error", "failures and checkpoints"
MEASURED_RANKS, SIMULATED_RANKS = (2, 4, 8), (8, 64, 1024)
FITTED_RANKS = 4  # from which the constants of messages are
KIB = (4, 256, 16384)
NUM_STEPS, NUM_FAILURES = 300, 20_000


@dataclass(frozen=True)
class Cluster:
    """What a rank and what all ranks share can do; seconds, and bytes per second."""

    step_s: float  # of one rank alone, the median
    jitter: Sequence[float]  # times of such steps, divided by their median
    gradient_bytes: float
    alpha_s: float
    beta: float
    load_s: float  # that a rank's loader takes for a batch, beside the step before
    batch_bytes: float  # of a rank, as they are stored
    save_s: float  # training stands still
    write_s: float  # beside training; more often than that there are no checkpoints
    has_trees: bool = True  # which gloo has not
    hidden_s: float = 0.0  # so much of an all-reduce takes place beside the backward pass
    cores: float = math.inf  # that all ranks share
    storage: float = 20e9  # for all ranks; assumed
    restart_s: float = (
        15 + 30 + 15
    )  # a lost machine is noticed, no other one comes, the ranks start
    # 419 failures in 54 days of 16,384 GPUs: "The Llama 3 Herd of Models", 2024, section 3.3.4
    mtbf_s: float = 16_384 * 54 * 86_400 / 419


GPU_STEP_S = 256 / 2470  # NVIDIA's images/s of an A100, ResNet-50 with AMP
GPUS = Cluster(
    step_s=GPU_STEP_S,
    jitter=np.random.default_rng(0).normal(1, 0.01, 2000).tolist(),  # assumed, as are
    alpha_s=10e-6,
    beta=50e9,  # 400 Gbit/s for each GPU
    hidden_s=GPU_STEP_S / 2,
    save_s=0.5,
    write_s=5.0,
    gradient_bytes=4 * 25.6e6,
    load_s=256 / 7000,  # NVIDIA's images/s of nvJPEG on an A100
    batch_bytes=256 * 110e3,  # ImageNet's mean
)


def all_reduce_s(cluster: Cluster, count: int, num_bytes: float) -> float:
    """Seconds until `num_bytes` of each of `count` ranks are summed over all."""
    ring, tree = (2 * (count - 1), num_bytes / count), (2 * math.ceil(math.log2(count)), num_bytes)
    ways = (ring, tree) if cluster.has_trees else (ring,)
    return min(n * (cluster.alpha_s + size / cluster.beta) for n, size in ways) * max(
        1.0, count / cluster.cores
    )


def parts_of_step(cluster: Cluster, count: int) -> dict[str, float]:
    """What a step of `count` ranks consists of, in seconds."""
    compute_s = cluster.step_s * max(1.0, count / cluster.cores)
    # The chance that the slowest of all is each of the ordered steps; ranks that share cores wait for them.
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


def kept(cluster: Cluster, count: int, interval_s: float) -> float:
    """The share of the time that checkpoints, failures and what these undo leave; simulated."""
    alive_s = np.random.default_rng(0).exponential(cluster.mtbf_s / count, NUM_FAILURES)
    saved_s = np.floor(alive_s / (interval_s + cluster.save_s)) * interval_s
    return float(saved_s.sum() / (alive_s + cluster.restart_s).sum())


def young_s(cluster: Cluster, count: int) -> float:
    """Seconds between checkpoints, by the formula."""
    return max(cluster.write_s, math.sqrt(2 * cluster.save_s * cluster.mtbf_s / count))


def best_interval_s(cluster: Cluster, count: int) -> float:
    """Seconds between checkpoints, by trying."""
    tried = young_s(cluster, count) * 2.0 ** np.arange(-3, 3.1, 0.25)
    return max(tried[tried >= cluster.write_s].tolist(), key=partial(kept, cluster, count))


def shares(cluster: Cluster, count: int) -> dict[str, float]:
    """By what it is lost to, the share of the time that `count` ranks lose."""
    found = parts_of_step(cluster, count)
    lost = 1 - kept(cluster, count, best_interval_s(cluster, count))
    of_step = {
        part: value / sum(found.values()) for part, value in found.items() if part != "compute"
    }
    return of_step | {FAILURES: lost}


def main(run: Run) -> None:
    """Measure the constants on the CPU, with gloo and a thread for each rank; check the model; simulate."""
    published = "ResNet-50 on GPUs, published and assumed constants"
    copied = f"{published}, each machine with a copy of the data"
    if run.is_done("simulate", copied, map(subject, SIMULATED_RANKS), EFFICIENCY):
        return
    programs: dict[tuple[int, int], Program] = {(0, 0): partial(load, run)}
    for count in (1, *MEASURED_RANKS):
        programs[count, 0] = partial(steps, run, count)
    for count, kib in itertools.product(MEASURED_RANKS, KIB):
        programs[count, kib] = partial(on_ranks, partial(all_reduces, kib), count, "gloo")
    sizes = run.sizes
    say(f"simulate: {len(programs)} subjects, in {sizes.repeats} rounds, whose fastest counts")
    speeds = measure(programs, sizes.warmup_s, sizes.window_s, sizes.repeats, turn_s=sizes.window_s)
    seconds = {what: 1 / max(map(float, found)) for what, found in speeds.items()}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        alone = pool.apply(one_rank_alone, (run,))
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
    say("\n".join(f"{name}: {np.max(value):.4g}" for name, value in vars(here).items()))
    shared = replace(here, cores=len(cores()), load_s=0.0)
    for count, kib in programs:
        if count > 1:
            step_s = sum(parts_of_step(shared, count).values())
            model_s = all_reduce_s(shared, count, kib * 1024) if kib else step_s
            measured_s = seconds[count, kib]
            found = {("measured", "ms"): [1000 * measured_s], ("model", "ms"): [1000 * model_s]}
            found |= {(ERROR, "%"): [100 * (model_s / measured_s - 1)]}
            case = f"all-reduce of {kib} KiB" if kib else f"a step, {run.title}"
            run.record("simulate", case, subject(count), found)
    tell(run, f"{run.title}, constants of this machine", here)
    tell(run, published, GPUS)
    tell(run, copied, replace(GPUS, storage=math.inf))


def subject(count: int) -> Subject:
    return Subject(f"{count:,} ranks")


def tell(run: Run, case: str, cluster: Cluster) -> None:
    """Write down what happens on many ranks, and from how many on each part takes a tenth of the time."""
    for count in SIMULATED_RANKS:
        step_s, interval_s = (
            sum(parts_of_step(cluster, count).values()),
            best_interval_s(cluster, count),
        )
        lost = shares(cluster, count)
        efficiency = cluster.step_s / step_s * (1 - lost[FAILURES])
        found = {(EFFICIENCY, "%"): 100 * efficiency, ("step", "ms"): 1000 * step_s}
        found |= {(f"lost to: {part}", "%"): 100 * share for part, share in lost.items()}
        found |= {("best interval", "s"): interval_s, ("Young's", "s"): young_s(cluster, count)}
        run.record(
            "simulate", case, subject(count), {what: [value] for what, value in found.items()}
        )
    for part in lost:
        reached = (2**power for power in range(1, 21) if shares(cluster, 2**power)[part] > 0.1)
        say(f"{case}: {part}: a tenth from {next(reached, math.inf):,} ranks on")


def all_reduces(kib: int, rank: int, count: Count) -> None:
    torch.set_num_threads(1)
    numbers = torch.zeros(kib * 256)
    while True:
        dist.all_reduce(numbers)
        count(1)


def steps(run: Run, num_ranks: int, count: Count) -> None:
    """Steps of so many ranks, of data that cost nothing, each with as large a batch as one would have alone."""
    torch.set_num_threads(1)
    batch_size = num_ranks * make_config(*run.overrides).global_batch_size
    work(run, num_ranks, (SYNTHETIC, f"global_batch_size={batch_size}"), lambda _: count(1))


def load(run: Run, count: Count) -> None:
    fetch(endless(build_loaders(make_config(*run.overrides), run.device)[0]), None, count)


def one_rank_alone(run: Run) -> Mapping[str, Any]:
    """Of the constants those of one rank: of its steps, and of its state, as large as AdamW makes it."""
    times: list[float] = []

    def note(_: int) -> None:
        times.append(time.perf_counter())
        if len(times) > NUM_STEPS:
            raise SystemExit

    with suppress(SystemExit):
        steps(run, 1, note)
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
        "batch_bytes": float(next(iter(loader))[0].numel()),  # a byte a value
        "save_s": copied - start,
        "write_s": time.perf_counter() - copied,
    }
