from pathlib import Path

import pytest

from tests.helpers import run_all
from tests.images import digit_folders
from tests.techniques import OPTIMIZERS, TEN


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """66 digits of three classes, and 9 that validate: 5 on one of two ranks, 4 on the other."""
    root = digit_folders(tmp_path_factory.mktemp("images"), range(3), 22, 3)
    return [
        *("data=imagefolder", f"data.root={root}"),
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        *("data.resize=null", "data.crop=[20,20]", "data.random_crop=true"),
        *("data.mean=[0.5]", "data.std=[0.25]", "model.kwargs.width=8", "global_batch_size=8"),
        *("epochs=3", "log.every_steps=1", "log.images=0"),
    ]


@pytest.fixture(scope="module")
def baselines(data, tmp_path_factory) -> Path:
    """Folder with a run of ten steps of `train.py` with each optimizer."""
    folder = tmp_path_factory.mktemp("baselines")
    options = ["train.py", *data, *TEN]
    rows = OPTIMIZERS.items()
    run_all([[*options, *row, f"output_dir={folder / name}"] for name, row in rows], folder)
    return folder
