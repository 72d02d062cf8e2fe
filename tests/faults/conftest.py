from pathlib import Path

import pytest

from tests.faults import NUM_TRAIN
from tests.images import digit_folders, photos_in
from tests.processes import train


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """{train,val}/<class>/<image>: 64 and 16 PNGs of 28x28 pixels in two classes."""
    return digit_folders(tmp_path_factory.mktemp("photos"), range(2), NUM_TRAIN // 2, 8)


@pytest.fixture(scope="session")
def options(photos) -> list[str]:
    """A small run with augmentation on: two epochs of eight steps."""
    crops = ["data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5"]
    small = ["model.kwargs.width=8", "global_batch_size=8", "epochs=2"]
    return photos_in(photos, *crops, *small, "log.every_steps=1", "log.images=0")


@pytest.fixture(scope="session")
def finished(options, tmp_path_factory) -> Path:
    """Output folder of a run of `train.py` that kept its last four checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options, "checkpoint.every_steps=5", "checkpoint.keep=4")
    return run
