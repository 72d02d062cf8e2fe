"""Speed of every training script with every loader on 1 to N devices, each run in its own process.

On a machine without GPUs, a device is one CPU core: a run on n devices gets n cores, and each of
its processes computes with one thread.
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
from tests.test_side_by_side import allowed_sets
from tools.compose import compose

LOADERS = ("pytorch", "dali", "synthetic")
# At small sizes: the only loader, and the only script that runs on 1 to N devices. All other
# scripts run on as many devices as they support.
SMALL_LOADERS = ("pytorch",)
SCALED = "train_ddp.py"
# Further quantities; a row with the last one marks a combination as finished.
WAIT, WALL = "data wait", "run time"
# Metric to report, if the task has one of these; otherwise its first one.
METRICS = ("val/top1", "val/psnr")

Figures = dict[tuple[str, str], float]
"""Results of one run, by (quantity, unit)."""


def main(run: Run, names: Sequence[str] = ()) -> None:
    """Run the scripts `names`, by default all, with the data and model of the overrides."""
    given = tuple(o.removeprefix("loader=") for o in run.overrides if o.startswith("loader="))
    jobs = [
        Subject(script, num_devices=devices, settings=f"loader={loader}")
        for script in names or scripts()
        for loader in given[-1:] or (LOADERS if run.sizes.full else SMALL_LOADERS)
        for devices in device_counts(script, run)
    ]
    remaining = [job for job in jobs if not run.is_done("entry_points", run.title, [job], WALL)]
    results: dict[Subject, list[Figures]] = {job: [] for job in remaining}
    with progress(len(remaining) * run.sizes.run_repeats, "entry_points") as bar:
        for job in remaining * run.sizes.run_repeats:
            if job in results:
                try:
                    results[job].append(run_once(run, job))
                except ValueError as error:
                    del results[job]
                    note = f"not measured: {error}"
                    run.record("entry_points", run.title, job, {(WALL, "s"): []}, note=note)
            bar.update()
            if len(runs := results.get(job, [])) == run.sizes.run_repeats:
                samples = {key: [figures[key] for figures in runs] for key in runs[0]}
                run.record("entry_points", run.title, job, samples, date=now())


def scripts() -> list[str]:
    """File names of all training scripts, the baseline first."""
    return sorted((path.name for path in REPOSITORY.glob("train*.py")), key=lambda name: name[:-3])


def merges_of_two(folder: Path) -> list[Path]:
    """Write all scripts that combine two techniques; none without git, which merges them."""
    folder.mkdir()
    (folder / "conf").symlink_to(REPOSITORY / "conf")
    for names in allowed_sets() if shutil.which("git") else ():
        if len(names) == 2:
            (folder / f"train_{'_'.join(names)}.py").write_text(compose(list(names)))
    return sorted(folder.glob("*.py"))


def device_counts(script: str, run: Run) -> list[int]:
    """Numbers of devices for a script: 1, 2, 4, ... up to the maximum, or only the maximum."""
    with_torchrun = starts_with_torchrun(script)
    if run.device.type == "cuda":
        uses_all = with_torchrun or "DataParallel(" in (REPOSITORY / script).read_text()
        maximum = torch.cuda.device_count() if uses_all else 1
    else:
        maximum = len(cores()) if with_torchrun else 1
    if not run.sizes.full and script != SCALED:
        return [maximum]
    return sorted({min(2**power, maximum) for power in range(maximum.bit_length() + 1)})


def starts_with_torchrun(script: str) -> bool:
    return "torchrun" in (REPOSITORY / script).read_text()


def run_once(run: Run, subject: Subject) -> Figures:
    """Run a script once, as a user starts it.

    Raises:
        ValueError: the run failed (with the end of its output) or was too short for a speed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        process = start(run, subject.name, subject.settings, subject.num_devices, folder)
        try:
            if process.wait():
                raise ValueError(" ".join(Path(f"{folder}.txt").read_text().split()[-40:]))
        finally:  # after an interrupt, torchrun ends its ranks
            process.terminate()
            process.wait()
        summary = json.loads((folder / "summary.json").read_text())
    if not summary["perf/images_per_s"]:
        raise ValueError("the run ended after its first step, before its speed could be measured")
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
    """Start a script on some of the devices; its output goes to the file `folder` + `.txt`."""
    env = dict(os.environ)
    prefix: list[str] = []
    if run.device.type == "cuda":
        visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(
            str(number) for number in range(torch.cuda.device_count())
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_devices])
    else:
        env["OMP_NUM_THREADS"] = "1"
        if shutil.which("taskset"):  # Linux only
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
