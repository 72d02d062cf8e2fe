"""Weights & Biases and MLflow: a resumed run continues the same log."""

import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runtime.loggers import Loggers
from tests.helpers import ENVIRONMENT, REPOSITORY
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
        for steps in (range(1, 4), range(3, 6)):  # step 3 again, as after a resume at step 2
            loggers = Loggers(names, run)
            write_log(loggers, steps)
            loggers.close()
    return run


def packages_of(extra: str) -> set[str]:
    """The packages that are installed with one of the extras of `pyproject.toml`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    found: set[str] = set()
    while wanted:
        package = Requirement(wanted.pop())
        extras = [{"extra": name} for name in ("", *package.extras)]
        name, marker = canonicalize_name(package.name), package.marker
        if name in found or (marker and not any(map(marker.evaluate, extras))):
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # such as a DALI for another CUDA
            wanted += distribution(name).requires or []
    return found


LOG = """
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # they cannot be imported
import torch
from runtime.loggers import Loggers

loggers = Loggers(["mlflow"], Path("run"))
loggers.open({"global_batch_size": 8}, 0)
loggers.log({"train/loss": 0.5, "val/predictions": torch.rand(1, 3, 8, 8)}, 1)
loggers.close()
"""


@pytest.mark.slow
def test_mlflow_needs_no_package_but_those_of_its_extra_and_no_setting(tmp_path) -> None:
    mlflow, installed = pytest.importorskip("mlflow"), packages_of("mlflow")
    others = [
        module
        for module, packages in packages_distributions().items()
        if installed.isdisjoint(map(canonicalize_name, packages))
    ]
    (tmp_path / "run").mkdir()
    command, env = [sys.executable, "-c", LOG, *others], {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "log.to=mlflow" not in done.stderr
    [logged] = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["0"])
    assert logged.data.metrics == {"train/loss": 0.5}


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
