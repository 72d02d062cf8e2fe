"""All that only a GPU can show, in one command: `make gpu-check`.

    python -m benchmarks.gpu_check                              all, within 20 minutes on one GPU
    python -m benchmarks.gpu_check parts=versions,speeds        these parts
    python -m benchmarks.gpu_check parts=batches only=uint16    of the tests these (pytest's -k)

Other arguments: `results=DIR` (default: benchmarks/results/gpu-check-<machine>-<date>), `minutes=20` for all,
`limit=60` for the longest part in seconds, `small=true` for figures from a few steps.

The parts run in order of importance, each in a process that ends with its time limit, whatever came of those
before. A result is in `checks.csv` as soon as it is known; `checks.md` is written after each part. Without a
GPU, the parts do on the CPU what can be done there, and say what was not checked.
"""

import csv
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks import REPOSITORY
from benchmarks.cases import CASES
from benchmarks.entry_points import LOADERS, WAIT, scripts, start
from benchmarks.records import Subject, cores, machine
from benchmarks.run import SPEED, UNAVAILABLE, Run, Sizes, now, number, results_folder, say
from benchmarks.step import train
from benchmarks.template import parts
from benchmarks.turns import PRELOAD
from runtime.setup import NVIDIA_DRIVER, resolve_device
from runtime.timing import Timing

PASSED, FAILED, NOT_CHECKED, MEASURED = "passed", "failed", "not checked", "measured"
SETTINGS = {"results": "", "parts": "", "only": "", "minutes": "20", "limit": "inf", "small": ""}
NVIDIA_SMI = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
SAMPLE_S = 0.2
LAST_WORDS = 30


@dataclass(frozen=True)
class Row:
    """What came of one thing that was looked at."""

    part: str
    what: str
    outcome: str
    value: str
    seconds: float
    note: str


@dataclass(frozen=True)
class Check:
    """A part at work."""

    folder: Path
    """Where all results go."""

    part: str

    only: str = ""
    """Of the tests those that pytest chooses by this expression; empty: all."""

    small: bool = False
    """Few steps, small data: to try the check itself."""

    def tell(
        self, what: str, outcome: str, value: str = "", seconds: float = 0.0, note: str = ""
    ) -> None:
        """Write a row down now: nobody knows whether there is time for the next one."""
        path = self.folder / "checks.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(field.name for field in fields(Row))
            one_line = " ".join(note.split())
            writer.writerow(astuple(Row(self.part, what, outcome, value, seconds, one_line)))
        say(f"{self.part}: {what}: {value or outcome}")

    def run(self, *overrides: str, num_images: int = 64, max_steps: int | None = None) -> Run:
        """Settings of the benchmarks that a part makes use of."""
        num_images = 16 if self.small else num_images
        data = {case.generator: num_images for case in CASES.values()} | {"deblur": 8}
        sizes = Sizes(data=data, epochs=1000, max_steps=max_steps)
        return Run(self.folder, sizes, overrides)


def versions(check: Check) -> None:
    """What this machine has."""
    facts = machine()
    check.tell("packages", MEASURED, facts["versions"])
    check.tell("processor", MEASURED, f"{facts['cpu']}, {facts['cores']} cores")
    check.tell("commit", MEASURED, facts["commit"])
    check.tell("CUDA of PyTorch", MEASURED, str(torch.version.cuda))
    check.tell("cuDNN", MEASURED, str(torch.backends.cudnn.version()))
    if NVIDIA_DRIVER.exists():
        check.tell("driver", MEASURED, NVIDIA_DRIVER.read_text().splitlines()[0])
    if not torch.cuda.is_available():
        check.tell("GPU", NOT_CHECKED, note="there is none: stand-ins on the CPU follow")
        return
    check.tell("NCCL", MEASURED, ".".join(map(str, torch.cuda.nccl.version())))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        value = (
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"
        )
        check.tell(f"GPU {index}", MEASURED, value)


def tests(expression: str, *files: str) -> Callable[[Check], None]:
    """A part that runs tests of GPUs; without one, their stand-ins."""

    def run(check: Check) -> None:
        import pytest

        chosen = f"({expression}) and ({check.only})" if check.only else expression
        marks = ["-m", "gpu"] if torch.cuda.device_count() else []
        paths = [str(REPOSITORY / "tests" / name) for name in files or ("test_gpu.py",)]
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={REPOSITORY}", "-k", chosen]
        status = pytest.main([*options, *marks, *paths], plugins=[_Reporter(check)])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ended with {status!r}")

    return run


