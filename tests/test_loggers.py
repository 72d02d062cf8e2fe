"""Loggers: a resumed run continues the same log, and a run goes on without one that fails."""

from pathlib import Path

import torch

from runtime.loggers import Loggers
from tests.helpers import folder_with
from tests.processes import train
from tests.results import scalars_of


def write_log(loggers: Loggers, *parts: range) -> None:
    """Write a log in parts, as after a resume."""
    for steps in parts:
        loggers.open({"global_batch_size": 8}, steps[0] - 1)
        for step in steps:
            loggers.log({"train/loss": 1 / step}, step)
        loggers.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])


def rows_of_losses(*steps: int) -> list[str]:
    return ["step,name,value", *(f"{step},train/loss,{1 / step}" for step in steps)]


def test_csv_has_one_row_per_number_and_step_and_none_that_was_cut(tmp_path: Path) -> None:
    """All is in the files at once, as if the process were killed next."""
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join([*rows_of_losses(1, 2, 3), "3,"]))  # the process was killed
    loggers = Loggers(["csv", "tensorboard"], tmp_path)
    write_log(loggers, range(3, 6))
    assert [step for step, _ in scalars_of(tmp_path, "val/loss")] == [5]
    assert path.read_text().splitlines() == [*rows_of_losses(1, 2, 3, 4, 5), "5,val/loss,0.5"]


OWN = """
from runtime.loggers import Logger


class FullLogger(Logger):
    def __init__(self, run_dir, settings, step):
        self.file = (run_dir / "steps.txt").open("a")

    def log(self, values, step):
        if step == 4:
            raise OSError(28, "No space left on device")
        print(step, file=self.file, flush=True)


class AbsentLogger(Logger):
    def __init__(self, run_dir, settings, step):
        raise RuntimeError("no such host")
"""


def test_a_run_goes_on_without_loggers_that_fail_and_names_them_once(tmp_path) -> None:
    """It ends as if they had not failed."""
    found_here = "import runtime.loggers\nruntime.loggers.__path__.append('.')\n"
    folder = folder_with(tmp_path / "s", "train.py", ("import hydra\n", found_here))
    for name in ("full", "absent"):
        (folder / f"{name}.py").write_text(OWN)
    options = ["loader=synthetic", "model.kwargs.width=4", "data.crop=[12,12]", "epochs=2"]
    options += ["global_batch_size=1000", "log.to=[full,absent,csv]", "log.every_steps=1"]
    run = tmp_path / "run"
    text = train("train.py", run, *options, folder=folder)
    lost = "values are lost from here on"
    full = f"log.to=full: {lost}: OSError: [Errno 28] No space left on device (full.py:11)"
    assert text.count(f"{full}\n") == 1
    absent = f"log.to=absent: {lost}: RuntimeError: no such host (absent.py:17)"
    assert text.count(f"{absent}\n") == 1
    assert "Traceback" not in text
    steps = {int(line) for line in (run / "steps.txt").read_text().splitlines()}
    assert steps == {1, 2, 3}
    assert (run / "metrics.csv").read_text().count("train/loss") == 20
