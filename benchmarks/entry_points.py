"""Every script with every loader on 1 to N devices, each run in a process of its own.

On a machine without GPUs a device is one CPU core: a run on n devices gets n cores, and each of its
processes computes with one thread.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch

from benchmarks.records import REPOSITORY, Subject, cores
from benchmarks.run import SPEED, Run, now, progress
from benchmarks.template import make_config

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
# Quantities besides the speed and the final metric; the last one marks a combination as finished.
WAIT, MEMORY, WALL = "data wait", "peak memory", "run time"
GPU_MEMORY, GPU_USE, METRIC = "peak GPU memory", "GPU utilisation", "final metric"
# What a task is judged by, where it has one of these; else its first metric.
METRICS = ("val/top1", "val/psnr")

Answer = tuple[dict[str, Any], dict[tuple[str, str], float]]
"""A run's `summary.json`, and what it used by (quantity, unit)."""


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
    answers: dict[Subject, list[Answer]] = {
        job: [] for job in jobs if not run.is_done("entry_points", run.title, [job], WALL)
    }
    with progress(len(answers) * run.sizes.run_repeats, "entry_points") as bar:
        for repeat in range(run.sizes.run_repeats):
            for subject in list(answers):
                try:
                    answers[subject].append(run_once(run, subject))
                except ValueError as error:
                    del answers[subject]
                    note = f"not measured: {error}"
                    run.record("entry_points", run.title, subject, {(WALL, "s"): []}, note=note)
                    continue
                finally:
                    bar.update()
                if repeat == run.sizes.run_repeats - 1:
                    record(run, subject, answers[subject])


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
    with_torchrun = starts_with_torchrun(script)
    if run.device.type == "cuda":
        uses_all = with_torchrun or "DataParallel(" in (REPOSITORY / script).read_text()
        most = torch.cuda.device_count() if uses_all else 1
    else:
        most = len(cores()) if with_torchrun else 1
    if not run.sizes.every_combination and script != SCALED:
        return [most]
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def starts_with_torchrun(script: str) -> bool:
    return "torchrun" in (REPOSITORY / script).read_text()


def record(run: Run, subject: Subject, answers: list[Answer]) -> None:
    """Write the rows of one combination, from its runs' summaries and what they used."""
    summary = answers[0][0]
    metrics = [key for key in summary if key.startswith("val/")]
    metric = next((key for key in METRICS if key in metrics), metrics[0])
    samples: dict[tuple[str, str], list[float]] = {
        (SPEED, "images/s"): [found["perf/images_per_s"] for found, _ in answers],
        (WAIT, "%"): [100 * found["perf/data_wait_share"] for found, _ in answers],
    }
    for what in answers[0][1]:
        samples[what] = [usage[what] for _, usage in answers]
    if subject.settings != "loader=synthetic":
        name = metric.removeprefix("val/")
        samples[METRIC, name] = [found[metric] for found, _ in answers]
    samples[WALL, "s"] = [sum(found["seconds"].values()) for found, _ in answers]
    note = f"{summary['steps']} steps"
    run.record("entry_points", run.title, subject, samples, note=note, date=now())


def run_once(run: Run, subject: Subject) -> Answer:
    """Start the script as a user does; COPIES: as many baselines at once as there are devices.

    Raises:
        ValueError: it failed, and the message holds the end of what it wrote; or it was too short.
    """
    devices = range(subject.num_devices)
    each = [range(n, n + 1) for n in devices] if subject.name == COPIES else [devices]
    script = "train.py" if subject.name == COPIES else subject.name
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(len(each))]
        processes = [
            start(run, script, subject.settings, chosen, folder)
            for chosen, folder in zip(each, folders, strict=True)
        ]
        usage = watch(processes, devices if run.device.type == "cuda" else range(0))
        for process, folder in zip(processes, folders, strict=True):
            if process.returncode:
                raise ValueError(" ".join(Path(f"{folder}.txt").read_text().split()[-40:]))
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    if not all(summary["perf/images_per_s"] for summary in summaries):
        raise ValueError("it ended after its first step, which measures no speed")
    speed = sum(summary["perf/images_per_s"] for summary in summaries)
    return {**summaries[0], "perf/images_per_s": speed}, usage


def start(
    run: Run, script: str, settings: str, devices: range, folder: Path
) -> "subprocess.Popen[bytes]":
    """A script on some of the devices; what it prints goes into a file beside its folder."""
    env, mine = dict(os.environ), cores()
    prefix: list[str] = []
    if run.device.type == "cuda":
        visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(
            str(number) for number in range(torch.cuda.device_count())
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[n] for n in devices)
    else:
        env["OMP_NUM_THREADS"] = "1"
        if shutil.which("taskset"):  # Linux: a device is a core
            prefix = ["taskset", "--cpu-list", ",".join(str(mine[number]) for number in devices)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={len(devices)}"]
    global_batch_size = len(devices) * make_config(*run.overrides).global_batch_size
    command = [
        *(*prefix, sys.executable, *(launcher if starts_with_torchrun(script) else [])),
        *(script, f"epochs={run.sizes.epochs}"),
        *([f"max_steps={run.sizes.max_steps}"] if run.sizes.max_steps else []),
        *(*run.overrides, settings),
        *(f"output_dir={folder}", f"global_batch_size={global_batch_size}"),
    ]
    with Path(f"{folder}.txt").open("w") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=env, stdout=output, stderr=subprocess.STDOUT
        )


def watch(processes: "list[subprocess.Popen[bytes]]", gpus: range) -> dict[tuple[str, str], float]:
    """Wait for processes; returns the largest use of memory, and that of GPUs, by (quantity, unit).

    Pages of memory that processes share are counted once. GPU memory is what was not in use before;
    utilisation is the share of the time in which a kernel ran, from the first sample with one on.
    """
    before_gib = gpu_memory_gib(gpus)
    memory_gib = most_gib = used_gib = 0.0
    percents: list[float] = []
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(SAMPLE_EVERY_S)
            resident_gib = memory(processes, lambda process: process.memory_info().rss)
            if resident_gib > WORTH_COUNTING * most_gib:
                most_gib = resident_gib
                memory_gib = max(memory_gib, memory(processes, proportional))
            if gpus:
                used_gib = max(used_gib, gpu_memory_gib(gpus) - before_gib)
                percents.append(mean(torch.cuda.utilization(gpu) for gpu in gpus))
    finally:
        for process in processes:  # interrupted: torchrun ends its ranks itself
            if process.poll() is None:
                process.terminate()
            process.wait()
    usage = {(MEMORY, "GiB"): memory_gib}
    while percents and not percents[0]:
        percents.pop(0)
    if percents:
        usage |= {(GPU_MEMORY, "GiB"): used_gib, (GPU_USE, "%"): mean(percents)}
    return usage


def gpu_memory_gib(gpus: range) -> float:
    return sum(torch.cuda.device_memory_used(gpu) for gpu in gpus) / 2**30


def memory(
    processes: "list[subprocess.Popen[bytes]]", measure: Callable[[psutil.Process], int]
) -> float:
    """GiB of the processes and all of their children."""
    total = 0
    for parent in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(parent.pid)
            for process in [family, *family.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += measure(process)
    return total / 2**30


def proportional(process: psutil.Process) -> int:
    """Each page divided by the number of processes that share it, where the system knows that."""
    info = process.memory_full_info()
    return getattr(info, "pss", 0) or info.uss
