"""Loggers besides TensorBoard: a resumed run continues the same log."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from runtime.loggers import LOGGERS
from tests.helpers import ENVIRONMENT, train

NAMES = [name for name in LOGGERS if name != "tensorboard" and find_spec(name)]
FOLDER = "mlruns"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two parts; the second logs step 3 again, since the first saved step 2 last."""
    run = tmp_path_factory.mktemp("loggers") / "run"
    options = ["data=mnist_mini", "global_batch_size=8", f"log.to=[{','.join(NAMES)}]"]
    options += ["log.every_steps=1", "log.images=2", "checkpoint.every_steps=2", "resume=auto"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "WANDB_MODE", "offline")
        patch.setitem(ENVIRONMENT, "MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setitem(ENVIRONMENT, "MLFLOW_TRACKING_URI", f"file:{run.with_name(FOLDER)}")
        train("train.py", run, *options, "max_steps=3")
        for path in (run / "checkpoints").glob("step-00000003*"):
            path.unlink()
        train("train.py", run, *options, "max_steps=5")
    assert not list(run.glob("events.*"))
    return run


def test_csv_has_one_row_per_number_and_step(run: Path) -> None:  # part: csv
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["name"] == "train/loss"] == [1, 2, 3, 4, 5]
    assert all(float(row["value"]) >= 0 for row in rows if row["name"] == "val/loss")


def test_mlflow_has_one_run(run: Path, monkeypatch) -> None:  # part: mlflow
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{run.with_name(FOLDER)}")
    [logged] = client.search_runs(["0"])
    assert logged.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(logged.info.run_id, "train/loss")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]
    assert logged.data.params["global_batch_size"] == "8"
    assert client.list_artifacts(logged.info.run_id)


def test_wandb_has_one_run(run: Path) -> None:  # part: wandb
    pytest.importorskip("wandb")
    name = (run / "wandb_id").read_text()
    files = [path.name for path in run.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{name}.wandb"] * 2
