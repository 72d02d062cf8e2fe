from pathlib import Path

import pytest

from tests.processes import train


@pytest.fixture(scope="session")
def finished(options, tmp_path_factory) -> Path:
    """Output folder of a run of `train.py` that kept its last four checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options, "checkpoint.every_steps=5", "checkpoint.keep=4")
    return run
