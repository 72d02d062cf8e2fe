"""`sweep.py` starts a run for each combination of values, and goes on where runs were killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sweep
from conf.errors import UserError
from runtime.preemption import EXIT_CODE
from tests.helpers import REPOSITORY

# A training script that makes a checkpoint per second until it has as many as it shall, and writes down
# how it was started. With a `die` of its seed it ends once, after its first checkpoint.
TRAIN = """
import json, os, pathlib, signal, sys, time

given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = pathlib.Path(given["output_dir"])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text("{}")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with (folder / "starts.txt").open("a") as file:
    gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")
    rank = f"{os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
    print(time.time(), gpus, threads, given["resume"], rank, sep=";", file=file)
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
        [sys.executable, REPOSITORY / "sweep.py", "out=out", *arguments],
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
    """By the name of each run, without the checksum at its end."""
    files = sorted(folder.glob("out/*/starts.txt"))
    return {
        file.parent.name.rpartition("-")[0]: [
            line.split(";") for line in file.read_text().splitlines()
        ]
        for file in files
    }


def test_every_combination_runs_once_and_killed_ones_go_on(folder: Path) -> None:
    arguments = ["jobs=2", "script=train.py", "lr=0.1,0.2", "seed=1,2", "steps=2", "die=2"]
    status, said = end(start(folder, *arguments))
    assert status == 0, said
    starts = starts_of(folder)
    assert {name: len(lines) for name, lines in starts.items()} == {
        "lr_0.1-seed_1": 1,
        "lr_0.1-seed_2": 2,
        "lr_0.2-seed_1": 1,
        "lr_0.2-seed_2": 2,
    }
    assert all(line[3] == "auto" for lines in starts.values() for line in lines)
    table = said.splitlines()[-5:]
    assert table[0].split() == ["best", "images/s", "run", "settings"]
    assert [line.split()[1] for line in table[1:]] == ["0.2000", "0.2000", "0.1000", "0.1000"]
    # The same command again has nothing left to do.
    status, said = end(start(folder, *arguments))
    assert status == 0
    assert "4 runs, 4 have ended already" in said
    assert starts_of(folder) == starts


def test_a_run_with_another_fixed_override_or_script_is_another_run(folder: Path) -> None:
    shutil.copy(folder / "train.py", folder / "train_ema.py")
    for number, command in enumerate(
        (
            ["script=train.py", "seed=0"],
            ["script=train.py", "seed=5"],
            ["script=train_ema.py", "seed=5"],
        ),
        start=1,
    ):
        status, said = end(start(folder, *command, "lr=0.1,0.2"))
        assert status == 0, said
        assert "2 runs, 0 have ended already" in said
        assert [line.split()[-1] for line in said.splitlines()[-2:]] == [command[1]] * 2
        assert len(list(folder.glob("out/*/summary.json"))) == 2 * number
    status, said = end(start(folder, "script=train.py", "seed=5", "lr=0.3,0.2,0.1"))
    assert "3 runs, 2 have ended already" in said


def test_runs_at_a_time_share_no_gpu_and_are_no_more_than_asked_for(folder: Path) -> None:
    arguments = ["jobs=2", "ranks=2", "script=train.py", "seed=1"]
    status, said = end(start(folder, *arguments, CUDA_VISIBLE_DEVICES="4,5,6"))
    assert status == 2
    assert re.fullmatch(r"jobs=2 of 2 ranks .* 4 GPUs, .* 3; .*device=cpu\n", said)
    arguments = ["jobs=2", "script=train.py", "lr=1", "seed=1,2,3,4", "steps=3"]
    status, said = end(start(folder, *arguments, CUDA_VISIBLE_DEVICES="4,5,6"))
    assert status == 0, said
    [first, second, third, fourth] = [lines[0] for lines in starts_of(folder).values()]
    assert {first[1], second[1]} == {"4", "5"} == {third[1], fourth[1]}
    # The third one starts when one of the first two has ended, after three steps of 0.3 s.
    assert float(third[0]) - float(first[0]) > 0.8


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("4,5,6", {"4", "5"}), ("GPU-a,GPU-b,-1,6", {"GPU-a", "GPU-b"}), ("-1", {"-1"}), ("", {""})],
)
def test_a_gpu_that_cuda_does_not_see_is_none(
    folder: Path, monkeypatch, visible: str, expected: set
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = sweep.command_line(["jobs=2", "script=train.py", "lr=1", "seed=1,2"])
    places = [sweep.environment(options, place) for place in range(2)]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in places} == expected


def test_a_run_that_fails_is_told_and_does_not_end_the_others(folder: Path) -> None:
    status, said = end(start(folder, "script=train.py", "lr=1", "seed=13,1"))
    assert status == 1
    [line] = [line for line in said.splitlines() if "failed with exit code 2" in line]
    assert line.startswith("seed_13-")
    assert [len(lines) for lines in starts_of(folder).values()] == [1, 1]
    assert len(list(folder.glob("out/seed_1-*/summary.json"))) == 1


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_a_sweep_that_is_asked_to_leave_lets_its_runs_save_and_continues_later(
    folder: Path, asked: signal.Signals
) -> None:
    if signal.getsignal(asked) is signal.SIG_IGN:
        pytest.skip("ignored by this process and what it starts, as under nohup")
    arguments = ["script=train.py", "lr=1", "seed=1,2", "steps=4"]
    process = start(folder, *arguments)
    while not list(folder.glob("out/seed_1-*/checkpoints/*")):
        time.sleep(0.05)
    process.send_signal(asked)
    status, said = end(process)
    assert status == EXIT_CODE
    assert list(starts_of(folder)) == ["seed_1"]
    status, said = end(start(folder, *arguments))
    assert status == 0, said
    assert [len(lines) for lines in starts_of(folder).values()] == [2, 1]


def test_optuna_chooses_by_what_the_runs_before_reached_and_goes_on_later(folder: Path) -> None:
    pytest.importorskip("optuna")
    arguments = ["jobs=2", "script=train.py", "lr=interval(0,1)", "seed=1,2", "steps=1"]
    status, said = end(start(folder, "trials=13", *arguments))
    assert status == 0, said
    before = starts_of(folder)
    assert len(before) == 13
    status, said = end(start(folder, "trials=26", *arguments))
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
    ("arguments", "named"),
    [
        ([], "script="),
        (["train.py"], "train.py"),
        (["script=train_me.py"], "script=train_me.py"),
        (["script=train_ddp.py"], "ranks="),
        (["script=train.py", "jobs=0"], "jobs=0"),
        (["script=train.py", "trials=two"], "trials=two"),
        (["script=train.py", "output_dir=a"], "output_dir="),
        (["script=train.py", "seed=[1"], "seed=[1"),
        (["script=train.py", "lr=interval(0,1)"], "lr=interval(0,1)"),
    ],
)
def test_mistakes_end_in_one_line(
    folder: Path, monkeypatch, arguments: list[str], named: str
) -> None:
    shutil.copy(REPOSITORY / "train_ddp.py", folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["sweep.py", *arguments])
    with pytest.raises(UserError) as error:
        sweep.main()
    assert named in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_ranks_are_started_by_torchrun(folder: Path) -> None:
    (folder / "train_ddp.py").write_text(f"# torchrun starts it\n{TRAIN}")
    status, said = end(start(folder, "script=train_ddp.py", "ranks=2", "lr=1", "seed=1"))
    assert status == 0, said
    assert said.count("has ended") == 1
    [(_, lines)] = starts_of(folder).items()
    assert sorted(line[4] for line in lines) == ["0 of 2", "1 of 2"]
