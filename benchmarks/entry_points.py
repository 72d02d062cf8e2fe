"""Every script with every loader on 1 to N devices, each run in a process of its own.

On a machine without GPUs a device is one CPU core: a run on n devices gets n cores, and each of its
processes computes with one thread.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch

from benchmarks.baselines import optional
from benchmarks.cases import REPOSITORY, make_config
from benchmarks.run import Run, Subject, now, progress, say

LOADERS = ("pytorch", "dali", "synthetic")
# Without `sizes.every_combination`: the loader, and the script that runs on 1 to N devices; all others
# take the largest number that they can.
SMALL_LOADERS = ("pytorch",)
SCALED = "train_ddp.py"
# As many baselines at once as there are devices: cores that share caches, memory or a clock limit let
# no script scale better.
COPIES = "limit: train.py on each device"
SAMPLE_EVERY_S = 0.5
# Counting shared pages once takes long and stops the processes: it is done when they have grown by this.
WORTH_COUNTING = 1.01
# What is recorded, with its unit; the last one marks a combination as finished.
SPEED, WAIT, MEMORY = "speed", "data wait", "peak memory"
GPU_MEMORY, GPU_USE, METRIC, WALL = "peak GPU memory", "GPU utilisation", "final metric", "run time"
UNITS = {SPEED: "images/s", WAIT: "%", MEMORY: "GiB", GPU_MEMORY: "GiB", GPU_USE: "%", WALL: "s"}


@dataclass
class Usage:
    """What a run used, sampled while it runs."""

    memory_gib: float = 0.0
    """Largest sum over the run's processes; pages that they share are counted once."""

    gpu_memory_gib: float = 0.0
    """Largest sum over the GPUs, less what was in use before."""

    gpu_percent: list[float] = field(default_factory=list)
    """Mean over the GPUs of the time in which a kernel ran, sample by sample."""

    @property
    def gpu_mean_percent(self) -> float | None:
        """Between the first and the last sample in which a GPU was used; None without GPU."""
        used = [number for number, value in enumerate(self.gpu_percent) if value > 0]
        return mean(self.gpu_percent[used[0] : used[-1] + 1]) if used else None


def main(run: Run) -> None:
    """The overrides of the command line choose data and model; by default digits and a small CNN."""
    jobs = [
        Subject(script, num_devices=devices, settings=f"loader={loader}")
        for script in run.scripts or scripts()
        for loader in loaders_of(run)
        for devices in device_counts(script, run)
    ]
    jobs += [
        Subject(COPIES, num_devices=devices, settings="loader=synthetic")
        for devices in device_counts(SCALED, run)
        if devices > 1
    ]
    case = " ".join(run.overrides) or "default configuration"
    answers: dict[Subject, list[tuple[dict[str, Any], Usage]]] = {}
    for subject in jobs:
        if run.is_done("entry_points", case, [subject], WALL):
            say(f"entry_points {subject}: measured already")
        else:
            answers[subject] = []
    repeats = run.sizes.run_repeats
    with progress(len(answers) * repeats, "entry_points") as bar:
        for repeat in range(repeats):
            for subject in list(answers):
                start = run_copies if subject.name == COPIES else run_once
                try:
                    answers[subject].append(start(run, subject))
                except ValueError as error:
                    del answers[subject]
                    run.record(
                        *("entry_points", case, subject, WALL, "s", []),
                        note=f"not measured: {error}",
                    )
                    continue
                finally:
                    bar.update()
                if repeat == repeats - 1:
                    record(run, case, subject, answers[subject])


def scripts() -> list[str]:
    """Names of all entry points, the baseline first."""
    return sorted((path.name for path in REPOSITORY.glob("train*.py")), key=lambda name: name[:-3])


def loaders_of(run: Run) -> tuple[str, ...]:
    """The one that the overrides choose, or those that the sizes do."""
    for override in reversed(run.overrides):
        if override.startswith("loader="):
            return (override.removeprefix("loader="),)
    return LOADERS if run.sizes.every_combination else SMALL_LOADERS


def device_counts(script: str, run: Run) -> list[int]:
    """1, 2, 4 ... up to all, or what the sizes choose of them; 1 for scripts that use only one device."""
    source = (REPOSITORY / script).read_text()
    if run.device.type == "cuda":
        most = torch.cuda.device_count() if "Parallel(" in source else 1
    else:
        most = len(cores()) if starts_with_torchrun(script) else 1
    if not run.sizes.every_combination and script != SCALED:
        return [most]
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def starts_with_torchrun(script: str) -> bool:
    return "init_process_group" in (REPOSITORY / script).read_text()


def record(
    run: Run, case: str, subject: Subject, answers: list[tuple[dict[str, Any], Usage]]
) -> None:
    """Write the rows of one combination, from its runs' summaries and what they used."""
    summaries = [summary for summary, _ in answers]
    usages = [usage for _, usage in answers]
    is_synthetic = subject.settings == "loader=synthetic"
    values: dict[str, list[float | None]] = {
        SPEED: [summary["perf/images_per_s"] for summary in summaries],
        WAIT: [100 * summary["perf/data_wait_share"] for summary in summaries],
        MEMORY: [usage.memory_gib for usage in usages],
        GPU_MEMORY: [usage.gpu_memory_gib or None for usage in usages],
        GPU_USE: [usage.gpu_mean_percent for usage in usages],
        METRIC: [None if is_synthetic else final_metric(s)[1] for s in summaries],
        WALL: [sum(summary["seconds"].values()) for summary in summaries],
    }
    units = UNITS | {METRIC: final_metric(summaries[0])[0]}
    steps = f"{summaries[0]['steps']} steps"
    date = now()
    for quantity, samples in values.items():
        known = [sample for sample in samples if sample is not None]
        if known:
            run.record(
                *("entry_points", case, subject, quantity, units[quantity], known),
                note=steps,
                date=date,
            )


