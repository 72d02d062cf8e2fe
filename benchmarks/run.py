"""What all benchmarks share: sizes, where the results go, and measuring subjects side by side."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from benchmarks import records
from benchmarks.cases import CASES, FULL, SMALL, Case
from benchmarks.generate import generate
from benchmarks.records import Measurement, Subject, Summary, machine, summarise
from benchmarks.template import make_config
from benchmarks.turns import TURN_S, Count, Program, measure
from conf.schema import Config
from runtime.setup import resolve_device

# What a subject that cannot be had here raises when it is built: it becomes a row without a figure.
UNAVAILABLE = (
    *(ModuleNotFoundError, FileNotFoundError, NotImplementedError, ValueError),
    *(torch.OutOfMemoryError, HydraException, OmegaConfBaseException),
)
SPEED, STEP_TIME = "speed", "time per step"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    data: dict[str, int] = field(default_factory=lambda: dict(SMALL))
    """Samples of each generated data set."""

    full: bool = False
    """Batches as large as the experiment's configuration says, not as small as `Case.batch_size`, and
    each script with each loader on each number of devices, not a choice of these."""

    warmup_s: float = 0.1
    """Seconds that each subject works before anything is counted."""

    window_s: float = 0.25
    """Seconds of one sample."""

    turn_s: float | None = None
    """Length of a turn. By default short; on a GPU as long as a sample, because what a loader has queued
    there runs on when it is stopped."""

    repeats: int = 3
    """Samples of each subject; 6 are the least that give a 95 % interval."""

    samples: tuple[int, ...] = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
    """In the index, of `scale`."""

    run_repeats: int = 1
    """Runs of each entry point."""

    epochs: int = 1
    """Epochs of each of these runs."""

    max_steps: int | None = 40
    """Optimizer steps after which such a run ends early: on a CPU, float16 is slow."""


SIZES_SMALL = Sizes()
SIZES_FULL = Sizes(
    data=dict(FULL),
    full=True,
    warmup_s=5.0,
    window_s=5.0,
    repeats=9,
    run_repeats=3,
    epochs=3,
    max_steps=None,
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
            generate(case.generator, root / case.below, size)
            chosen += [f"data.root={root}", f"data.cache_dir={self.data_dir / 'cache'}"]
        if not self.sizes.full:
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
    ) -> None:
        """Write a row for each (quantity, unit); where there are no samples, `note` must say why."""
        rows = [
            Measurement(
                *(benchmark, case, subject.name, quantity, subject.num_workers),
                *(subject.num_threads, subject.num_devices, subject.settings, unit),
                *Summary(*(float(f"{value:.5g}") for value in summarise(values))),
                repeats=len(values),
                samples=";".join(f"{value:.6g}" for value in values),
                epoch_size=epoch_size,
                note=note,
                date=date or now(),
                **machine(),
            )
            for (quantity, unit), values in samples.items()
        ]
        records.append(self.path(benchmark), rows)
        for row in rows:
            figure = f"{row.quantity} {span(row)} {row.unit}" if row.repeats else note
            say(f"{benchmark} {case}: {subject}: {figure}")

    def compare(
        self,
        benchmark: str,
        case: str,
        programs: Mapping[Subject, Program],
        *,
        unit: str = "",
        epoch_size: int = 0,
        fresh: bool = False,
    ) -> None:
        """Measure subjects side by side and write a row for each.

        Args:
            benchmark: name of the CSV file.
            case: what they are measured on.
            programs: what works in a process of its own; can be pickled. What it raises of UNAVAILABLE
                before it counts anything becomes the reason why there is no figure.
            unit: of the speed, such as `images/s`; empty: the time per item in ms is written down.
            epoch_size: samples of an epoch of the published data.
            fresh: each round starts its processes anew.
        """
        quantity = SPEED if unit else STEP_TIME
        if self.is_done(benchmark, case, programs, quantity):
            return
        sizes = self.sizes
        turn_s = sizes.turn_s or (TURN_S if self.device.type == "cpu" else sizes.window_s)
        starts, rounds = (sizes.repeats, 1) if fresh else (1, sizes.repeats)
        speeds: dict[Subject, list[float]] = {subject: [] for subject in programs}
        reasons: dict[Subject, str] = {}
        say(f"{benchmark} {case}: {len(programs)} subjects")
        with progress(sizes.repeats, f"{benchmark} {case}") as bar:
            for _ in range(starts):
                found = measure(
                    {who: partial(_work_on, self.device, work) for who, work in programs.items()},
                    *(sizes.warmup_s, sizes.window_s, rounds, UNAVAILABLE, turn_s, bar.update),
                )
                for subject, outcome in found.items():
                    if isinstance(outcome, str):
                        reasons[subject] = f"not measured: {outcome}"
                    else:
                        speeds[subject] += outcome
        date = now()
        for subject in programs:
            values = [] if subject in reasons else speeds[subject]
            samples = values if unit else [1000 / speed for speed in values]
            self.record(
                *(benchmark, case, subject, {(quantity, unit or "ms"): samples}),
                epoch_size=epoch_size,
                note=reasons.get(subject, ""),
                date=date,
            )


def _work_on(device: torch.device, program: Program, count: Count) -> None:
    resolve_device(str(device))  # after which, on a CPU, malloc keeps memory
    program(count)


def fetch(batches: Iterable[Any], device: torch.device | None, count: Count) -> NoReturn:
    """Count the samples of batch after batch.

    Args:
        batches: endless, or an epoch each time that it is iterated over; tensors, sequences, or tuples of
            these.
        device: where the batches shall lie, if the loader leaves them elsewhere.
        count: ends it.
    """
    while True:
        batch = None
        for batch in batches:
            parts = batch if isinstance(batch, tuple) else (batch,)
            if device is not None:
                parts = tuple(part.to(device, non_blocking=True) for part in parts)
            count(len(parts[0]))
        if batch is None:
            raise ValueError("an epoch without a batch; use more data or smaller batches")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def say(text: str) -> None:
    """Print a line without breaking a progress bar."""
    tqdm.write(text.rstrip(), file=sys.stdout)


def progress(total: int, what: str) -> Any:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(total=total, desc=what, unit="round", leave=False, disable=None)


def number(value: float) -> str:
    """Three significant digits, with thousands separated by commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def span(found: Measurement | Summary | None, unit: str = "") -> str:
    """`1,840 (1,800 to 1,890)`, the median alone if there is one sample, nothing if there is none."""
    if found is None or found.median != found.median:
        return ""
    text = f"{number(found.median)}{unit}"
    if isinstance(found, Measurement) and found.repeats == 1:
        return text
    return f"{text} ({number(found.low)} to {number(found.high)})"


def results_folder() -> Path:
    """`benchmarks/results/<machine>-<date>`."""
    date = datetime.now(UTC).date().isoformat()
    return Path(__file__).with_name("results") / f"{records.machine_name()}-{date}"
