"""Masks: what their files may hold, and training on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loaders.check import check
from loaders.index import build_index
from tests.helpers import events_of, make_config, refused, summary_of, train
from tests.images import IGNORED, save


def filled(value: int, height: int = 8, width: int = 10) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[2, 3] = value
    return mask


def options_of(tmp_path: Path, masks: dict[str, Any]) -> list[str]:
    """Options that read these masks and an image for each."""
    root = tmp_path / "data"
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        save(root / "masks" / name, mask)
    return ["data=masks", f"data.root={root}", f"data.cache_dir={tmp_path}", "data.val_count=1"]


@pytest.mark.parametrize(
    ("masks", "overrides", "shown"),
    [
        ({"a.png": filled(255)}, [], ["a.png", "data.ignore_index=255"]),
        ({"a.png": filled(3)}, ["data.num_classes=3"], ["a.png", "data.num_classes=3", "up to 3"]),
        ({"a.png": filled(0), "b.png": filled(0)}, [], ["data.num_classes"]),
        ({"a.png": filled(1, 8, 9)}, [], ["a.png", "8x9", "8x10"]),
        ({"a.png": Image.new("RGB", (10, 8))}, [], ["a.png", "RGB"]),
        ({"a.jpg": Image.new("L", (10, 8))}, [], ["a.jpg", "JPEG"]),
        ({"a.tif": np.zeros((8, 10), np.float32)}, [], ["a.tif", "float32"]),
    ],
)
def test_wrong_masks_are_named_at_start(masks, overrides, shown: list[str], tmp_path) -> None:
    options = options_of(tmp_path, {"b.png": filled(1)} | masks)
    with refused(*shown):
        build_index(make_config(*options, *overrides).data)


def test_check_decodes_masks_as_masks(tmp_path) -> None:
    options = options_of(tmp_path, {"a.png": Image.new("RGB", (10, 8))})
    options_of(tmp_path, {f"{number}.png": filled(1) for number in range(3)})
    num_files, problems = check(make_config(*options).data)
    assert num_files == 7  # an image without its mask is not read
    [(path, reason)] = problems.items()
    assert path.endswith("masks/a.png")
    assert "RGB" in reason


# training


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> list[str]:
    """Options of 36 noisy images: bright squares (1), each with a dark one (2) on its left."""
    root, random = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for number in range(36):
        image, mask = random.normal(100, 15, (32, 32, 3)), np.zeros((32, 32), np.uint8)
        y, x = random.integers(0, 20, 2)
        for index, value in ((1, 200), (2, 20)):
            place = (slice(y, y + 12), slice(x + 6 * (2 - index), x + 6 * (3 - index)))
            image[place], mask[place] = value, index
        mask[:2] = IGNORED
        save(root / "images" / f"{number:02d}.png", image.clip(0, 255).astype(np.uint8))
        save(root / "masks" / f"{number:02d}.png", mask)
    return [
        *("data=masks", f"data.root={root}", f"data.cache_dir={root / 'cache'}"),
        *("data.crop=[32,32]", "data.vflip=0.5", f"data.ignore_index={IGNORED}"),
        *("data.val_count=9", "global_batch_size=8", "optimizer.lr=0.01", "loss.weights=auto"),
        *("task=segmentation", "model=unet", "model.kwargs.width=8", "model.kwargs.num_levels=2"),
        "model.kwargs.batch_norm=false",
    ]


def test_train_learns_to_segment_and_shows_it(squares: list[str], tmp_path) -> None:
    printed = train("train.py", tmp_path / "run", *squares, "epochs=20")
    assert "masks of 3 classes (0, 1, 2)" in printed
    summary = summary_of(tmp_path / "run")
    assert summary["val/miou"] > 0.8
    assert summary["val/pixel_accuracy"] > 0.95
    shown = ["train/inputs", "val/image", "val/mask", "val/prediction"]
    assert events_of(tmp_path / "run").Tags()["images"] == shown
