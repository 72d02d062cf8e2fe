"""What DALI decodes and what it refuses; test_contract.py has its other promises."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conf.errors import UserError
from tests.helpers import refused
from tests.images import index_in, loaders_of, paths_in, save, smooth
from tests.test_describe import photos

OPTIONS = ["loader=dali", "data.resize=null", "data.crop=24"]


def test_files_that_dali_cannot_read_right_are_refused_with_their_names(tmp_path: Path) -> None:
    options = [*photos(tmp_path / "data"), *OPTIONS]
    loaders_of(*options)
    other = tmp_path / "data" / "a" / "0.png"
    save(other, smooth(0, 60, 80), format="GIF")
    with refused("1 file that DALI cannot read", str(other), "loader=pytorch"):
        loaders_of(*options)
    clear = Image.fromarray(np.full((60, 80, 4), 100, np.uint8))
    clear.save(other, "PNG")
    with refused("1 file with transparent pixels", str(other)):
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
    save(folder / "side.jpg", smooth(1, 60, 80), exif=_on_its_side())
    for loader in loaders_of(*options):
        assert sum(len(inputs) for inputs, _ in loader) > 0


def _on_its_side() -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = 6
    return exif


def test_a_batch_with_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    train, _ = loaders_of(*photos(tmp_path / "data"), *OPTIONS)
    name = Path(paths_in(index_in(train))[0])
    for path in name.parent.parent.rglob("*.*"):
        path.unlink()
    with pytest.raises(UserError, match="No such file"):
        list(train)
