"""What all benchmarks share: sizes, where the results go, and measuring subjects side by side."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from benchmarks import records, template
from benchmarks.cases import CASES, FULL, SMALL, Case
from benchmarks.records import Measurement, Subject, Summary, machine, summarise
from benchmarks.template import Config, make_config, resolve_device
from benchmarks.turns import TURN_S, Count, Measured, Program, measure

# What a subject that cannot be had here raises when it is built: it becomes a row without a figure.
UNAVAILABLE = (
    *(ModuleNotFoundError, FileNotFoundError, NotImplementedError, ValueError),
    *(torch.OutOfMemoryError, HydraException, OmegaConfBaseException),
)
SPEED, STEP_TIME = "speed", "time per step"

Draw = Callable[[], int]
"""Does one piece of work, such as fetching a batch, and returns the number of items in it."""

Builder = Callable[[], Draw]
"""Builds a subject in the process in which it is measured, so it can be pickled. What it raises of
UNAVAILABLE becomes the reason why there is no figure."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    data: dict[str, int] = field(default_factory=lambda: dict(SMALL))
    """Samples of each generated data set."""

    own_batch_size: bool = False
    """Batches as large as the experiment's configuration says, not as small as `Case.batch_size`."""

    warmup_s: float = 0.1
    """Seconds that each subject works before anything is counted."""

    window_s: float = 0.25
    """Seconds of one sample."""

    repeats: int = 3
    """Samples of each subject; 6 are the least that give a 95 % interval."""

    run_repeats: int = 1
    """Runs of each entry point."""

    epochs: int = 1
    """Epochs of each of these runs."""

    max_steps: int | None = 40
    """Optimizer steps after which such a run ends early: on a CPU, float16 is slow."""

    every_combination: bool = False
    """Each script with each loader on each number of devices, and each step of the data by number of
    workers; small sizes take a choice."""


SIZES_SMALL = Sizes()
SIZES_FULL = Sizes(
    data=dict(FULL),
    own_batch_size=True,
    warmup_s=5.0,
    window_s=5.0,
    repeats=9,
    run_repeats=3,
    epochs=3,
    max_steps=None,
    every_combination=True,
)


