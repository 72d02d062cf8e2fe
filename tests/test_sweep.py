"""`sweep.py` starts a run for each combination of values, and goes on where runs were killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import sweep
from runtime.preemption import EXIT_CODE
from tests.helpers import REPOSITORY

# A training script that makes a checkpoint per second until it has as many as it shall, and writes down
# how it was started. With a `die` of its seed it ends once, after its first checkpoint.
TRAIN = """
import json, os, pathlib, signal, sys, time

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = pathlib.Path(given["output_dir"])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").touch()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with (folder / "starts.txt").open("a") as file:
    gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")
    print(time.time(), gpus, threads, given["resume"], sep=";", file=file)
if given["seed"] == "13":
    sys.exit(2)
while (number := len(list(folder.glob("checkpoints/*")))) < int(given.get("steps", 1)):
    time.sleep(0.3)
    (folder / "checkpoints" / f"step-{number}.pt").touch()
    if asked:
        sys.exit(75)
    if given["seed"] == given.get("die") and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
best = {"val/top1": float(given["lr"]), "val/loss": 1.0}
(folder / "run.json").write_text(json.dumps({"settings": {"seed": given["seed"]}}))
(folder / "summary.json").write_text(json.dumps({"best": best, "best_metric": "val/top1"}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, REPOSITORY / "sweep.py", "--out", "out", *arguments],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def starts_of(folder: Path) -> dict[str, list[list[str]]]:
    files = sorted(folder.glob("out/*/starts.txt"))
    return {
        file.parent.name: [line.split(";") for line in file.read_text().splitlines()]
        for file in files
    }


def test_every_combination_runs_once_and_killed_ones_go_on(folder: Path) -> None:
    arguments = ["--jobs", "2", "train.py", "lr=0.1,0.2", "seed=1,2", "steps=2", "die=2"]
    status, said = end(start(folder, *arguments))
    assert status == 0, said
    starts = starts_of(folder)
    assert {name: len(lines) for name, lines in starts.items()} == {
        "0-lr_0.1-seed_1": 1,
        "1-lr_0.1-seed_2": 2,
        "2-lr_0.2-seed_1": 1,
        "3-lr_0.2-seed_2": 2,
    }
    assert all(line[3] == "auto" for lines in starts.values() for line in lines)
    table = said.splitlines()[-5:]
    assert table[0].split() == ["run", "best", "images/s", "settings"]
    assert [line.split()[2] for line in table[1:]] == ["0.2000", "0.2000", "0.1000", "0.1000"]
    # The same command again has nothing left to do.
    status, said = end(start(folder, *arguments))
    assert status == 0
    assert "4 runs, 4 have ended already" in said
    assert starts_of(folder) == starts


def test_runs_at_a_time_share_no_gpu_and_are_no_more_than_asked_for(folder: Path) -> None:
    arguments = ["--jobs", "2", "--ranks", "2", "train.py", "seed=1"]
    status, said = end(start(folder, *arguments, CUDA_VISIBLE_DEVICES="4,5,6"))
    assert status == 2
    assert said.strip() == (
        "--jobs 2 of 2 ranks need 4 GPUs, but there are 3; use fewer, or device=cpu"
    )
    arguments = ["--jobs", "2", "train.py", "lr=1", "seed=1,2,3,4", "steps=3"]
    status, said = end(start(folder, *arguments, CUDA_VISIBLE_DEVICES="4,5,6"))
    assert status == 0, said
    [first, second, third, fourth] = [lines[0] for lines in starts_of(folder).values()]
    assert {first[1], second[1]} == {"4", "5"} == {third[1], fourth[1]}
    # The third one starts when one of the first two has ended, after three steps of 0.3 s.
    assert float(third[0]) - float(first[0]) > 0.8


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("4,5,6", "5"), ("GPU-a,GPU-b,-1,6", "GPU-b"), ("-1", None), ("", None)],
)
def test_a_gpu_that_cuda_does_not_see_is_none(visible: str, expected, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = sweep.environment(Namespace(ranks=None, jobs=2, overrides=[]), 1)
    assert found["CUDA_VISIBLE_DEVICES"] == (visible if expected is None else expected)
    assert ("OMP_NUM_THREADS" in found) == (expected is None)


def test_a_run_that_fails_is_told_and_does_not_end_the_others(folder: Path) -> None:
    status, said = end(start(folder, "train.py", "lr=1", "seed=13,1"))
    assert status == 1
    assert "0-seed_13: failed with exit code 2; the end of out/0-seed_13.log:" in said
    assert [len(lines) for lines in starts_of(folder).values()] == [1, 1]
    assert (folder / "out" / "1-seed_1" / "summary.json").exists()


def test_a_sweep_that_is_asked_to_leave_lets_its_runs_save_and_goes_on_later(folder: Path) -> None:
    arguments = ["train.py", "lr=1", "seed=1,2", "steps=4"]
    process = start(folder, *arguments)
    while not list(folder.glob("out/0*/checkpoints/*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, said = end(process)
    assert status == sweep.ASKED_TO_LEAVE == EXIT_CODE
    assert "the same command again goes on with out" in said
    assert list(starts_of(folder)) == ["0-seed_1"]
    status, said = end(start(folder, *arguments))
    assert status == 0, said
    assert [len(lines) for lines in starts_of(folder).values()] == [2, 1]


def test_a_sweep_that_is_killed_takes_its_runs_with_it(folder: Path) -> None:
    process = start(folder, "train.py", "lr=1", "seed=1", "steps=1000")
    while not list(folder.glob("out/0*/checkpoints/*")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    time.sleep(1)
    before = len(list(folder.glob("out/0*/checkpoints/*")))
    time.sleep(1)
    assert len(list(folder.glob("out/0*/checkpoints/*"))) == before


def test_optuna_chooses_by_what_the_runs_before_reached_and_goes_on_later(folder: Path) -> None:
    pytest.importorskip("optuna")
    arguments = ["--jobs", "2", "train.py", "lr=interval(0,1)", "seed=1,2", "steps=1"]
    status, said = end(start(folder, "--trials", "13", *arguments))
    assert status == 0, said
    before = starts_of(folder)
    assert len(before) == 13
    status, said = end(start(folder, "--trials", "26", *arguments))
    assert status == 0, said
    assert "26 runs, 13 have ended already" in said
    starts = starts_of(folder)
    assert {name: starts[name] for name in before} == before
    numbered = sorted(starts, key=lambda name: int(name.partition("-")[0]))
    lrs = [float(name.split("_")[1].partition("-")[0]) for name in numbered]
    assert len(set(lrs)) == 26
    # The stand-in's metric is its learning rate. Optuna draws ten at random, and then near the best.
    assert sum(lrs[13:]) / 13 > sum(lrs[:10]) / 10 + 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train_me.py"], "train_me.py is no file; give a training script, such as train.py"),
        (["--jobs", "0", "train.py"], "--jobs 0 is less than 1; use 1 or more"),
        (["train_ddp.py"], "train_ddp.py is started by torchrun: say with how many --ranks"),
        (["train.py", "output_dir=a"], "output_dir= would be the folder of all runs; use --out"),
        (["train.py", "seed=[1"], "seed=[1: "),
        (["train.py", "lr=interval(0,1)"], "lr=interval(0,1) has no end of values; use --trials"),
        (["--trials", "0", "train.py"], "--trials 0 is less than 1; use 1 or more"),
        (["--trials", "2", "--slurm", "", "train.py"], "--trials waits for results"),
    ],
)
def test_mistakes_end_in_one_line(folder: Path, arguments: list[str], message: str) -> None:
    shutil.copy(REPOSITORY / "train_ddp.py", folder)
    status, said = end(start(folder, *arguments))
    assert status == 2
    assert said.startswith(message)
    assert len(said.splitlines()) == 1


SBATCH = """#!/usr/bin/env bash
echo "$@" > sbatch.txt
for number in 0 1; do
    SLURM_ARRAY_TASK_ID=$number SLURM_JOB_ID=$((100 + number)) SLURM_NNODES=1 \\
        SLURM_JOB_NODELIST=here bash "${@: -1}"
done
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 != train.py ]]; do shift; done
exec "$PYTHON" "$@"
"""


def test_slurm_gets_an_array_of_jobs_that_take_their_own_overrides(folder: Path) -> None:
    stubs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\n"}
    (folder / "bin").mkdir()
    for name, text in stubs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    shutil.copytree(REPOSITORY / "launch", folder / "launch")
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    options = ["--slurm", "--nodes=1 --time=1:00", "--jobs", "3"]
    status, said = end(start(folder, *options, "train.py", "lr=1,2", "seed=7", **variables))
    assert status == 0, said
    submitted = (folder / "sbatch.txt").read_text().split()
    assert submitted == ["--array=0-1%3", "--nodes=1", "--time=1:00", "launch/slurm.sbatch"]
    assert list(starts_of(folder)) == ["0-lr_1", "1-lr_2"]
    assert all((folder / "out" / name / "summary.json").exists() for name in starts_of(folder))


def test_two_ranks_train_by_torchrun(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            *(
                sys.executable,
                "sweep.py",
                "--out",
                tmp_path / "out",
                "--ranks",
                "2",
                "train_ddp.py",
            ),
            *("optimizer.lr=0.01,0.001", "max_steps=3", "model.kwargs.width=4", "log.images=0"),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("has ended") == 2
    assert "optimizer.lr=0.001" in process.stdout.splitlines()[-1] + process.stdout.splitlines()[-2]
