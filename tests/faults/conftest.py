from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.faults import NUM_TRAIN
from tests.helpers import train


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """{train,val}/<class>/<image>: 64 and 16 JPEGs of 32x32 pixels in two classes."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("val", 16)):
        for number in range(count):
            path = root / split / f"class{number % 2}" / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = random.integers(60, 180, (4, 4, 3)) + 20 * (number % 2)
            Image.fromarray(coarse.astype(np.uint8)).resize((32, 32)).save(path, quality=90)
    return root


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
    ]


@pytest.fixture(scope="session")
def finished(options, tmp_path_factory) -> Path:
    """Output folder of a run of `train.py` that kept its last three steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options, "checkpoint.every_steps=1", "checkpoint.keep=3")
    return run
