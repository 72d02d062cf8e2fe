"""Loggers besides TensorBoard: a resumed run continues the same log."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from runtime.loggers import LOGGERS, Loggers

NAMES = [name for name in LOGGERS if name != "tensorboard" and find_spec(name)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a log in two parts; the second logs step 3 again, as after a resume at step 2.

    In between, a row was cut, as when a process is killed.
    """
    run = tmp_path_factory.mktemp("loggers") / "run"
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{run}-mlflow")
        for steps in ((1, 2, 3), (3, 4, 5)):
            loggers = Loggers(NAMES, run)
            loggers.open({"global_batch_size": 8}, steps[0] - 1)
            for step in steps:
                loggers.log({"train/loss": 1 / step}, step)
            loggers.log({"val/loss": 0.5, "val/predictions": torch.rand(2, 3, 8, 8)}, steps[-1])
            loggers.flush()
            loggers.close()
            with (run / "metrics.csv").open("a") as file:  # part: csv
                file.write("\n1" * (steps[0] == 1))
    return run


def test_csv_has_one_row_per_number_and_step_and_none_that_was_cut(run: Path) -> None:  # part: csv
    losses = [f"{step},train/loss,{1 / step}" for step in (1, 2, 3, 4, 5)]
    expected = ["step,name,value", *losses, "5,val/loss,0.5"]
    assert (run / "metrics.csv").read_text().splitlines() == expected


def test_mlflow_has_one_run(run: Path, monkeypatch) -> None:  # part: mlflow
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{run}-mlflow")
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