def final_metric(summary: dict[str, Any]) -> tuple[str, float]:
    """Name and value of the metric that the task is judged by."""
    for name in ("val/top1", "val/psnr"):
        if name in summary:
            return name.removeprefix("val/"), summary[name]
    name = next(key for key in summary if key.startswith("val/"))
    return name.removeprefix("val/"), summary[name]


def run_copies(run: Run, subject: Subject) -> tuple[dict[str, Any], Usage]:
    """Independent runs of `train.py` at once, one on each device.

    Returns:
        The summary of the first one with the speed of all, and what they used together.

    Raises:
        ValueError: one failed.
    """
    copy = replace(subject, name="train.py", num_devices=1)
    devices = range(subject.num_devices)
    with ThreadPoolExecutor(len(devices)) as pool:
        runs = list(pool.map(lambda device: run_once(run, copy, first_device=device), devices))
    summaries, usages = zip(*runs, strict=True)
    speed = sum(summary["perf/images_per_s"] for summary in summaries)
    memory = sum(usage.memory_gib for usage in usages)
    return {**summaries[0], "perf/images_per_s": speed}, Usage(memory_gib=memory)


def run_once(run: Run, subject: Subject, first_device: int = 0) -> tuple[dict[str, Any], Usage]:
    """Start the script as a user does, on `subject.num_devices` devices from `first_device` on.

    Returns:
        Its `summary.json`, and what it used.

    Raises:
        ValueError: it failed, and the message holds the end of what it wrote; or it was too short.
    """
    devices, on_gpu = subject.num_devices, run.device.type == "cuda"
    chosen = slice(first_device, first_device + devices)
    gpus = visible_gpus()[chosen] if on_gpu else []
    cfg = make_config(*run.overrides)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if starts_with_torchrun(subject.name):
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={devices}",
            ]
        command += [
            *(subject.name, f"epochs={run.sizes.epochs}"),
            *([f"max_steps={run.sizes.max_steps}"] if run.sizes.max_steps else []),
            *(*run.overrides, subject.settings, f"output_dir={folder}/run"),
            f"global_batch_size={devices * cfg.global_batch_size}",
        ]
        env = dict(os.environ)
        if on_gpu:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        else:
            env["OMP_NUM_THREADS"] = "1"
        text = Path(folder, "output.txt")
        with text.open("w") as output, only_cores(None if on_gpu else chosen):
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=env, stdout=output, stderr=subprocess.STDOUT
            )
        usage = watch(process, gpus)
        if process.returncode:
            raise ValueError(" ".join(text.read_text().split()[-40:]))
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        if not summary["perf/images_per_s"]:
            raise ValueError("it ended after its first step, which measures no speed")
        return summary, usage


def cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def only_cores(chosen: slice | None) -> Iterator[None]:
    """What this thread starts meanwhile may use these cores only, where the system can do that."""
    if chosen is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    mine = cores()
    os.sched_setaffinity(0, mine[chosen])
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def visible_gpus() -> list[str]:
    """Numbers (or names) of the GPUs in the order in which torch counts them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def watch(process: "subprocess.Popen[bytes]", gpus: list[str]) -> Usage:
    """Sample what the process and its children use until it ends."""
    usage = Usage()
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, gpus, usage, over), daemon=True)
    sampler.start()
    try:
        process.wait()
    finally:
        over.set()
        sampler.join()
        if process.poll() is None:  # interrupted: torchrun ends its ranks itself
            process.terminate()
            process.wait()
    return usage


def _sample(pid: int, gpus: list[str], usage: Usage, over: threading.Event) -> None:
    nvml: Any = None
    handles: list[Any] = []
    if gpus:
        nvml = optional("pynvml", "nvidia-ml-py")
        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(gpu))
            if gpu.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(gpu)
            for gpu in gpus
        ]
    before = sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    most_resident = 0.0
    while not over.wait(SAMPLE_EVERY_S):
        resident = sum(_memory(pid, _resident))
        if resident > WORTH_COUNTING * most_resident:
            most_resident = resident
            usage.memory_gib = max(usage.memory_gib, sum(_memory(pid, _proportional)) / 2**30)
        if handles:
            used = sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) - before
            usage.gpu_memory_gib = max(usage.gpu_memory_gib, used / 2**30)
            usage.gpu_percent.append(
                mean(nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles)
            )


def _memory(pid: int, measure: Callable[[psutil.Process], int]) -> Iterator[int]:
    """Bytes of the process and of each of its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                yield measure(process)


def _resident(process: psutil.Process) -> int:
    return process.memory_info().rss


def _proportional(process: psutil.Process) -> int:
    """Each page divided by the number of processes that share it, where the system knows that."""
    info = process.memory_full_info()
    return getattr(info, "pss", 0) or info.uss