@dataclass
class Run:
    """One call of `python -m benchmarks`."""

    folder: Path
    """Where the CSV files and the report go."""

    sizes: Sizes = SIZES_SMALL

    overrides: tuple[str, ...] = ()
    """Hydra overrides of the command line; they come last, so they win."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names of the cases that may be used."""

    data_dir: Path = Path("data/bench")
    """Where generated data lies."""

    scripts: tuple[str, ...] = ()
    """Names of the entry points that are started; empty: all."""

    prepared: dict[str, list[str]] = field(default_factory=dict)
    """By case, what `case_overrides` found: a process that is sent this run need not look again."""

    @property
    def title(self) -> str:
        """What the benchmarks without cases of their own are measured on."""
        return " ".join(self.overrides) or "default configuration"

    @cached_property
    def device(self) -> torch.device:
        return resolve_device(make_config(*self.overrides).device)

    @property
    def num_cores(self) -> int:
        """CPU cores for each device: the parallelism that all loaders get."""
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return max(1, len(records.cores()) // max(1, devices))

    def case_overrides(self, name: str) -> list[str]:
        """Overrides that choose a case's data, generated first if need be, at this run's sizes.

        Raises:
            one of UNAVAILABLE: the data cannot be had.
        """
        if name in self.prepared:
            return self.prepared[name]
        case = CASES[name]
        chosen = list(case.overrides)
        if case.generator and not any(o.startswith("data.root=") for o in self.overrides):
            size = self.sizes.data.get(case.generator, 0)
            root = self.data_dir / f"{case.generator}-{size}"
            template.generate(case.generator, root / case.below, size)
            chosen += [f"data.root={root}", f"data.cache_dir={self.data_dir / 'cache'}"]
        if not self.sizes.own_batch_size:
            chosen.append(f"global_batch_size={case.batch_size}")
        self.prepared[name] = [*chosen, *self.overrides]
        return self.prepared[name]

    def config(self, name: str, *overrides: str) -> Config:
        """Configuration of a case; `overrides` win over all others."""
        return make_config(*self.case_overrides(name), *overrides)

    def chosen(self, *names: str) -> list[Case]:
        """Those of the named cases that this run may use."""
        return [CASES[name] for name in names if name in self.cases]

    def path(self, benchmark: str) -> Path:
        return self.folder / f"{benchmark}.csv"

    def is_done(
        self, benchmark: str, case: str, subjects: Iterable[Subject], quantity: str = SPEED
    ) -> bool:
        """Whether an earlier run, such as an interrupted one, measured all of them at this commit."""
        path = self.path(benchmark)
        rows = records.read(path) if path.exists() else []
        found = {row.what for row in rows if row.commit == machine()["commit"]}
        done = all((case, subject, quantity) in found for subject in subjects)
        if done:
            say(f"{benchmark} {case}: measured already, see {path}")
        return done

    def record(
        self,
        benchmark: str,
        case: str,
        subject: Subject,
        samples: Mapping[tuple[str, str], list[float]],
        *,
        epoch_size: int = 0,
        note: str = "",
        date: str = "",
    ) -> list[Measurement]:
        """Write a row for each (quantity, unit); where there are no samples, `note` must say why."""
        rows = []
        for (quantity, unit), values in samples.items():
            summary = Summary(*(float(f"{value:.5g}") for value in summarise(values)))
            rows.append(
                Measurement(
                    *(benchmark, case, subject.name, quantity, subject.num_workers),
                    *(subject.num_threads, subject.num_devices, subject.settings),
                    unit,
                    *summary,
                    repeats=len(values),
                    samples=";".join(f"{value:.6g}" for value in values),
                    epoch_size=epoch_size,
                    note=note,
                    date=date or now(),
                    **machine(),
                )
            )
        records.append(self.path(benchmark), rows)
        for row in rows:
            say(f"{benchmark} {case}: {subject}: {row.quantity} {span(row)} {row.unit} {note}")
        return rows

    def compare(
        self, benchmark: str, case: str, builders: Mapping[Subject, Builder], **options: Any
    ) -> None:
        """Measure subjects side by side; `options` are those of `compare_programs`."""
        programs = {
            subject: partial(_draw_on, build, self.device) for subject, build in builders.items()
        }
        self.compare_programs(benchmark, case, programs, **options)

    def compare_programs(
        self,
        benchmark: str,
        case: str,
        programs: Mapping[Subject, Program],
        *,
        unit: str = "",
        epoch_size: int = 0,
        turn_s: float | None = None,
        warmup_s: float | None = None,
        window_s: float | None = None,
        fresh: bool = False,
    ) -> None:
        """Measure subjects side by side and write a row for each.

        Args:
            benchmark: name of the CSV file.
            case: what they are measured on.
            programs: what works in a process of its own; can be pickled.
            unit: of the speed, such as `images/s`; empty: the time per item in ms is written down.
            epoch_size: samples of an epoch of the published data.
            turn_s: length of a turn. By default short; on a GPU long, because what a loader has queued
                there runs on when it is stopped.
            warmup_s, window_s: seconds before anything is counted, and of a sample; by default those of
                the sizes.
            fresh: each round starts its processes anew.
        """
        quantity, unit = (SPEED, unit) if unit else (STEP_TIME, "ms")
        if self.is_done(benchmark, case, programs, quantity):
            return
        sizes, on_cpu = self.sizes, self.device.type == "cpu"
        warmup_s = sizes.warmup_s if warmup_s is None else warmup_s
        window_s = window_s or sizes.window_s
        named = {str(subject): program for subject, program in programs.items()}
        turn_s = turn_s or (TURN_S if on_cpu else window_s)
        measured = Measured({name: [] for name in named}, {})
        say(f"{benchmark} {case}: {len(programs)} subjects")
        with progress(sizes.repeats, f"{benchmark} {case}") as bar:
            for _ in range(sizes.repeats if fresh else 1):
                repeats = 1 if fresh else sizes.repeats
                found = measure(
                    *(named, warmup_s, window_s, repeats, UNAVAILABLE),
                    turn_s=turn_s,
                    after_round=bar.update,
                )
                measured.reasons.update(found.reasons)
                for name, speeds in found.speeds.items():
                    measured.speeds[name] += speeds
        date = now()
        for subject in programs:
            reason = measured.reasons.get(str(subject), "")
            speeds = [] if reason else measured.speeds[str(subject)]
            self.record(
                *(benchmark, case, subject),
                {(quantity, unit): speeds if quantity == SPEED else [1000 / s for s in speeds]},
                epoch_size=epoch_size,
                note=reason and f"not measured: {reason}",
                date=date,
            )


def _draw_on(build: Builder, device: torch.device, count: Count) -> None:
    resolve_device(str(device))  # after which, on a CPU, malloc keeps memory
    draw = build()
    while True:
        count(draw())


def draw_from(batches: Iterable[Any], device: torch.device | None = None) -> Draw:
    """Draws batch after batch from what is endless or gives an epoch each time that it is iterated over.

    Args:
        batches: a loader; its batches are tensors, sequences, or tuples of these.
        device: where the batches shall lie, if the loader leaves them elsewhere.

    Returns:
        Fetches a batch and returns the number of samples in it.
    """

    def endless_batches() -> Iterator[Any]:
        while True:
            batch = None
            for batch in batches:
                yield batch
            if batch is None:
                raise ValueError("an epoch without a batch; use more data or smaller batches")

    endless = endless_batches()

    def draw() -> int:
        batch = next(endless)
        parts = batch if isinstance(batch, tuple) else (batch,)
        if device is not None:
            parts = tuple(part.to(device, non_blocking=True) for part in parts)
        return len(parts[0])

    return draw


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def say(text: str) -> None:
    """Print a line without breaking a progress bar; on rank 0 only."""
    if is_first_rank():
        tqdm.write(text.rstrip(), file=sys.stdout)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def progress(total: int, what: str) -> Any:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(total=total, desc=what, unit="round", leave=False, disable=None)


def number(value: float) -> str:
    """Three significant digits, with thousands separated by commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def span(found: Measurement | Summary | None, unit: str = "") -> str:
    """`1,840 (1,800 to 1,890)`, the median alone if there is one sample, `-` if there is none."""
    if found is None or found.median != found.median:
        return "-"
    text = f"{number(found.median)}{unit}"
    if isinstance(found, Measurement) and found.repeats == 1:
        return text
    return f"{text} ({number(found.low)} to {number(found.high)})"


def results_folder() -> Path:
    """`benchmarks/results/<machine>-<date>`."""
    date = datetime.now(UTC).date().isoformat()
    return Path(__file__).with_name("results") / f"{records.machine_name()}-{date}"
