"""Loggers besides TensorBoard: a resumed run continues the same log."""

import csv
from pathlib import Path

import pytest

from tests.helpers import ENVIRONMENT, train

STEPS = ["log.every_steps=1", "log.images=2", "checkpoint.every_steps=2", "resume=auto"]


def train_in_two_parts(name: str, tmp_path: Path) -> Path:
    """The second part logs step 3 again, which the first one has logged after its last checkpoint."""
    run = tmp_path / "run"
    options = ["data=mnist_mini", "global_batch_size=8", f"log.to=[{name}]", *STEPS]
    train("train.py", run, *options, "max_steps=3")
    for path in (run / "checkpoints").glob("step-00000003*"):
        path.unlink()
    train("train.py", run, *options, "max_steps=5")
    assert not list(run.glob("events.*"))
    return run


def test_csv_has_one_row_per_number_and_step(tmp_path) -> None:  # part: csv
    with (train_in_two_parts("csv", tmp_path) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["name"] == "train/loss"] == [1, 2, 3, 4, 5]
    assert all(float(row["value"]) >= 0 for row in rows if row["name"] == "val/loss")


def test_mlflow_has_one_run(tmp_path, monkeypatch) -> None:  # part: mlflow
    mlflow = pytest.importorskip("mlflow")
    uri = f"file:{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setitem(ENVIRONMENT, "MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setitem(ENVIRONMENT, "MLFLOW_TRACKING_URI", uri)
    train_in_two_parts("mlflow", tmp_path)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]
    assert run.data.params["global_batch_size"] == "8"
    assert client.list_artifacts(run.info.run_id)


def test_wandb_has_one_run(tmp_path, monkeypatch) -> None:  # part: wandb
    pytest.importorskip("wandb")
    monkeypatch.setitem(ENVIRONMENT, "WANDB_MODE", "offline")
    run = train_in_two_parts("wandb", tmp_path)
    name = (run / "wandb_id").read_text()
    files = [path.name for path in run.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{name}.wandb"] * 2
