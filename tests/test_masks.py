"""Masks: what their files may hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from loaders.check import check
from loaders.layouts import open_index
from tests.helpers import make_config, refused
from tests.images import PLAIN, index_of, loaders_of, paths_in, reading, save, save_tiff, turned


def filled(value: int, dtype: str = "uint8", width: int = 10) -> np.ndarray:
    """A mask of 0, and of this value at one place."""
    mask = np.zeros((8, width), dtype)
    mask[2, 3] = value
    return mask


def options_of(root: Path, masks: dict[str, Any]) -> list[str]:
    """Write black images with these masks; returns the overrides that read them."""
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        (path := root / "masks" / name).parent.mkdir(exist_ok=True)
        if name.endswith(".tif"):
            save_tiff(path, mask)
        else:
            save(path, mask)
    return ["data=masks", "data.val_count=1", *reading(root)]


@pytest.mark.parametrize(
    ("masks", "overrides", "shown"),
    [
        ({"a.png": filled(255)}, [], ["a.png", "data.ignore_index=255"]),
        ({"a.png": filled(3)}, ["data.num_classes=3"], ["a.png", "data.num_classes", "up to 3"]),
        ({"a.png": filled(0), "b.png": filled(0)}, [], ["data.num_classes"]),
        ({"a.png": filled(1, width=9)}, [], ["a.png", "8x9", "8x10"]),
        ({"a.jpg": Image.new("L", (10, 8))}, [], ["a.jpg", "JPEG"]),
        (
            {"b.png": np.full((8, 10), 255, np.uint8), "c.png": filled(1)},
            ["data.ignore_index=255"],
            ["the 1 ", "nothing but data.ignore_index=255"],
        ),
        ({"a.tif": filled(0, "float32")}, [], ["a.tif", "float32"]),
        ({"a.tif": filled(65536, "uint32")}, ["data.num_classes=2"], ["a.tif", "65536"]),
        ({"a.tif": filled(-1, "int32")}, [], ["a.tif", "-1", "data.ignore_index=-1"]),
    ],
)
def test_wrong_masks_are_named_at_start(masks: dict, overrides, shown, tmp_path: Path) -> None:
    with refused(*shown):
        index_of(*options_of(tmp_path / "data", {"b.png": filled(1)} | masks), *overrides)


def test_a_class_of_the_test_split_alone_is_refused(tmp_path: Path) -> None:
    for split, highest in (("train", 2), ("val", 2), ("test", 3)):
        options_of(tmp_path / "data" / split, {"a.png": filled(1), "b.png": filled(highest)})
    cfg = make_config("data=masks", *reading(tmp_path / "data"))
    with refused("1 of 6 masks", "test/masks/b.png", "data.num_classes (now 3)"):
        open_index(cfg.data, ("train", "val", "test"))


def test_masks_are_resized_to_the_nearest_pixels(places) -> None:
    place, size = places("masks"), (30, 131)
    resized = [f"data.resize=[{size[0]},{size[1]}]", "data.crop=null"]
    for name, _, _, found in place.epoch("threads", None, *resized):
        stored = torch.from_numpy(place.data.targets[name])[None, None].double()
        expected = interpolate(stored, size, mode="nearest-exact")
        assert torch.equal(found.double(), expected[0, 0])


def test_pixels_of_each_class_are_counted_for_the_weights_of_the_loss(tmp_path: Path) -> None:
    """Three masks of 80 pixels; one pixel of the last one has no class."""
    for split in ("train", "val"):
        masks = {"a.png": filled(1), "b.png": filled(2), "c.png": filled(255)}
        options_of(tmp_path / "data" / split, masks)
    options = ["data=masks", *reading(tmp_path / "data"), *PLAIN, "data.crop=[8,8]"]
    train, _ = loaders_of(*options, "data.ignore_index=255", "global_batch_size=1")
    counts: Any = train.info.class_counts()
    assert counts.tolist() == [237, 1, 1]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint16", "uint32"])
def test_masks_of_any_integers_hold_their_indices(dtype: str, tmp_path: Path) -> None:
    """And -1, which means no class."""
    random, lowest = np.random.default_rng(0), 0 if dtype.startswith("u") else -1
    masks = {f"{n}.tif": random.integers(lowest, 3, (8, 10)).astype(dtype) for n in range(3)}
    options = options_of(tmp_path / "data", masks)
    for index in index_of(*options, "data.ignore_index=-1"):
        assert index.target.classes == ("0", "1", "2")
        for sample in range(len(index)):
            name = Path(paths_in(index, 1)[sample]).name
            assert index.read(sample, 1)[..., 0].tolist() == masks[name].tolist()


@pytest.mark.parametrize(("orientation", "turns", "width"), [(6, 1, 10), (6, 1, 8), (3, 2, 10)])
def test_a_photo_turned_beside_a_mask_is_refused(orientation, turns, width, tmp_path) -> None:
    """Unless data.exif says whether the masks fit the upright photos or the stored ones."""
    root, exif = tmp_path / "data", turned(orientation)
    upright = np.random.default_rng(0).integers(0, 3, (8, width), np.uint8)
    stored = np.rot90(upright, turns)
    options = ["data=masks", "data.val_count=1", *PLAIN, "data.crop=null", *reading(root)]
    for name in "ab":
        save(root / "images" / f"{name}.png", np.dstack([stored] * 3), exif=exif)
        save(root / "masks" / f"{name}.png", upright)
    with refused("2 of 2", "a.png, ", "data.exif=true", "data.exif=false"):
        index_of(*options)
    # The masks fit the upright photos, or the stored ones, or are turned, too.
    for more, mask in ((["data.exif=true"], upright), (["data.exif=false"], stored), ([], stored)):
        for name in "ab":
            save(root / "masks" / f"{name}.png", mask, exif=None if more else exif)
        for index in index_of(*options, *more):
            seen = np.asarray(stored) if "false" in str(more) else upright
            assert np.array_equal(index.read(0)[..., 0], seen)
            assert np.array_equal(index.read(0, 1)[..., 0], seen)


def test_the_check_names_masks_whose_palettes_differ(tmp_path: Path) -> None:
    """But above their highest index, and for data.ignore_index."""
    black, red, green = [0, 0, 0], [255, 0, 0], [0, 255, 0]
    masks: dict[str, Any] = {
        name: Image.fromarray(filled(1)) for name in ("a.png", "b.png", "d.png")
    }
    masks["a.png"].putpalette(black + red + green + red)
    masks["b.png"].putpalette(black + red + red)
    masks["d.png"].putpalette(black + green)
    masks["c.png"] = filled(1)
    options = options_of(tmp_path / "data", masks)
    num_files, problems = check(make_config(*options).data)
    [path] = problems
    assert (num_files, Path(path).name) == (8, "d.png")
