"""Time of a training step by part, and the settings that make it faster.

python -m benchmarks bottleneck experiment=caltech256 data.root=photos

The configured step is compared with the same step on batches that are already on the device: the
difference is the cost of loading, by waiting for data or using CPU cores. With several GPUs, a step
on one shows the cost of averaging gradients. Settings that may reduce the largest part are tried.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.interleave import CountItems, Workload
from benchmarks.records import Measurement, Subject, latest, ratio
from benchmarks.run import SPEED, Run, log
from benchmarks.step import on_ranks, train
from benchmarks.template import make_config, parts
from conf.check import owners_of_keys
from conf.loader.packed import PackedConfig
from runtime.setup import resolve_device

GIVEN, SYNTHETIC, ALONE = "as configured", "loader=synthetic", "loader=synthetic, one device"
AMP = "train_amp.py"
# Least speedup of a setting that is recommended.
WORTHWHILE = 1.05
# Ratio of equal steps above which there is no verdict.
NOISE = 1.25
INPUT, COMMUNICATION, COMPUTE = "input", "communication", "compute"


def main(run: Run, candidates: Sequence[tuple[str, ...]] = ()) -> tuple[str, float, str, float]:
    """Measure the parts of a step, then try settings.

    Args:
        run: results and configuration.
        candidates: overrides of each setting to try; default: settings for the largest part.

    Returns:
        As `verdict()`.
    """
    num_devices = torch.cuda.device_count() if run.device.type == "cuda" else 1

    def subject(name: str, *overrides: str, devices: int = num_devices) -> dict[Subject, Workload]:
        return {
            Subject(name, num_devices=devices): partial(train_on_devices, run, devices, overrides)
        }

    parts_of_step = subject(GIVEN) | subject(SYNTHETIC, SYNTHETIC)
    if num_devices > 1:
        # The same batch size per device, without other ranks to wait for.
        batch_size = make_config(*run.overrides).global_batch_size // num_devices
        alone = (SYNTHETIC, f"global_batch_size={batch_size}")
        parts_of_step |= subject(ALONE, *alone, devices=1)
    run.compare("bottleneck", run.title, parts_of_step, unit="images/s")
    tried, changed = f"{run.title}: changes", subject(GIVEN)
    for overrides in candidates or changes(run, verdict(rows_of(run), {})[0]):
        changed |= subject(" ".join(overrides), *overrides)
    run.compare("bottleneck", tried, changed, unit="images/s")
    rows, rows_tried = rows_of(run), rows_of(run, tried)
    part, share, change, gain = found = verdict(rows, rows_tried)
    advice = f"; {change} makes it {gain:.2f}x as fast" if change else ""
    if (differing := noise(rows, rows_tried)) > NOISE:
        log(f"too noisy for a verdict: equal steps differ by {differing:.2f}x; try repeats=9")
    else:
        log(f"{part}-bound: {100 * share:.0f} % of the step{advice}")
    return found


def rows_of(run: Run, case: str = "") -> dict[str, Measurement]:
    """Rows of the speed of a case (default: the configuration), by subject name."""
    rows = latest(run.path("bottleneck"))
    return {r.subject: r for r in rows if r.case == (case or run.title) and r.quantity == SPEED}


def noise(rows: dict[str, Measurement], tried: dict[str, Measurement]) -> float:
    """Ratio of speeds that should be equal; arguments as for `verdict()`.

    The configured step is measured twice, and synthetic data cannot be slower than real data.
    """
    given = [row.median for row in (rows.get(GIVEN), tried.get(GIVEN)) if row and row.repeats]
    loaded = ratio(rows.get(GIVEN), rows.get(SYNTHETIC))
    return max(loaded.median if loaded else 1.0, max(given) / min(given) if given else 1.0)


def verdict(
    rows: dict[str, Measurement], tried: dict[str, Measurement]
) -> tuple[str, float, str, float]:
    """Bottleneck of a configuration and the best of the settings that were tried.

    Args:
        rows: speeds of the configuration by subject.
        tried: speeds with changed settings by subject.

    Returns:
        The largest part of the step (INPUT, COMMUNICATION or COMPUTE), its share of the time, the
        fastest setting (empty if none is reliably faster), and its speedup.
    """
    loaded, shares = ratio(rows.get(GIVEN), rows.get(SYNTHETIC)), {INPUT: 0.0, COMMUNICATION: 0.0}
    if loaded:
        shares[INPUT] = max(0.0, 1 - loaded.median)
        together = ratio(rows[SYNTHETIC], rows.get(ALONE))
        if together:
            efficiency = together.median / rows[SYNTHETIC].num_devices
            shares[COMMUNICATION] = max(0.0, (1 - efficiency) * loaded.median)
    shares[COMPUTE] = 1 - sum(shares.values())
    part = max(shares, key=lambda part: shares[part])
    best = ("", 1.0)
    for change, row in tried.items():
        gain = ratio(row, tried.get(GIVEN))
        if gain and gain.low > 1 and gain.median > max(WORTHWHILE, best[1]):
            best = (change, gain.median)
    return part, shares[part], *best


def train_on_devices(
    run: Run, num_devices: int, overrides: tuple[str, ...], count_items: CountItems
) -> None:
    """Train on several devices and count the samples of all of them."""
    rank_workload = partial(train_on_rank, run, num_devices, overrides)
    if num_devices == 1:
        return rank_workload(0, count_items)
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    on_ranks(
        rank_workload, num_devices, backend, lambda n: count_items(n * num_devices), lockstep=True
    )


def train_on_rank(
    run: Run, num_devices: int, overrides: tuple[str, ...], rank: int, count_items: CountItems
) -> None:
    """Train on one rank as `train.py` or `train_ddp.py`, with AMP as `train_amp.py`."""
    given, owners = run.overrides, owners_of_keys()
    if any(override.startswith("loader=") for override in overrides):  # without the other's keys
        given = tuple(
            override
            for override in given
            if not (override.startswith("loader.") and owners.get(override.partition("=")[0]))
        )
    cfg = make_config(*given, *(o for o in overrides if o != AMP))
    device = resolve_device(cfg.device, rank)
    built = parts(cfg, device, rank, num_devices, distributed=num_devices > 1)
    try:
        train(cfg, built, device, count_items, amp=AMP in overrides)
    except RuntimeError as error:  # for example, torch.compile finds no compiler
        raise ValueError(f"{type(error).__name__}: {error}") from error


def changes(run: Run, part: str) -> list[tuple[str, ...]]:
    """Overrides that may reduce a part of the step."""
    cfg = make_config(*run.overrides)
    if part == INPUT:
        threads = f"loader.num_threads={run.num_cores}"
        candidates: list[tuple[str, ...]] = [
            ("loader=pytorch", "loader.num_workers=0", threads),
            ("loader=pytorch", f"loader.num_workers={run.num_cores}", "loader.num_threads=1"),
            ("loader=dali", threads),
        ]
        if isinstance(cfg.loader, PackedConfig):
            candidates.append(("loader=packed", f"loader.pack={cfg.loader.pack}", threads))
        return candidates
    if part == COMMUNICATION:
        return [(f"global_batch_size={2 * cfg.global_batch_size}",)]
    channels_last, compiled = "model.channels_last=true", "model.compile=true"
    is_given = {channels_last: cfg.model.channels_last, compiled: cfg.model.compile}
    combinations = [(channels_last,), (compiled,), (channels_last, compiled)]
    new = [way for way in combinations if not any(is_given[change] for change in way)]
    amp = [(AMP, *way) for way in ((), *new)] if run.device.type == "cuda" else []
    return [*new, *amp]
