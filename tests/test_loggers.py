"""Loggers besides TensorBoard: a resumed run continues the same log."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from runtime.loggers import LOGGERS, Loggers

NAMES = [name for name in LOGGERS if name != "tensorboard" and find_spec(name)]
FOLDER = "mlruns"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a log in two parts; the second logs step 3 again, as after a resume at step 2."""
    run = tmp_path_factory.mktemp("loggers") / "run"
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{run.with_name(FOLDER)}")
        for steps in ((1, 2, 3), (3, 4, 5)):
            loggers = Loggers(NAMES, run)
            loggers.open({"global_batch_size": 8}, steps[0] - 1)
            for step in steps:
                loggers.log({"train/loss": 1 / step}, step)
            loggers.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])
            loggers.flush()
            loggers.close()
    return run


def test_csv_has_one_row_per_number_and_step(run: Path) -> None:  # part: csv
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["name"] == "train/loss"] == [1, 2, 3, 4, 5]
    assert [float(row["value"]) for row in rows if row["name"] == "val/loss"] == [0.5]


def test_csv_leaves_out_a_row_that_was_cut(tmp_path: Path) -> None:  # part: csv
    path = tmp_path / "metrics.csv"
    path.write_text("step,name,value\n9,val/loss,0.5\n\n1")
    loggers = Loggers(["csv"], tmp_path)
    loggers.open({}, 10)
    loggers.close()
    assert path.read_text().split() == ["step,name,value", "9,val/loss,0.5"]


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
