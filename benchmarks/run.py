"""Parts that all benchmarks share: sizes, the results folder, and the comparison of subjects."""

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
from benchmarks.interleave import SLICE_S, CountItems, Workload, measure
from benchmarks.records import Measurement, Subject, Summary, machine, summarise
from benchmarks.template import make_config
from conf.schema import Config
from runtime.setup import resolve_device

# Exceptions of a subject that is not available, which becomes a row without a figure.
UNAVAILABLE = (
    *(ModuleNotFoundError, FileNotFoundError, NotImplementedError, ValueError),
    *(torch.OutOfMemoryError, HydraException, OmegaConfBaseException),
)
SPEED, STEP_TIME = "speed", "time per step"


@dataclass(frozen=True)
class Sizes:
    """Amounts of data and of measurements."""

    data: dict[str, int] = field(default_factory=lambda: dict(SMALL))
    """Number of samples of each generated data set."""

    full: bool = False
    """Use the batch sizes of the experiments, not `Case.batch_size`, and run each training script
    with each loader on each number of devices, not a selection of these.
    """

    warmup_s: float = 0.1
    """Warm-up of each subject in seconds."""

    window_s: float = 0.25
    """Length of one sample in seconds."""

    slice_s: float | None = None
    """Length of a time slice in seconds. None: short slices on a CPU; one slice per sample on a
    GPU, because queued work continues while a process is stopped.
    """

    repeats: int = 3
    """Samples of each subject; a 95 % interval needs at least 6."""

    samples: tuple[int, ...] = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
    """Numbers of samples in the index, for `scale`."""

    run_repeats: int = 1
    """Number of runs of each entry point."""

    epochs: int = 1
    """Epochs of each of these runs."""

    max_steps: int | None = 40
    """Steps after which such a run ends early; float16 is slow on a CPU."""


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
    """Folder of the CSV files and the report."""

    sizes: Sizes = SIZES_SMALL

    overrides: tuple[str, ...] = ()
    """Hydra overrides of the command line; they are applied last."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names of the cases to use."""

    data_dir: Path = Path("data/bench")
    """Folder of generated data."""

    prepared: dict[str, list[str]] = field(default_factory=dict)
    """Results of `case_overrides` by case, kept for processes that receive this object."""

    rows: tuple[str, ...] = ()
    """Parts of the names of rows to measure, for `gpu`; empty: all."""

    seconds: float | None = None
    """Measured seconds of a row of `gpu`; None: its own choice."""

    @property
    def title(self) -> str:
        """Title of measurements without a case: the overrides."""
        return " ".join(self.overrides) or "default configuration"

    @cached_property
    def device(self) -> torch.device:
        return resolve_device(make_config(*self.overrides).device)

    @property
    def num_cores(self) -> int:
        """CPU cores per device, the parallelism of all loaders."""
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return max(1, len(records.cores()) // max(1, devices))

    def case_overrides(self, name: str) -> list[str]:
        """Overrides that select the data of a case, which is generated if missing.

        Raises:
            Exception: one of UNAVAILABLE if the data is not available.
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
        """Configuration of a case; `overrides` are applied last."""
        return make_config(*self.case_overrides(name), *overrides)

    def chosen(self, *names: str) -> list[Case]:
        """Those of the named cases that this run uses."""
        return [CASES[name] for name in names if name in self.cases]

    def path(self, benchmark: str) -> Path:
        return self.folder / f"{benchmark}.csv"

    def is_done(
        self, benchmark: str, case: str, subjects: Iterable[Subject], quantity: str = SPEED
    ) -> bool:
        """True if all subjects were already measured at this commit, as after an interruption."""
        path = self.path(benchmark)
        rows = records.read(path) if path.exists() else []
        found = {row.key for row in rows if row.commit == machine()["commit"]}
        done = all((case, subject, quantity) in found for subject in subjects)
        if done:
            log(f"{benchmark} {case}: measured already, see {path}")
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
        """Write a row for each (quantity, unit); without samples, `note` gives the reason."""
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
            figure = f"{row.quantity} {format_interval(row)} {row.unit}" if row.repeats else note
            log(f"{benchmark} {case}: {subject}: {figure}")

    def compare(
        self,
        benchmark: str,
        case: str,
        workloads: Mapping[Subject, Workload],
        *,
        unit: str = "",
        epoch_size: int = 0,
        fresh: bool = False,
    ) -> None:
        """Measure subjects alternately and write a row for each.

        Args:
            benchmark: name of the CSV file.
            case: title of the comparison.
            workloads: picklable workloads by subject. An exception in UNAVAILABLE before the first
                item becomes the note of a row without a figure.
            unit: unit of the speed, such as `images/s`; empty: record the time per item in ms.
            epoch_size: samples per epoch of the published data.
            fresh: start new processes in each round.
        """
        quantity = SPEED if unit else STEP_TIME
        if self.is_done(benchmark, case, workloads, quantity):
            return
        sizes = self.sizes
        slice_s = sizes.slice_s or (SLICE_S if self.device.type == "cpu" else sizes.window_s)
        starts, rounds = (sizes.repeats, 1) if fresh else (1, sizes.repeats)
        speeds: dict[Subject, list[float]] = {subject: [] for subject in workloads}
        reasons: dict[Subject, str] = {}
        log(f"{benchmark} {case}: {len(workloads)} subjects")
        with progress(sizes.repeats, f"{benchmark} {case}") as bar:
            for _ in range(starts):
                found = measure(
                    {
                        who: partial(_run_on_device, self.device, work)
                        for who, work in workloads.items()
                    },
                    *(sizes.warmup_s, sizes.window_s, rounds, UNAVAILABLE, slice_s, bar.update),
                )
                for subject, outcome in found.items():
                    if isinstance(outcome, str):
                        reasons[subject] = f"not measured: {outcome}"
                    else:
                        speeds[subject] += outcome
        date = now()
        for subject in workloads:
            values = [] if subject in reasons else speeds[subject]
            samples = values if unit else [1000 / speed for speed in values]
            self.record(
                *(benchmark, case, subject, {(quantity, unit or "ms"): samples}),
                epoch_size=epoch_size,
                note=reasons.get(subject, ""),
                date=date,
            )


def _run_on_device(device: torch.device, workload: Workload, count_items: CountItems) -> None:
    resolve_device(str(device))  # also makes malloc keep freed memory, on a CPU
    workload(count_items)


def count_batches(
    batches: Iterable[Any], device: torch.device | None, count_items: CountItems
) -> NoReturn:
    """Count the samples of batch after batch, endlessly.

    Args:
        batches: endless, or iterable any number of times; tensors, sequences, or tuples of these.
        device: device to which the batches are copied; None: leave them where they are.
        count_items: ends the process.
    """
    while True:
        batch = None
        for batch in batches:
            parts = batch if isinstance(batch, tuple) else (batch,)
            if device is not None:
                parts = tuple(part.to(device, non_blocking=True) for part in parts)
            count_items(len(parts[0]))
        if batch is None:
            raise ValueError("no batch in an epoch; use more data or a smaller batch size")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def log(text: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(text.rstrip(), file=sys.stdout)


def progress(total: int, what: str) -> Any:
    """Progress bar of `total` rounds; shown on terminals only."""
    return tqdm(total=total, desc=what, unit="round", leave=False, disable=None)


def format_number(value: float) -> str:
    """Three significant digits; thousands separated by commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_interval(found: Measurement | Summary | None, unit: str = "") -> str:
    """Text such as `1,840 (1,800 to 1,890)`; the median alone for one sample, empty for none."""
    if found is None or found.median != found.median:
        return ""
    text = f"{format_number(found.median)}{unit}"
    if isinstance(found, Measurement) and found.repeats == 1:
        return text
    return f"{text} ({format_number(found.low)} to {format_number(found.high)})"


def default_results_dir() -> Path:
    """Folder `benchmarks/results/<machine>-<date>`."""
    date = datetime.now(UTC).date().isoformat()
    return Path(__file__).with_name("results") / f"{records.machine_name()}-{date}"
