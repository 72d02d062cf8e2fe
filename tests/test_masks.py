"""Masks: what their files may hold, and training on them."""

import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from conf.errors import UserError
from loaders.check import check
from loaders.images import HEADER, decode, read_header
from loaders.index import build_index
from tests.helpers import (
    SCRIPTS,
    checkpoint_of,
    events_of,
    make_config,
    published,
    summary_of,
    train,
    validated,
)

CPU = torch.device("cpu")
IGNORED = 255


def save(path: Path, image: np.ndarray, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".tif":
        tifffile.imwrite(path, image)
        return
    stored = Image.fromarray(image)
    if palette:
        stored = stored.convert("L")
        stored.putpalette([(37 * i) % 256 for i in range(768)])
    stored.save(path, lossless=True)


def stored_mask(path: Path | str) -> np.ndarray:
    """(height, width, 1): the indices in a file."""
    header = np.array([tuple(read_header(str(path), "indices"))], HEADER)[0]
    return decode(Path(path).read_bytes(), header, "indices")


@pytest.mark.parametrize(
    ("form", "expected"), [("P", 9), ("L", 9), ("I;16", 300), ("1", 1), ("tif", 300)]
)
def test_indices_are_read_as_stored(form: str, expected: int, tmp_path) -> None:
    indices = np.zeros((5, 6), np.uint16)
    indices[2, 3] = expected
    path = tmp_path / ("m.tif" if form == "tif" else "m.png")
    if form == "tif":
        tifffile.imwrite(path, indices)
    elif form == "1":
        Image.fromarray(indices.astype(bool)).save(path)
    else:
        save(path, indices if form == "I;16" else indices.astype(np.uint8), palette=form == "P")
    assert np.array_equal(stored_mask(path)[..., 0], indices)


def folder_of(tmp_path: Path, masks: dict[str, Image.Image | np.ndarray]) -> Path:
    root = tmp_path / "data"
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        path = root / "masks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(mask, np.ndarray):
            save(path, mask)
        else:
            mask.save(path)
    return root


def filled(value: int, height: int = 8, width: int = 10) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[0, 0] = value
    return mask


@pytest.mark.parametrize(
    ("masks", "overrides", "shown"),
    [
        ({"a.png": filled(255)}, [], ["a.png", "data.ignore_index=255"]),
        ({"a.png": filled(4)}, ["data.num_classes=3"], ["a.png", "data.num_classes=3", "up to 4"]),
        ({"a.png": filled(0), "b.png": filled(0)}, [], ["data.num_classes"]),
        ({"a.png": filled(1, 8, 9)}, [], ["a.png", "8x9", "8x10"]),
        ({"a.png": Image.new("RGB", (10, 8))}, [], ["a.png", "RGB"]),
        ({"a.jpg": Image.new("L", (10, 8))}, [], ["a.jpg", "JPEG"]),
        ({"a.tif": np.zeros((8, 10), np.float32)}, [], ["a.tif", "float32"]),
    ],
)
def test_wrong_masks_are_named_at_start(masks, overrides, shown: list[str], tmp_path) -> None:
    root = folder_of(tmp_path, {"b.png": filled(1)} | masks)
    options = ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}", "data.val_count=1"]
    with pytest.raises(UserError) as error:
        build_index(make_config(*options, *overrides).data)
    assert all(part in str(error.value) for part in shown)


def test_a_mask_without_an_image_is_named(tmp_path) -> None:
    root = folder_of(tmp_path, {"a.png": filled(1), "b.png": filled(1)})
    (root / "images" / "b.png").unlink()
    with pytest.raises(UserError, match="masks/b.png"):
        build_index(
            make_config("data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}").data
        )


def test_check_decodes_masks_as_masks(tmp_path) -> None:
    root = folder_of(tmp_path, {"a.png": Image.new("RGB", (10, 8)), "b.png": filled(1)})
    options = ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}", "data.val_count=1"]
    num_files, problems = check(make_config(*options).data)
    assert num_files == 4
    [(path, reason)] = problems.items()
    assert path.endswith("masks/a.png")
    assert "of mode RGB; store class indices" in reason


# training


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> list[str]:
    """Options of 36 noisy images with bright squares (1) whose left neighbours are dark ones (2)."""
    root, random = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for number in range(36):
        image, mask = random.normal(100, 15, (32, 32, 3)), np.zeros((32, 32), np.uint8)
        y, x = random.integers(0, 20, 2)
        for index, value in ((1, 200), (2, 20)):
            place = (slice(y, y + 12), slice(x + 6 * (2 - index), x + 6 * (3 - index)))
            image[place], mask[place] = value, index
        mask[:2] = IGNORED
        save(root / "images" / f"{number:02d}.png", image.clip(0, 255).astype(np.uint8))
        save(root / "masks" / f"{number:02d}.png", mask, palette=True)
    return [
        *("data=masks", f"data.root={root}", f"data.cache_dir={root / 'cache'}"),
        *(
            "data.crop=[32,32]",
            "data.vflip=0.5",
            f"data.ignore_index={IGNORED}",
            "data.val_count=9",
        ),
        *("task=segmentation", "model=unet", "model.kwargs.width=8", "model.kwargs.num_levels=2"),
        *("global_batch_size=8", "epochs=8", "optimizer.lr=0.01", "loss.weights=auto"),
    ]


def test_train_learns_to_segment_and_shows_it(squares: list[str], tmp_path) -> None:
    options = [*squares, "epochs=20", "model.kwargs.batch_norm=false"]
    printed = train("train.py", tmp_path / "run", *options)
    assert "masks of 3 classes (0, 1, 2)" in printed
    summary = summary_of(tmp_path / "run")
    assert summary["val/miou"] > 0.8
    assert summary["val/pixel_accuracy"] > 0.95
    tags = events_of(tmp_path / "run").Tags()["images"]
    assert tags == ["train/inputs", "val/image", "val/mask", "val/prediction"]


# part: compose
@pytest.mark.parametrize("script", [s for s in SCRIPTS if re.search("accum|ddp_amp|fsdp", s)])
def test_micro_batches_low_precision_and_sharded_models_segment(
    script: str, squares: list[str], tmp_path
) -> None:
    options = [*squares, "epochs=1", "max_steps=2", "model.kwargs.num_levels=3"]
    train(script, tmp_path / "run", *options)
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 2
    tolerance = 0.05 if "amp" in script else 1e-4
    for name, value in validated(published(tmp_path / "run"), options).items():
        assert summary[name] == pytest.approx(value, abs=tolerance), name
    tags = events_of(tmp_path / "run").Tags()["images"]
    assert tags == ["train/inputs", "val/image", "val/mask", "val/prediction"]


def test_two_ranks_segment_like_one_process(squares: list[str], tmp_path) -> None:  # part: compose
    """And their 9 validation images, 5 and 4 of them, give the metrics of all 9."""
    options = [*squares, "model.kwargs.batch_norm=false", "epochs=2", "optimizer.lr=0.001"]
    for script in ("train.py", "train_ddp.py"):
        train(script, tmp_path / script, *options)
    one, two = (summary_of(tmp_path / script) for script in ("train.py", "train_ddp.py"))
    for name in ("val/loss", "val/miou", "val/pixel_accuracy"):
        assert two[name] == pytest.approx(one[name], abs=1e-3), name
    weights = [checkpoint_of(tmp_path / script)["model"] for script in ("train.py", "train_ddp.py")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=1e-3, rtol=0)
