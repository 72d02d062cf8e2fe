from pathlib import Path

import pytest

from tests.images import small_digits
from tests.processes import train
from tests.techniques import OPTIMIZERS, TEN


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """9 samples validate: 5 on one of two ranks, 4 on the other."""
    small = small_digits(tmp_path_factory)
    return [*small, "global_batch_size=8", "log.every_steps=1", "log.images=0"]


@pytest.fixture(scope="module")
def baselines(data, tmp_path_factory) -> Path:
    """Folder with a run of ten steps of `train.py` with each optimizer."""
    folder = tmp_path_factory.mktemp("baselines")
    for name, optimizer in OPTIMIZERS.items():
        train("train.py", folder / name, *data, *TEN, *optimizer)
    return folder
