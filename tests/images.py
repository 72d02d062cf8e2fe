"""Small images for the tests of data sets."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps


def smooth(number: int, height: int, width: int) -> np.ndarray:
    """A (height, width, 3) photograph-like image: waves and a gradient, other ones for each number."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (9 + c + number) + number) * np.cos(y / (13 + c)) for c in range(3)]
    image = 128 + 80 * np.stack(waves, axis=-1) + 30 * (x / width)[..., None]
    return image.clip(0, 255).astype(np.uint8)


def save(path: Path, image: np.ndarray | Image.Image, **options: Any) -> np.ndarray:
    """Write an image; its pixels in [0, 1] as Pillow reads them, as RGB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    upright = ImageOps.exif_transpose(Image.open(path))
    assert upright
    return np.asarray(upright.convert("RGB")) / np.float32(255)


def make_photos(root: Path, count: int) -> Path:
    """Class folders a, b and c of JPEGs with names like `foto ä 7.jpg`."""
    for number in range(count):
        path = root / "abc"[number % 3] / f"foto ä {number}.jpg"
        save(path, smooth(number, 60 + number % 5, 80), quality=90)
    return root


def replace_file(path: str, content: bytes) -> None:
    """As a new file: the old one may be mapped into memory."""
    os.unlink(path)
    Path(path).write_bytes(content)


def cut_short(path: str) -> None:
    """Only the last lines are missing, which are far below every centre crop."""
    content = Path(path).read_bytes()
    replace_file(path, content[: len(content) * 97 // 100])
