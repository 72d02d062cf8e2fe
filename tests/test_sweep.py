"""`tools.sweep` starts a run for each combination of values, and goes on where runs were killed."""

import os
import signal
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import refused
from tests.processes import signal_handlers_restored, wait_for, without_reader
from tools import sweep

# A training script that waits while there is a file `hold` and nobody asks it to leave, and writes
# down how it was started. With a `die` of its seed it is killed once. Two that have the same GPU at
# a time fail.
TRAIN = r"""
import json, os, pathlib, signal, sys, time

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder, gpu = pathlib.Path(given["output_dir"].strip("'")), os.environ["CUDA_VISIBLE_DEVICES"]
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.txt").open("a") as file:
    print(gpu, given["resume"], os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), file=file)
if gpu:
    pathlib.Path("gpu" + gpu).touch(exist_ok=False)
    time.sleep(0.1)
    pathlib.Path("gpu" + gpu).unlink()
while pathlib.Path("hold").exists():
    time.sleep(0.02)
    if asked:
        sys.exit(75)
if given["seed"] == given.get("die") and not (folder / "died").exists():
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
best = {"val/top1": float(given["lr"]), "val/loss": 1.0}
(folder / "run.json").write_text(json.dumps({"settings": {"seed": given["seed"]}}))
(folder / "summary.json").write_text(json.dumps({"best": best, "best_metric": "val/top1"}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    for name in ("train.py", "mine.py"):
        (tmp_path / name).write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    """What a sweep printed, which exited with this code."""
    printed = StringIO()
    with signal_handlers_restored(), redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        sweep.main(["out=out", *arguments])
    assert ended.value.code == code, printed.getvalue()
    return printed.getvalue()


def starts_of(folder: Path) -> dict[str, list[list[str]]]:
    """GPU, resume, rank and world size of each run's starts, by its name without the checksum."""
    return {
        file.parent.name.rpartition("-")[0]: [x.split(" ") for x in file.read_text().splitlines()]
        for file in sorted(folder.glob("out/*/starts.txt"))
    }


def test_every_combination_runs_once_and_what_was_killed_or_failed_again(
    folder: Path, monkeypatch
) -> None:
    """Each run has a GPU of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with refused("jobs=2 of 2 ranks", "4 GPUs", " 3;"):
        run("script=train.py", "jobs=2", "ranks=2")
    arguments = ["script=train.py", "jobs=2", "lr=0.1,0.2", "seed=1,2", "die=2"]
    assert run(*arguments, code=1).count("failed with exit code -9; out/lr_0.") == 2
    said = run(*arguments)
    assert "4 runs, 2 ended already" in said
    starts = starts_of(folder)
    assert {name: len(some) for name, some in starts.items()} == {
        "lr_0.1-seed_1": 1,
        "lr_0.1-seed_2": 2,
        "lr_0.2-seed_1": 1,
        "lr_0.2-seed_2": 2,
    }
    gpus = {(gpu, resume) for some in starts.values() for gpu, resume, *_ in some}
    assert gpus == {("4", "auto"), ("5", "auto")}
    header, *lines = said.splitlines()[-5:]
    assert header.split() == ["best", "samples/s", "run", "settings"]
    assert [line.split()[1] for line in lines] == ["0.2000", "0.2000", "0.1000", "0.1000"]


def test_a_run_with_another_fixed_override_or_script_is_another_run(folder: Path) -> None:
    for script, seed in [("train.py", 0), ("train.py", 5), ("mine.py", 5)]:
        assert "2 runs, 0 ended already" in run(f"script={script}", f"seed={seed}", "lr=0.1,0.2")
    said = run("script=train.py", "seed=5", "lr=0.3,0.2,0.1")
    assert ("3 runs, 2 ended already" in said, said.count(": starts")) == (True, 1)


def test_a_sweep_that_is_asked_to_leave_lets_its_runs_save_and_goes_on_later(folder: Path) -> None:
    arguments = ["script=train.py", "lr=1", "seed=1,2"]
    (folder / "hold").touch()

    def ask() -> None:
        wait_for(lambda: starts_of(folder), "a run")
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    run(*arguments, code=os.EX_TEMPFAIL)
    asking.join()
    assert [len(lines) for lines in starts_of(folder).values()] == [1]
    (folder / "hold").unlink()
    run(*arguments)
    assert [len(lines) for lines in starts_of(folder).values()] == [2, 1]


def test_an_error_of_the_sweep_leaves_no_run_behind(folder: Path, monkeypatch) -> None:
    (folder / "hold").touch()
    processes: list[Any] = []
    start = sweep.start

    def start_one(*arguments: Any) -> Any:
        if processes:
            wait_for(lambda: starts_of(folder), "a run")
            raise OSError("no log")
        processes.append(start(*arguments))
        return processes[0]

    monkeypatch.setattr(sweep, "start", start_one)
    with signal_handlers_restored(), pytest.raises(OSError, match="no log"):
        sweep.main(["out=out", "script=train.py", "jobs=2", "lr=1", "seed=1,2"])
    assert [process.returncode for process in processes] == [75]


def test_optuna_chooses_by_what_the_runs_before_reached_and_goes_on_later(folder: Path) -> None:
    pytest.importorskip("optuna")
    arguments = ["jobs=2", "script=train.py", "lr=interval(0,1)", "seed=1,2"]
    run("trials=2", *arguments)
    before = starts_of(folder)
    assert len(before) == 2
    assert "26 runs, 2 ended already" in run("trials=26", *arguments)
    assert ": starts" not in run("trials=9", *arguments)
    starts = starts_of(folder)
    assert {name: starts[name] for name in before} == before
    numbered = sorted(starts, key=lambda name: int(name.partition("-")[0]))
    lrs = [float(name.split("_")[1].partition("-")[0]) for name in numbered]
    assert len(set(lrs)) == 26
    # The stand-in's metric is its learning rate. Optuna draws ten at random, then near the best.
    assert sum(lrs[13:]) / 13 > sum(lrs[:10]) / 10 + 0.1


@pytest.mark.slow
def test_ranks_are_started_by_torchrun(folder: Path) -> None:
    (folder / "train_ddp.py").write_text(f"# torchrun starts it\n{TRAIN}")
    assert run("script=train_ddp.py", "ranks=2", "lr=1", "seed=1").count("has ended") == 1
    [lines] = starts_of(folder).values()
    assert sorted(line[2:] for line in lines) == [["0", "2"], ["1", "2"]]


def test_help_ends_with_its_reader() -> None:
    assert without_reader("-m", "tools.sweep", "--help") == (-signal.SIGPIPE, b"")
