"""Small images, folders of them, and loaders of these, for the tests of data."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps

from loaders import Loader, build_loaders
from loaders.index import Index
from loaders.layouts import open_index
from tests.helpers import REPOSITORY, make_config

FOLDERS = ["data=imagefolder", "data.random_resized_crop=null", "data.hflip=0", "model=small_cnn"]
"""Overrides that read class folders without augmentation, and train the small CNN."""
PLAIN = ["data.mean=null", "data.std=null", "data.resize=null"]


def loaders_of(*overrides: str, rank=0, world_size=1) -> tuple[Loader, Loader]:
    """The loaders of training and validation, on the CPU."""
    return build_loaders(make_config(*overrides), torch.device("cpu"), rank, world_size)


def index_in(loader: Loader) -> Index:
    """The index that a loader of images reads."""
    index: Any = loader.plan.samples
    return index.index


def paths_in(index: Index, side: int = 0) -> list[str]:
    """The paths of the files of one side."""
    return [index.name_of(sample, side) for sample in range(len(index))]


def index_of(*overrides: str) -> tuple[Index, Index]:
    """The indexes of training and validation."""
    indexes = open_index(make_config(*overrides).data)
    return indexes["train"], indexes["val"]


def smooth(number: int, height: int, width: int) -> np.ndarray:
    """Photograph-like image (height, width, 3): waves and a gradient that depend on the number."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (9 + c + number) + number) * np.cos(y / (13 + c)) for c in range(3)]
    image = 128 + 80 * np.stack(waves, axis=-1) + 30 * (x / width)[..., None]
    return image.clip(0, 255).astype(np.uint8)


def save(path: Path, image: np.ndarray | Image.Image, **options: Any) -> np.ndarray:
    """Write an image; its pixels in [0, 1] as Pillow reads them, as RGB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    return np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB")) / np.float32(255)


def save_tiff(path: Path, image: np.ndarray, **options: Any) -> None:
    """Write an image of any number of channels, by default grey ones, interleaved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.get("planarconfig") == "separate":
        image = np.moveaxis(image, -1, 0)
    grey: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(path, image.squeeze(), **(grey | options))


def turned(orientation: int) -> Image.Exif:
    """The tag of a photo that is stored so."""
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


def make_photos(root: Path, count: int) -> Path:
    """Class folders a, b and c of JPEGs with names like `foto ä 7.jpg`."""
    for number in range(count):
        path = root / "abc"[number % 3] / f"foto ä {number}.jpg"
        save(path, smooth(number, 60 + number % 5, 80), quality=90)
    return root


def digit_folders(root: Path, digits: range, num_train: int, num_val: int) -> Path:
    """Real digits as PNG files in class folders, so many of each."""
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        for split, count in [("train", num_train), ("val", num_val)]:
            images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
            for digit in digits:
                for number in np.flatnonzero(labels == digit)[:count]:
                    save(root / split / f"digit {digit}" / f"{number:05d}.png", images[number])
    return root


def rot(path: str) -> None:
    """Replace the content of a file, not its size and its time."""
    stat = os.stat(path)
    os.unlink(path)  # it may be mapped into memory
    Path(path).write_bytes(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def reading(root: Path, *more: str) -> list[str]:
    """Overrides that read the data set in this folder, with a cache beside it."""
    return [f"data.root={root}", f"data.cache_dir={root.parent / 'cache'}", *more]


def photos_in(root: Path, *more: str) -> list[str]:
    """Overrides that read class folders in centre crops of 40x40 pixels, in batches of four."""
    options = [*FOLDERS, "data.resize=null", "data.crop=[40,40]", "global_batch_size=4"]
    return [*options, *reading(root), *more]


def small_digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for 66 digits of three classes, and 9 that validate, with a small model."""
    root = digit_folders(tmp_path_factory.mktemp("images"), range(3), 22, 3)
    return [
        *(*FOLDERS, f"data.root={root}", "epochs=3", "model.kwargs.width=8"),
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        *("data.resize=null", "data.crop=[20,20]", "data.random_crop=true"),
        *("data.mean=[0.5]", "data.std=[0.25]"),
    ]
