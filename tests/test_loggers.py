"""Loggers: a resumed run continues the same log, and a run goes on without one that fails."""

from pathlib import Path

import pytest
import torch

from runtime.loggers import Logger, Loggers


def write_log(loggers: Loggers, *parts: range) -> None:
    """Write a log in parts, as after a resume."""
    for steps in parts:
        loggers.open({"global_batch_size": 8}, steps[0] - 1)
        for step in steps:
            loggers.log({"train/loss": 1 / step}, step)
        loggers.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])
        loggers.flush()


def rows_of_losses(*steps: int) -> list[str]:
    return ["step,name,value", *(f"{step},train/loss,{1 / step}" for step in steps)]


def test_csv_has_one_row_per_number_and_step_and_none_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join([*rows_of_losses(1, 2, 3), "3,"]))  # the process was killed
    loggers = Loggers(["csv"], tmp_path)
    write_log(loggers, range(3, 6))
    loggers.close()
    assert path.read_text().splitlines() == [*rows_of_losses(1, 2, 3, 4, 5), "5,val/loss,0.5"]


class Full(Logger):
    steps: list[int] = []  # noqa: RUF012 (of one test)

    def __init__(self, run_dir, settings, step):
        pass

    def log(self, values, step):
        if 4 <= step <= 8:
            raise OSError(28, "No space left on device")
        self.steps.append(step)


class Service(Logger):
    def __init__(self, run_dir, settings, step):
        raise RuntimeError("a bug")


def test_a_run_goes_on_while_a_logger_cannot_write(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = Loggers([], tmp_path)
    loggers.classes = {"full": Full, "service": Service}
    write_log(loggers, range(1, 9), range(9, 12))
    assert Full.steps == [1, 2, 3, 9, 10, 11, 11]
    lost = "values are lost until the next epoch"
    assert caplog.text.count(f"log.to=full: {lost}") == 1
    assert caplog.text.count(f"log.to=service: {lost}: RuntimeError: a bug") == 2
