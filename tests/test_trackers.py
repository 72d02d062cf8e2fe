"""MLflow and Weights & Biases have one run, also of a log in two parts."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_loggers import write_log


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a log in two parts, whose ids are empty at first, as when a process is killed."""
    run = tmp_path_factory.mktemp("loggers") / "run"
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.chdir(run.parent)  # for MLflow's images
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run}.db")
        names = [name for name in ("mlflow", "wandb") if find_spec(name)]
        for name in names:
            (run / f"{name}_id").touch()
            write_log(name, run, range(1, 4)).close(False)
            write_log(name, run, range(3, 6)).close(True)  # step 3 again, as after a resume
    return run


def test_mlflow_has_one_run(run: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run}.db")
    [logged] = client.search_runs(["0"])
    assert logged.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(logged.info.run_id, "train/loss")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]
    assert logged.data.params["global_batch_size"] == "8"
    assert client.list_artifacts(logged.info.run_id)


def test_wandb_has_one_run(run: Path) -> None:
    pytest.importorskip("wandb")
    name = (run / "wandb_id").read_text()
    files = [path.name for path in run.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{name}.wandb"] * 2
