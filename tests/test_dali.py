"""What DALI decodes and what it refuses; test_contract.py has its other promises."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers import refused
from tests.images import (
    FOLDERS,
    index_in,
    loaders_of,
    make_photos,
    paths_in,
    reading,
    save,
    smooth,
    turned,
)

OPTIONS = ["loader=dali", "data.resize=null", "data.crop=24"]


def photos(root: Path) -> list[str]:
    return [*FOLDERS, "data.val_count=4", "global_batch_size=2", *reading(make_photos(root, 12))]


def test_files_that_dali_cannot_read_right_are_refused_with_their_names(tmp_path: Path) -> None:
    options = [*photos(tmp_path / "data"), *OPTIONS]
    loaders_of(*options)
    other = tmp_path / "data" / "a" / "0.png"
    save(other, smooth(0, 60, 80), format="GIF")
    with refused("1 file that DALI cannot read", str(other), "loader=pytorch"):
        loaders_of(*options)
    clear = Image.fromarray(np.full((60, 80, 4), 100, np.uint8))
    clear.save(other, "PNG")
    with refused("1 file that DALI cannot read", str(other)):
        loaders_of(*options)
    (tmp_path / "bad.txt").write_text(f"{other}\n")
    train, val = loaders_of(*options, f"data.leave_out={tmp_path / 'bad.txt'}")
    assert str(other) not in paths_in(index_in(train)) + paths_in(index_in(val))
    with refused("data.on_error=skip", "data.leave_out"):
        loaders_of(*options, "data.on_error=skip")


def test_a_folder_like_imagenet_trains(tmp_path: Path) -> None:
    """With a JPEG of inks, a PNG that is called JPEG, and photos on their side."""
    options = [*photos(tmp_path / "data"), *OPTIONS]
    folder = tmp_path / "data" / "a"
    image = Image.fromarray(smooth(0, 60, 80))
    image.convert("CMYK").save(folder / "ink.jpg")
    image.save(folder / "drawing.JPEG", "PNG")
    save(folder / "side.jpg", smooth(1, 60, 80), exif=turned(6))
    for loader in loaders_of(*options):
        assert sum(len(inputs) for inputs, _ in loader) > 0
