"""What binds the training step of a configuration, and what to change.

python -m benchmarks bottleneck experiment=caltech256 data.root=photos

The step as configured is measured beside the same with batches that already lie on the device: what these
save, loading costs, by waiting for it or because it takes cores from computing. With several GPUs, one of
them alone shows what averaging the gradients costs. Then follow the changes that aim at the largest part.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.records import Measurement, Subject, latest, ratio
from benchmarks.run import SPEED, Run, say
from benchmarks.step import on_ranks, train
from benchmarks.template import make_config, parts
from benchmarks.turns import Count, Program
from runtime.setup import resolve_device

GIVEN, SYNTHETIC, ALONE = "as configured", "loader=synthetic", "loader=synthetic, one device"
AMP = "train_amp.py"
# A change that gains less is not worth it.
WORTHWHILE = 1.05
INPUT, COMMUNICATION, COMPUTE = "input", "communication", "compute"


def main(run: Run, ways: Sequence[tuple[str, ...]] = ()) -> tuple[str, float, str, float]:
    """Measure the parts of a step, then `ways`, by default those that could reduce the largest part."""
    num_devices = torch.cuda.device_count() if run.device.type == "cuda" else 1

    def subject(name: str, *overrides: str, devices: int = num_devices) -> dict[Subject, Program]:
        return {Subject(name, num_devices=devices): partial(work, run, devices, overrides)}

    parts_of_step = subject(GIVEN) | subject(SYNTHETIC, SYNTHETIC)
    if num_devices > 1:
        # The same batch for each device, and no other rank to wait for.
        batch_size = make_config(*run.overrides).global_batch_size // num_devices
        alone = (SYNTHETIC, f"global_batch_size={batch_size}")
        parts_of_step |= subject(ALONE, *alone, devices=1)
    run.compare("bottleneck", run.title, parts_of_step, unit="images/s")
    tried, changed = f"{run.title}: changes", subject(GIVEN)
    for overrides in ways or changes(run, verdict(rows_of(run), {})[0]):
        changed |= subject(" ".join(overrides), *overrides)
    run.compare("bottleneck", tried, changed, unit="images/s")
    part, share, change, gain = found = verdict(rows_of(run), rows_of(run, tried))
    advice = f"; {change} makes it {gain:.2f}x as fast" if change else ""
    say(f"{part}-bound: {100 * share:.0f} % of the step{advice}")
    return found


def rows_of(run: Run, case: str = "") -> dict[str, Measurement]:
    """Speeds by subject."""
    rows = latest(run.path("bottleneck"))
    return {r.subject: r for r in rows if r.case == (case or run.title) and r.quantity == SPEED}


def verdict(
    rows: dict[str, Measurement], tried: dict[str, Measurement]
) -> tuple[str, float, str, float]:
    """What the rows of one configuration, and of all that was tried, say.

    Returns:
        Where most of the step's time goes (INPUT, COMMUNICATION or COMPUTE), its share of the step, the fastest
        change, if it is reliably faster (else empty), and how many times as fast that makes it.
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


def work(run: Run, num_devices: int, overrides: tuple[str, ...], count: Count) -> None:
    """Steps on all devices, which count the samples of all of them."""
    rank_program = partial(one_rank, run, num_devices, overrides)
    if num_devices == 1:
        return rank_program(0, count)
    backend = "nccl" if run.device.type == "cuda" else "gloo"
    on_ranks(rank_program, num_devices, backend, lambda n: count(n * num_devices), in_step=True)


def one_rank(
    run: Run, num_devices: int, overrides: tuple[str, ...], rank: int, count: Count
) -> None:
    """The steps of one rank: of `train.py` or `train_ddp.py`, with AMP of `train_amp.py`."""
    cfg = make_config(*run.overrides, *(o for o in overrides if o != AMP))
    device = resolve_device(cfg.device, rank)
    built = parts(cfg, device, rank, num_devices, distributed=num_devices > 1)
    try:
        train(cfg, built, device, count, amp=AMP in overrides)
    except RuntimeError as error:  # such as no compiler
        raise ValueError(f"{type(error).__name__}: {error}") from error


def changes(run: Run, part: str) -> list[tuple[str, ...]]:
    """Overrides that aim at a part of the step."""
    cfg = make_config(*run.overrides)
    if part == INPUT:
        threads = f"loader.num_threads={run.num_cores}"
        ways: list[tuple[str, ...]] = [
            ("loader=pytorch", "loader.num_workers=0", threads),
            ("loader=pytorch", f"loader.num_workers={run.num_cores}", "loader.num_threads=1"),
            ("loader=dali", threads),
        ]
        return [*ways, ("loader=packed", threads)] if cfg.loader.pack is not None else ways
    if part == COMMUNICATION:
        return [(f"global_batch_size={2 * cfg.global_batch_size}",)]
    channels_last, compiled = "model.channels_last=true", "model.compile=true"
    is_given = {channels_last: cfg.model.channels_last, compiled: cfg.model.compile}
    combinations = [(channels_last,), (compiled,), (channels_last, compiled)]
    new = [way for way in combinations if not any(is_given[change] for change in way)]
    amp = [(AMP, *way) for way in ((), *new)] if run.device.type == "cuda" else []
    return [*new, *amp]
