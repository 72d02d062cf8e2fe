"""Masks: what their files may hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loaders.check import check
from tests.helpers import make_config, refused
from tests.images import PLAIN, index_of, loaders_of, reading, save, save_tiff, turned


def filled(value: int, height: int = 8, width: int = 10) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[2, 3] = value
    return mask


def numbers(dtype: str, value: int) -> np.ndarray:
    return np.where(filled(1), value, 0).astype(dtype)


def coloured(index: int, *colours: tuple[int, int, int]) -> Image.Image:
    """A mask of 0 and one index, with these colours."""
    mask = Image.fromarray(filled(index))
    mask.putpalette(sum(colours, ()))
    return mask


def options_of(root: Path, masks: dict[str, Any]) -> list[str]:
    """Write black images with these masks; returns the overrides that read them."""
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        (path := root / "masks" / name).parent.mkdir(exist_ok=True)
        if name.endswith(".tif"):
            save_tiff(path, mask)
        elif isinstance(mask, tuple):  # another format than the name's
            Image.fromarray(mask[0]).save(path, mask[1])
        else:
            save(path, mask)
    return ["data=masks", "data.val_count=1", *reading(root)]


BLACK, RED, GREEN = (0, 0, 0), (255, 0, 0), (0, 255, 0)


@pytest.mark.parametrize(
    ("masks", "overrides", "shown"),
    [
        ({"a.png": filled(255)}, [], ["a.png", "data.ignore_index=255"]),
        ({"a.png": filled(3)}, ["data.num_classes=3"], ["a.png", "data.num_classes=3", "up to 3"]),
        ({"a.png": filled(0), "b.png": filled(0)}, [], ["data.num_classes"]),
        ({"a.png": filled(1, 8, 9)}, [], ["a.png", "8x9", "8x10"]),
        ({"a.png": Image.new("RGB", (10, 8))}, [], ["a.png", "RGB"]),
        ({"a.jpg": Image.new("L", (10, 8))}, [], ["a.jpg", "JPEG"]),
        (
            {"b.png": np.full((8, 10), 255, np.uint8), "c.png": filled(1)},
            ["data.ignore_index=255"],
            ["the 1 ", "nothing but data.ignore_index=255"],
        ),
        ({"a.tif": np.zeros((8, 10), np.float32)}, [], ["a.tif", "float32"]),
        ({"a.tif": numbers("int32", 65537)}, [], ["a.tif", "65537"]),
        ({"a.tif": numbers("uint32", 65536)}, ["data.num_classes=2"], ["a.tif", "65536"]),
        ({"a.tif": numbers("int64", 2**32)}, ["data.num_classes=2"], ["a.tif", str(2**32)]),
        ({"a.tif": numbers("int32", -1)}, [], ["a.tif", "-1", "data.ignore_index=-1"]),
        ({"a.tif": numbers("int8", -2)}, ["data.ignore_index=-1"], ["a.tif", "-2"]),
        ({"a.tif": np.zeros((8, 10, 5), np.uint8)}, [], ["a.tif", "(8, 10, 5)"]),
        ({"a.png": (numbers("uint8", 1), "PPM")}, [], ["a.png", "PPM"]),
    ],
)
def test_wrong_masks_are_named_at_start(masks: dict, overrides, shown, tmp_path: Path) -> None:
    with refused(*shown):
        index_of(*options_of(tmp_path / "data", {"b.png": filled(1)} | masks), *overrides)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint16", "uint32"])
def test_masks_of_any_integers_hold_their_indices(dtype: str, tmp_path: Path) -> None:
    """And -1, which means no class."""
    random, lowest = np.random.default_rng(0), 0 if dtype.startswith("u") else -1
    masks = {f"{n}.tif": random.integers(lowest, 3, (8, 10)).astype(dtype) for n in range(3)}
    options = options_of(tmp_path / "data", masks)
    options += [*PLAIN, "data.crop=null", "data.random_crop=false", "data.ignore_index=-1"]
    for way in ([], ["loader.num_workers=1"]):
        train, val = loaders_of(*options, "global_batch_size=1", "data.hflip=0", *way)
        for loader in (train, val):
            for _, targets in loader:
                name = Path(loader.info.name_of(loader.last_rows["sample"][0])).stem
                assert targets[0].tolist() == masks[f"{name}.tif"].tolist()
        assert train.info.classes == ("0", "1", "2")


def turned_photo(orientation: int, upright: np.ndarray) -> Image.Image:
    """What a camera stores that was held so."""
    undone = {6: Image.Transpose.ROTATE_90, 3: Image.Transpose.ROTATE_180}
    return Image.fromarray(upright).transpose(undone[orientation])


@pytest.mark.parametrize(("orientation", "width"), [(6, 10), (6, 8), (3, 10)])
def test_a_photo_that_is_turned_beside_a_mask_that_is_not_is_refused(
    orientation: int, width: int, tmp_path: Path
) -> None:
    """Unless data.exif says whether the masks fit the upright photos or the stored ones."""
    root, exif = tmp_path / "data", turned(orientation)
    upright = np.random.default_rng(0).integers(0, 3, (8, width), np.uint8)
    stored = turned_photo(orientation, upright)
    options = ["data=masks", "data.val_count=1", *PLAIN, "data.crop=null", *reading(root)]
    for name in "abc":
        image = np.repeat(upright[..., None], 3, axis=2)
        photo = turned_photo(orientation, image)
        save(root / "images" / f"{name}.png", photo, exif=exif if name != "c" else None)
        save(root / "masks" / f"{name}.png", upright if name != "c" else stored)
    with refused("2 of 3", "a.png, ", "data.exif=true", "data.exif=false"):
        index_of(*options)
    (root / "images" / "c.png").unlink()
    (root / "masks" / "c.png").unlink()
    for fits, mask in (("true", upright), ("false", np.asarray(stored))):
        for name in "ab":
            save(root / "masks" / f"{name}.png", mask)
        for index in index_of(*options, f"data.exif={fits}"):
            assert np.array_equal(index.read(0)[..., 0], mask)
            assert np.array_equal(index.read(0, 1)[..., 0], mask)
    for name in "ab":  # both are turned
        save(root / "masks" / f"{name}.png", stored, exif=exif)
    assert np.array_equal(index_of(*options)[0].read(0, 1)[..., 0], upright)


def test_the_check_names_masks_whose_palettes_differ(tmp_path: Path) -> None:
    """But above their highest index, and for data.ignore_index."""
    other = coloured(1, BLACK, GREEN)
    masks = {
        "a.png": coloured(1, BLACK, RED, GREEN, RED),
        "b.png": coloured(1, BLACK, RED, RED),
        "c.png": filled(1),
        "d.png": other,
    }
    options = options_of(tmp_path / "data", masks)
    data = make_config(*options).data
    num_files, problems = check(data)
    [(path, reason)] = problems.items()
    assert (num_files, Path(path).name) == (8, "d.png")
    for text in ("index 1", "(255, 0, 0)", "a.png", "(0, 255, 0)"):
        assert text in reason
    save(tmp_path / "data" / "masks" / "a.png", coloured(1, BLACK, GREEN))
    save(tmp_path / "data" / "masks" / "b.png", coloured(1, BLACK, GREEN))
    assert check(data) == (8, {})
