"""Where a training step's time goes, and what to change: one verdict for a configuration.

python -m benchmarks bottleneck experiment=caltech256 data.root=photos
torchrun --standalone --nproc_per_node=2 -m benchmarks bottleneck experiment=caltech256
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.cases import make_config
from benchmarks.records import Measurement, latest, read
from benchmarks.run import UNAVAILABLE, Run, Subject, is_first_rank, now, number, progress, say
from benchmarks.step import StepTime, TrainingStep
from benchmarks.timing import LEAD_IN_STEPS, ratios, rounds, summarise, wait_until_idle
from runtime.distributed import init_process_group, leave_process_group
from runtime.setup import resolve_device

# Quantities of the rows: the parts add up to the step.
STEP, WAIT, COPY, COMPUTE, COMMUNICATION, SLOWED = (
    *("step", "data wait", "copy to device", "compute", "communication"),
    "compute slowed by loading",
)
SPEED = "speed"
PARTS = (WAIT, COPY, COMPUTE, COMMUNICATION, SLOWED)
GIVEN, SYNTHETIC, ALONE = "as configured", "loader=synthetic", "loader=synthetic, one rank"
# A part below this share is not worth a change.
WORTHWHILE = 0.05
BOUND = {
    WAIT: "input-bound: {share} of the step waits for data",
    COPY: "transfer-bound: {share} of the step copies batches to the device",
    COMPUTE: "compute-bound: {share} of the step computes",
    COMMUNICATION: "communication-bound: {share} of the step averages gradients over the ranks",
    SLOWED: "input-bound: {share} of the step is lost because loading takes cores from computing",
}


class Candidate(NamedTuple):
    """A change that may help."""

    advice: str
    """What to type."""

    overrides: tuple[str, ...] = ()
    amp: bool = False


def main(run: Run) -> None:
    """Measure the parts of a step, then the changes that could remove the largest one."""
    case = " ".join(run.overrides) or "default configuration"
    cfg = make_config(*run.overrides)
    distributed = "LOCAL_RANK" in os.environ
    if run.is_done("bottleneck", case, [Subject(GIVEN, num_devices=world_size())], STEP):
        say(f"bottleneck {case}: measured already, see {run.path('bottleneck')}")
    elif distributed:
        device = resolve_device(cfg.device, int(os.environ["LOCAL_RANK"]))
        rank, size = init_process_group(cfg, device)
        try:
            Split(run, case, device, rank, size).measure()
        finally:
            leave_process_group()
    else:
        Split(run, case, resolve_device(cfg.device)).measure()
    if is_first_rank():
        rows = [row for row in latest(read(run.path("bottleneck"))) if row.case == case]
        say(f"\n{verdict(rows)}")


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Split:
    """Measures one configuration on all ranks; rank 0 writes the rows."""

    def __init__(
        self, run: Run, case: str, device: torch.device, rank: int = 0, world_size: int = 1
    ) -> None:
        self.run, self.case, self.device = run, case, device
        self.rank, self.world_size = rank, world_size

    def measure(self) -> None:
        given = self.step()
        steps = {GIVEN: given, SYNTHETIC: self.step("loader=synthetic")}
        if self.world_size > 1:
            per_device = make_config(*self.run.overrides).global_batch_size // self.world_size
            # The same batch for each device, and no other rank to wait for.
            steps[ALONE] = self.step(
                "loader=synthetic", f"global_batch_size={per_device}", alone=True
            )
        times = self.side_by_side(steps)
        parts = self.parts(times, self.copy_s(given))
        largest = max(PARTS, key=lambda part: summarise(parts[part]).median)
        synthetic_ms = [1000 * time.total_s for time in times[SYNTHETIC]]
        self.write(SYNTHETIC, STEP, "ms", synthetic_ms)

        candidates = self.candidates(largest)
        changed: dict[str, TrainingStep] = {GIVEN: given}
        for candidate in candidates:
            try:
                step = self.step(*candidate.overrides, amp=candidate.amp)
                step()
                changed[candidate.advice] = step
            except (*UNAVAILABLE, RuntimeError) as error:  # such as no compiler or no memory
                say(f"bottleneck: {candidate.advice} not measured: {error}")
        if len(changed) > 1:
            times = self.side_by_side(changed)
            date = now()
            for advice, step in changed.items():
                samples = step.loader.sampler.global_batch_size
                speeds = [samples / time.total_s for time in times[advice]]
                self.write(advice, SPEED, "images/s", speeds, date)
        # The whole step last: a run that is interrupted before is measured again.
        for quantity in (*PARTS, STEP):
            self.write(GIVEN, quantity, "ms", [1000 * second for second in parts[quantity]])

    def step(self, *overrides: str, alone: bool = False, amp: bool = False) -> TrainingStep:
        cfg = make_config(*self.run.overrides, *overrides)
        if alone or self.world_size == 1:
            return TrainingStep(cfg, self.device, amp=amp)
        return TrainingStep(
            *(cfg, self.device, self.rank, self.world_size), distributed=True, amp=amp
        )

    def side_by_side(self, steps: dict[str, TrainingStep]) -> dict[str, list[StepTime]]:
        """Times of windows of equal length, by round; ALONE runs while the other ranks wait."""
        sizes = self.run.sizes
        num_steps = {}
        for name, step in steps.items():
            step.time(2)
            num_steps[name] = self.agree(max(3, round(sizes.window_s / step.time(2).total_s)))
        times: dict[str, list[StepTime]] = {name: [] for name in steps}
        with progress(len(steps) * sizes.repeats, f"bottleneck {self.case}") as bar:
            for name in rounds(list(steps), sizes.repeats):
                wait_until_idle()
                if self.world_size > 1:
                    dist.barrier()
                if name != ALONE or self.rank == 0:
                    steps[name].time(LEAD_IN_STEPS)
                    times[name].append(steps[name].time(num_steps[name]))
                bar.update()
        return times

    def agree(self, count: int) -> int:
        """The number of rank 0 on all ranks: they must take equally many steps."""
        if self.world_size == 1:
            return count
        shared = torch.tensor(count, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared)

    def parts(self, times: dict[str, list[StepTime]], copy_s: float) -> dict[str, list[float]]:
        """Seconds of each part, round by round; all rounds' parts add up to the whole step."""
        split: dict[str, list[float]] = {part: [] for part in (STEP, *PARTS)}
        if self.rank != 0:
            return split | {part: [0.0] for part in PARTS}
        alone = times.get(ALONE, times[SYNTHETIC])
        for real, synthetic, single in zip(times[GIVEN], times[SYNTHETIC], alone, strict=True):
            compute_s = min(single.total_s, synthetic.total_s) - single.wait_s
            communication_s = synthetic.total_s - synthetic.wait_s - compute_s
            rest_s = max(0.0, real.total_s - real.wait_s - compute_s - communication_s)
            split[STEP].append(real.total_s)
            split[WAIT].append(real.wait_s)
            split[COPY].append(min(copy_s, rest_s))
            split[SLOWED].append(rest_s - min(copy_s, rest_s))
            # Noise can make the synthetic step longer than the real one; the parts still add up.
            share = (real.total_s - real.wait_s - rest_s) / (compute_s + communication_s)
            split[COMPUTE].append(share * compute_s)
            split[COMMUNICATION].append(share * communication_s)
        return split

    def copy_s(self, step: TrainingStep) -> float:
        """Seconds that the bytes of one batch (8 bits a value) take to the device, alone."""
        if self.device.type == "cpu":
            return 0.0
        inputs, targets = next(step.batches)
        sizes = [inputs.numel(), targets.numel() if targets.is_floating_point() else 0]
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        repeats = 20
        host.to(self.device)
        start.record()
        for _ in range(repeats):
            host.to(self.device, non_blocking=True)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats

    def candidates(self, largest: str) -> list[Candidate]:
        """Changes that aim at the largest part; all ranks get the same list."""
        cfg = make_config(*self.run.overrides)
        cores = max(1, self.run.num_cores // self.world_size)
        if self.world_size > 1:
            names: list[str] = [largest]
            dist.broadcast_object_list(names, src=0)
            largest = names[0]
        if largest in (WAIT, COPY, SLOWED):
            ways = [
                ("loader=pytorch", "loader.num_workers=0", f"loader.num_threads={cores}"),
                ("loader=pytorch", f"loader.num_workers={cores}", "loader.num_threads=1"),
                ("loader=dali", f"loader.num_threads={cores}"),
            ]
            if cfg.loader.pack is not None:
                ways.append(("loader=packed", f"loader.num_threads={cores}"))
            return [Candidate(" ".join(way), way) for way in ways]
        if largest == COMMUNICATION:
            double = f"global_batch_size={2 * cfg.global_batch_size}"
            return [Candidate(double, (double,))]
        channels_last, compiled = "model.channels_last=true", "model.compile=true"
        ways = [(channels_last,), (compiled,), (channels_last, compiled)]
        given = {channels_last: cfg.model.channels_last, compiled: cfg.model.compile}
        new = [way for way in ways if not any(given[change] for change in way)]
        found = [Candidate(" ".join(way), way) for way in new]
        if self.device.type == "cuda":
            for way in ((), *new):
                found.append(Candidate(" ".join(("train_amp.py", *way)), way, amp=True))
        return found

    def write(
        self, name: str, quantity: str, unit: str, samples: list[float], date: str = ""
    ) -> None:
        if self.rank == 0:
            subject = Subject(name, num_devices=self.world_size)
            self.run.record(*("bottleneck", self.case, subject, quantity, unit, samples), date=date)


def verdict(rows: Sequence[Measurement]) -> str:
    """What binds the configuration that these rows are of, and what of all that was tried helps."""
    given = {row.quantity: row.median for row in rows if row.subject == GIVEN}
    step = sum(given[part] for part in PARTS)
    shares = {part: given[part] / step for part in PARTS}
    largest = max(PARTS, key=lambda part: shares[part])
    text = BOUND[largest].format(share=f"{100 * shares[largest]:.0f} %")
    others = [
        f"{part} {100 * share:.0f} %"
        for part, share in shares.items()
        if part != largest and share >= 0.01
    ]
    text += f" ({', '.join(others)})" if others else ""

    tried = [row for row in rows if row.quantity == SPEED]
    before = next((row for row in tried if row.subject == GIVEN), None)
    gains = {}
    for row in tried:
        if before is None or row is before or row.date != before.date:
            continue
        gains[row.subject] = ratios(row.values, before.values)
    best = max(gains, key=lambda name: gains[name].median, default=None)
    if best is not None and gains[best].low > 1 and gains[best].median >= 1 + WORTHWHILE:
        speeds = [f"{name} {number(gain.median)}x" for name, gain in gains.items() if name != best]
        text += f"; {best} makes it {gains[best].median:.2f}x as fast"
        text += f" (also tried: {', '.join(speeds)})" if speeds else ""
    elif gains:
        text += f"; nothing that was tried makes it faster ({', '.join(gains)})"
    elif largest == COMPUTE:
        text += "; the loader keeps up: a lighter model or a faster device is what remains"
    return text
