from pathlib import Path

import pytest

from tests.faults import NUM_TRAIN
from tests.helpers import train
from tests.images import digit_folders


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """{train,val}/<class>/<image>: 64 and 16 PNGs of 28x28 pixels in two classes."""
    return digit_folders(tmp_path_factory.mktemp("photos"), range(2), NUM_TRAIN // 2, 8)


@pytest.fixture(scope="session")
def options(photos, tmp_path_factory) -> list[str]:
    """A small run with augmentation on: two epochs of eight steps."""
    return [
        "data=imagefolder",
        f"data.root={photos}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        "data.resize=null",
        "data.crop=[24,24]",
        "data.random_crop=true",
        "data.hflip=0.5",
        "model=small_cnn",
        "model.kwargs.width=8",
        "global_batch_size=8",
        "epochs=2",
        "log.every_steps=1",
        "log.images=0",
    ]


@pytest.fixture(scope="session")
def finished(options, tmp_path_factory) -> Path:
    """Output folder of a run of `train.py` that kept its last three steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options, "checkpoint.every_steps=1", "checkpoint.keep=3")
    return run
