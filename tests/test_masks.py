"""Masks: what their files may hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers import refused
from tests.images import index_of, reading, save


def filled(value: int, height: int = 8, width: int = 10) -> np.ndarray:
    mask = np.zeros((height, width), np.uint8)
    mask[2, 3] = value
    return mask


def coloured(index: int, *colours: tuple[int, int, int]) -> Image.Image:
    """A mask of 0 and one index, with these colours."""
    mask = Image.fromarray(filled(index))
    mask.putpalette(sum(colours, ()))
    return mask


def options_of(root: Path, masks: dict[str, Any]) -> list[str]:
    """Write black images with these masks; returns the overrides that read them."""
    for name, mask in masks.items():
        save(root / "images" / f"{Path(name).stem}.png", np.zeros((8, 10, 3), np.uint8))
        save(root / "masks" / name, mask)
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
        (
            {"b.png": coloured(1, BLACK, RED), "c.png": coloured(1, BLACK, GREEN)},
            [],
            ["index 1", "(255, 0, 0)", "b.png", "(0, 255, 0)", "c.png"],
        ),
        ({"a.tif": np.zeros((8, 10), np.float32)}, [], ["a.tif", "float32"]),
    ],
)
def test_wrong_masks_are_named_at_start(masks: dict, overrides, shown, tmp_path: Path) -> None:
    with refused(*shown):
        index_of(*options_of(tmp_path / "data", {"b.png": filled(1)} | masks), *overrides)


def test_palettes_may_differ_above_the_highest_index(tmp_path: Path) -> None:
    palettes = coloured(1, BLACK, RED, GREEN, RED), coloured(1, BLACK, RED, RED), filled(1)
    masks = dict(zip(("a.png", "b.png", "c.png"), palettes, strict=True))
    train, _ = index_of(*options_of(tmp_path / "data", masks))
    assert train.target.describe() == "masks of 2 classes (0, 1)"
