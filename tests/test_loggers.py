"""Loggers besides TensorBoard: a resumed run continues the same log."""

from pathlib import Path

import torch

from runtime.loggers import Loggers


def write_log(run: Path, *names: str) -> None:
    """Write a log in two parts; the second logs step 3 again, as after a resume at step 2."""
    for steps in ((1, 2, 3), (3, 4, 5)):
        loggers = Loggers(names, run)
        loggers.open({"global_batch_size": 8}, steps[0] - 1)
        for step in steps:
            loggers.log({"train/loss": 1 / step}, step)
        loggers.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])
        loggers.flush()
        loggers.close()
        if steps[0] == 1 and (rows := run / "metrics.csv").exists():
            rows.write_text(f"{rows.read_text()}\n1")  # a row is cut when a process is killed


def test_csv_has_one_row_per_number_and_step_and_none_that_was_cut(tmp_path: Path) -> None:
    write_log(tmp_path, "csv")
    losses = [f"{step},train/loss,{1 / step}" for step in (1, 2, 3, 4, 5)]
    expected = ["step,name,value", *losses, "5,val/loss,0.5"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == expected


def test_csv_of_a_resumed_run_that_is_killed_at_once_keeps_its_rows(tmp_path) -> None:
    path = tmp_path / "metrics.csv"
    rows = ["step,name,value", "1,train/loss,0.5", "2,train/loss,0.25"]
    path.write_text("\n".join([*rows, "3,train/loss,0.12"]))
    Loggers(["csv"], tmp_path).open({}, 3)
    assert path.read_text().splitlines() == rows