class _Reporter:
    """A plugin of pytest."""

    def __init__(self, check: Check) -> None:
        self.check = check

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            outcome = PASSED if report.passed else FAILED if report.failed else NOT_CHECKED
            note = report.longrepr[2] if report.skipped else report.longreprtext[-1000:]
            name = report.nodeid.rpartition("::")[2]
            self.check.tell(name, outcome, seconds=round(report.duration, 2), note=note)


def entry_points(check: Check) -> None:
    """Every script with every loader on every experiment for two steps."""
    run = check.run("log.every_steps=1", num_images=160, max_steps=2)
    lock = threading.Lock()
    names = ["mnist"] if check.small else [name for name in CASES if name != "pairs"]
    jobs = [(name, loader, script) for name in names for loader in LOADERS for script in scripts()]

    def one(name: str, loader: str, script: str) -> None:
        begin, what = time.monotonic(), f"{script}, {loader}, {name}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                with lock:  # Hydra composes one configuration at a time
                    chosen = Run(run.folder, run.sizes, tuple(run.case_overrides(name)))
                    process = start(chosen, script, f"loader={loader}", 1, Path(folder, "run"))
                status = process.wait()
                words = " ".join(Path(folder, "run.txt").read_text().split()[-LAST_WORDS:])
        except Exception as error:
            status, words = 1, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - begin, 1)
        with lock:
            check.tell(what, FAILED if status else PASSED, "", seconds, words if status else "")

    with ThreadPoolExecutor(max(1, len(cores()) // 3)) as pool:
        for future in [pool.submit(one, *job) for job in jobs]:
            future.result()


SPEEDS: list[tuple[str, tuple[str, ...], bool]] = [
    ("float32 as PyTorch does", (), False),
    ("float32, ieee", ("fp32_precision=ieee",), False),
    ("float32, tf32", ("fp32_precision=tf32",), False),
    ("bfloat16", ("amp.dtype=bfloat16",), True),
    ("float16", ("amp.dtype=float16",), True),
    ("float16, channels_last", ("amp.dtype=float16", "model.channels_last=true"), True),
    (
        "float16, channels_last, compiled",
        ("amp.dtype=float16", "model.channels_last=true", "model.compile=true"),
        True,
    ),
]
"""How ResNet-50 is trained: name, overrides, and whether in AMP."""

FEW, MANY = (1, 2), (8, 24)
"""Steps before anything is counted, and after."""


def speeds(check: Check) -> None:
    """ResNet-50 on JPEGs cut to 224x224: images/s and data wait, against batches on the device."""
    device = resolve_device("auto")
    on_gpu = device.type == "cuda"
    model: tuple[str, ...] = ("model=torchvision", "model.arch=resnet50", "global_batch_size=256")
    if not on_gpu or check.small:
        model = ("model=small_cnn", "data.resize=64", "data.crop=[64,64]", "global_batch_size=4")
    run = check.run(*model, num_images=4096 if on_gpu else 64)
    warmup, measured = FEW if check.small or not on_gpu else MANY
    for name, overrides, amp in SPEEDS:
        synthetic = 0.0
        for loader in ("synthetic", "dali", "pytorch"):
            what = f"{name}, {loader}"
            if not on_gpu and name.startswith("float16"):
                check.tell(what, NOT_CHECKED, note="there is no GPU, and CPUs are slow in it")
                continue
            begin = time.monotonic()
            try:
                cfg = run.config("caltech256", *overrides, f"loader={loader}")
                timing = steps(cfg, device, amp, warmup, measured)
            except (*UNAVAILABLE, RuntimeError) as error:
                check.tell(what, FAILED, note=f"{type(error).__name__}: {error}")
                continue
            finally:
                torch.compiler.reset()
                if on_gpu:
                    torch.cuda.empty_cache()
            synthetic = timing.images_per_s if loader == "synthetic" else synthetic
            value = f"{number(timing.images_per_s)} images/s"
            value += f", {timing.data_wait_share:.0%} waiting for data"
            if loader != "synthetic" and synthetic:
                value += f", {timing.images_per_s / synthetic:.2f} of synthetic"
            check.tell(what, MEASURED, value, round(time.monotonic() - begin, 1))
            samples = {
                (SPEED, "images/s"): [timing.images_per_s],
                (WAIT, "%"): [100 * timing.data_wait_share],
            }
            run.record("gpu_check", name, Subject(f"loader={loader}"), samples, date=now())


class _Timed:
    """A loader whose batches are waited for under a clock."""

    def __init__(self, loader: Any, timing: Timing) -> None:
        self.loader, self.timing = loader, timing
        self.set_epoch = loader.set_epoch

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            with self.timing.data_wait():
                batch = next(batches, None)
            if batch is None:
                return
            self.timing.step(len(batch[0]))
            yield batch


class _Enough(Exception):
    pass


def steps(cfg: Any, device: torch.device, amp: bool, warmup: int, measured: int) -> Timing:
    """The time of so many training steps, all of them finished, after others."""
    loader, *others = parts(cfg, device)
    timed = _Timed(loader, Timing(device))
    done = 0

    def count(_: int) -> None:
        nonlocal done
        done += 1
        if done in (warmup, warmup + measured) and device.type == "cuda":
            torch.cuda.synchronize(device)
        if done == warmup + measured:
            timed.timing.finished()
            raise _Enough
        if done == warmup:
            timed.timing = Timing(device)
            timed.timing.seconds["first_step"] = 0.0  # it is over
        else:
            timed.timing.end_step()

    with suppress(_Enough):
        train(cfg, (timed, *others), device, count, amp)
    return timed.timing


WAYS = ("loader=pytorch", "loader=dali")


def utilisation(check: Check) -> None:
    """How busy the device is over time, with one loading thread of PyTorch and with DALI."""
    seconds = 1.0 if check.small else 40.0
    on_gpu = resolve_device("auto").type == "cuda"
    model = (
        ("model=torchvision", "model.arch=resnet50", "global_batch_size=256")
        if on_gpu
        else ("model=small_cnn",)
    )
    run = check.run(*model, num_images=4096 if on_gpu else 64)
    found: dict[str, list[tuple[float, float]]] = {}
    path = check.folder / "utilisation.csv"
    with path.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        writer.writerow(("way", "seconds", "percent"))
        for number_of_way, way in enumerate(WAYS):
            threads = ["loader.num_threads=1"] if way == "loader=pytorch" else []
            overrides = (*run.case_overrides("caltech256"), *threads)
            chosen = Run(run.folder, run.sizes, overrides)
            process = start(chosen, "train_amp.py", way, 1, Path(folder, f"run{number_of_way}"))
            found[way] = []
            try:
                for moment, percent in samples_of(on_gpu):
                    if moment > seconds or process.poll() is not None:
                        break
                    found[way].append((moment, percent))
                    writer.writerow((way, f"{moment:.2f}", percent))
                    file.flush()
                status = process.poll()
            finally:
                process.kill()
                process.wait()
            if status is not None:
                words = Path(folder, f"run{number_of_way}.txt").read_text().split()[-LAST_WORDS:]
                check.tell(way, FAILED, note=f"it ended with {status}: {' '.join(words)}")
                continue
            half = [percent for moment, percent in found[way] if moment > seconds / 2]
            device = "GPU" if on_gpu else "CPU"
            check.tell(
                way, MEASURED, f"{device} {median(half or [0.0]):.0f} % busy in the 2nd half"
            )
    draw(check.folder / "utilisation.png", found, "GPU" if on_gpu else "CPU")


def samples_of(on_gpu: bool) -> Iterator[tuple[float, float]]:
    """Seconds since the start, and how busy the first GPU, or all CPUs, have been, in percent."""
    begin = time.monotonic()
    if not on_gpu:
        while True:
            percent = psutil.cpu_percent(SAMPLE_S)
            yield time.monotonic() - begin, percent
    command = [*NVIDIA_SMI, "--id=0", f"--loop-ms={1000 * SAMPLE_S:.0f}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                yield time.monotonic() - begin, float(line)
        finally:
            process.kill()


def draw(path: Path, found: dict[str, list[tuple[float, float]]], device: str) -> None:
    """Write a PNG with a line for each way; without matplotlib there is the CSV file only."""
    try:
        from benchmarks.plots import DPI, WIDTH_INCHES, plt
    except ModuleNotFoundError:
        return
    figure, ax = plt.subplots(figsize=(WIDTH_INCHES, 3), layout="constrained")
    for way, points in found.items():
        ax.plot(*zip(*points, strict=True) if points else ([], []), label=way, linewidth=1)
    ax.set_xlabel("seconds since the start of the script")
    ax.set_ylabel(f"{device} busy, %")
    ax.set_ylim(0, 105)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


TASK_TESTS = sorted(path.name for path in (REPOSITORY / "tests").glob("test_task_*.py"))
# All tests that no other part has; that of the entry points does little that `entry_points` does not.
RUNS = "not (batches or skipped or nan or memory or waits or every_entry_point)"
PARTS: dict[str, tuple[float, Callable[[Check], None]]] = {
    "versions": (60, versions),
    "batches": (240, tests("batches or skipped")),
    "guard": (60, tests("nan")),
    "memory and waits": (120, tests("memory or waits")),
    "entry points": (300, entry_points),
    "runs": (360, tests(RUNS)),
    "speeds": (360, speeds),
    "utilisation": (100, utilisation),
    "other tests": (90, tests("cuda", "test_runtime.py", "test_evaluate.py", *TASK_TESTS)),
}
"""By name: the most seconds it may take, and what it does."""


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status: 1 if anything failed."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    settings = dict(SETTINGS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in settings:
            sys.exit(f"{argument} is no setting; use {'=, '.join(SETTINGS)}=")
        settings[key] = value
    names = settings["parts"].split(",") if settings["parts"] else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"parts={settings['parts']}: {unknown[0]} is unknown; use {', '.join(PARTS)}")
    default = results_folder()
    folder = Path(settings["results"] or default.with_name(f"gpu-check-{default.name}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checks.csv").unlink(missing_ok=True)
    end = time.monotonic() + 60 * float(settings["minutes"])
    for name in names:
        limit_s = min(PARTS[name][0], float(settings["limit"]), end - time.monotonic())
        check = Check(folder, name, settings["only"], settings["small"] == "true")
        if limit_s <= 0:
            check.tell("all of it", NOT_CHECKED, note="the time for all parts is over")
        else:
            run_part(check, limit_s)
        rows = write_table(folder)
    say(f"report: {folder / 'checks.md'}")
    return int(any(row["outcome"] == FAILED for row in rows))


def run_part(check: Check, limit_s: float) -> None:
    """Do a part in a process group of its own, none of which is left afterwards."""
    say(f"{check.part}: at most {limit_s:.0f} s")
    begin = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_work, args=(check,))
    process.start()
    process.join(limit_s)
    status = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # if it had no group yet
    process.join()
    note = f"see {log_of(check).name}" if status else ""
    if status is None:
        note = f"stopped after {limit_s:.0f} s; what is missing was not reached"
    outcome = PASSED if status == 0 else FAILED
    check.tell("all of it", outcome, seconds=round(time.monotonic() - begin, 1), note=note)


def log_of(check: Check) -> Path:
    return check.folder / f"{check.part.replace(' ', '_')}.txt"


def _work(check: Check) -> None:
    os.setsid()
    threading.Thread(target=_end_with_the_check, daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # the platform's default for its workers
    file = os.open(log_of(check), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(REPOSITORY)
    PARTS[check.part][1](check)


def _end_with_the_check() -> None:
    """End this part's processes when nobody is there any more who would."""
    check = multiprocessing.parent_process()
    assert check is not None
    check.join()
    os.killpg(0, signal.SIGKILL)


def write_table(folder: Path) -> list[dict[str, str]]:
    """Write `checks.md` from `checks.csv`, what failed first; returns the rows."""
    with (folder / "checks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts = {
        outcome: sum(row["outcome"] == outcome for row in rows)
        for outcome in (FAILED, PASSED, MEASURED, NOT_CHECKED)
    }
    lines = [
        "# GPU check",
        "",
        f"{now()}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".",
        "",
        "| part | what | outcome | value | seconds | note |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: row["outcome"] != FAILED):
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in row.values()) + " |")
    if (folder / "utilisation.png").exists():
        lines += ["", "![How busy the device is](utilisation.png)"]
    (folder / "checks.md").write_text("\n".join(lines) + "\n")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
