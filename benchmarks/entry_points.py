"""Every script with every loader on 1 to N devices, each run in a process of its own.

On a machine without GPUs a device is one CPU core: a run on n devices gets n cores, and each of its
processes computes with one thread.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import REPOSITORY
from benchmarks.records import Subject, cores
from benchmarks.run import SPEED, Run, now, progress
from benchmarks.template import make_config
from compose import allowed_sets, compose

LOADERS = ("pytorch", "dali", "synthetic")
# Without `sizes.full`: the loader, and the script that runs on 1 to N devices; all others
# take the largest number that they can.
SMALL_LOADERS = ("pytorch",)
SCALED = "train_ddp.py"
# Quantities besides the speed and the final metric; the last one marks a combination as finished.
WAIT, WALL = "data wait", "run time"
# What a task is judged by, where it has one of these; else its first metric.
METRICS = ("val/top1", "val/psnr")

Figures = dict[tuple[str, str], float]
"""What came of one run, by (quantity, unit)."""


def main(run: Run, names: Sequence[str] = ()) -> None:
    """Run these entry points, by default all, on the data and model that the overrides choose."""
    given = tuple(o.removeprefix("loader=") for o in run.overrides if o.startswith("loader="))
    jobs = [
        Subject(script, num_devices=devices, settings=f"loader={loader}")
        for script in names or scripts()
        for loader in given[-1:] or (LOADERS if run.sizes.full else SMALL_LOADERS)
        for devices in device_counts(script, run)
    ]
    left = [job for job in jobs if not run.is_done("entry_points", run.title, [job], WALL)]
    found: dict[Subject, list[Figures]] = {job: [] for job in left}
    with progress(len(left) * run.sizes.run_repeats, "entry_points") as bar:
        for job in left * run.sizes.run_repeats:
            if job in found:
                try:
                    found[job].append(run_once(run, job))
                except ValueError as error:
                    del found[job]
                    note = f"not measured: {error}"
                    run.record("entry_points", run.title, job, {(WALL, "s"): []}, note=note)
            bar.update()
            if len(runs := found.get(job, [])) == run.sizes.run_repeats:
                samples = {key: [figures[key] for figures in runs] for key in runs[0]}
                run.record("entry_points", run.title, job, samples, date=now())


def scripts() -> list[str]:
    """Names of all entry points, the baseline first."""
    return sorted((path.name for path in REPOSITORY.glob("train*.py")), key=lambda name: name[:-3])


def merges_of_two(folder: Path) -> list[Path]:
    """All merges of two techniques, written into a folder; none if git, which merges, is not installed."""
    folder.mkdir()
    (folder / "conf").symlink_to(REPOSITORY / "conf")
    for names in allowed_sets() if shutil.which("git") else ():
        if len(names) == 2:
            (folder / f"train_{'_'.join(names)}.py").write_text(compose(list(names)))
    return sorted(folder.glob("*.py"))


def device_counts(script: str, run: Run) -> list[int]:
    """1, 2, 4 ... up to all, or what the sizes choose of them; 1 for scripts that use only one device."""
    with_torchrun = starts_with_torchrun(script)
    if run.device.type == "cuda":
        uses_all = with_torchrun or "DataParallel(" in (REPOSITORY / script).read_text()
        most = torch.cuda.device_count() if uses_all else 1
    else:
        most = len(cores()) if with_torchrun else 1
    if not run.sizes.full and script != SCALED:
        return [most]
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def starts_with_torchrun(script: str) -> bool:
    return "torchrun" in (REPOSITORY / script).read_text()


def run_once(run: Run, subject: Subject) -> Figures:
    """Start the script as a user does.

    Raises:
        ValueError: it failed, and the message holds the end of what it wrote; or it was too short.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        process = start(run, subject.name, subject.settings, subject.num_devices, folder)
        try:
            if process.wait():
                raise ValueError(" ".join(Path(f"{folder}.txt").read_text().split()[-40:]))
        finally:  # interrupted: torchrun ends its ranks itself
            process.terminate()
            process.wait()
        summary = json.loads((folder / "summary.json").read_text())
    if not summary["perf/images_per_s"]:
        raise ValueError("it ended after its first step, which measures no speed")
    figures = {
        (SPEED, "images/s"): summary["perf/images_per_s"],
        (WAIT, "%"): 100 * summary["perf/data_wait_share"],
    }
    if subject.settings != "loader=synthetic":
        metrics = [key for key in summary if key.startswith("val/")]
        metric = next((key for key in METRICS if key in metrics), metrics[0])
        figures["final metric", metric.removeprefix("val/")] = summary[metric]
    return {**figures, (WALL, "s"): sum(summary["seconds"].values())}


def start(
    run: Run, script: str, settings: str, num_devices: int, folder: Path
) -> "subprocess.Popen[bytes]":
    """A script on some of the devices; what it prints goes into a file beside its folder."""
    env = dict(os.environ)
    prefix: list[str] = []
    if run.device.type == "cuda":
        visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(
            str(number) for number in range(torch.cuda.device_count())
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_devices])
    else:
        env["OMP_NUM_THREADS"] = "1"
        if shutil.which("taskset"):  # Linux: a device is a core
            prefix = ["taskset", "--cpu-list", ",".join(map(str, cores()[:num_devices]))]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_devices}"]
    global_batch_size = num_devices * make_config(*run.overrides).global_batch_size
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
