"""Small images, and data sets of every kind, for the tests of data."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from loaders import Loader, build_loaders
from loaders.index import Index
from loaders.open_index import open_index
from tests.formats import write_all
from tests.helpers import REPOSITORY, make_config

NUM_VAL, NUM_TRAIN = 7, 22
FOLDERS = ["data=imagefolder", "data.random_resized_crop=null", "data.hflip=0", "model=small_cnn"]
"""Overrides that read class folders without augmentation, and train the small CNN."""
PLAIN = ["data.mean=null", "data.std=null", "data.resize=null"]
CROPPED = ["data.crop=[32,32]", "global_batch_size=4"]
RESIZED_CROPS = ["data.random_resized_crop=[0.3,1]", "data.random_crop=false"]
TURNED = [
    *("data.rotation=40", "data.random_scale=[0.7,1.4]", "data.random_erasing=0.5"),
    *("data.randaugment=[2,9]", "data.cutmix=1", "data.colour_jitter=[0.3,0.3,0.3]"),
]


def loaders_of(*overrides: str, rank=0, world_size=1) -> tuple[Loader, Loader]:
    """The loaders of training and validation, on the CPU."""
    return build_loaders(make_config(*overrides), torch.device("cpu"), rank, world_size)


def index_in(loader: Loader) -> Index:
    """The index that a loader of images reads."""
    index: Any = loader.plan.samples
    return index.index


def paths_in(index: Index, side: int = 0) -> list[str]:
    """The paths of the files of one side."""
    source: Any = index.source
    return [source.path(sample, side) for sample in range(len(index))]


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
    """Write an image of any number of channels, which follow each other in each pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    interleaved = {"photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(path, image, **(interleaved | options))


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


# Kinds of data. Each function writes one below a folder.


def spoil_file(index: Index, sample: int) -> None:
    """Damage one file of a sample, the target's if it has one."""
    file = Path(paths_in(index, len(index.sides) - 1)[sample])
    content = file.read_bytes()
    file.unlink()  # it may be mapped into memory
    file.write_bytes(content[: 2 * len(content) // 3])


@dataclass
class Data:
    """A data set on disk, and what its files hold."""

    options: list[str]
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    """(height, width, C) in [0, 1], upright, by file name."""
    targets: dict[str, Any] = field(default_factory=dict)
    copy_of: str = ""
    """The kind of data whose samples it has in another form."""
    spoil: Callable[[Index, int], None] = spoil_file
    """Function that damages a sample."""


def common(root: Path) -> list[str]:
    """Overrides that read the data set of a kind in this folder."""
    is_split = (root / "test").is_dir()
    return reading(root, *([] if is_split else [f"data.val_count={NUM_VAL}"]))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


# Names of files that decoders read in different ways, what Pillow writes them with, and changes.
JPEGS: list[tuple[str, str, dict[str, Any]]] = [
    ("plain.jpg", "RGB", {}),
    ("progressive.jpg", "RGB", {"progressive": True}),
    ("profile.jpg", "RGB", {"icc_profile": bytes(20_000)}),
    ("stray.jpg", "RGB", {}),
    ("behind.jpg", "RGB", {}),
]
XMP = PngInfo()
XMP.add_itxt(
    "XML:com.adobe.xmp",
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>3</tiff:Orientation></x:xmpmeta>',
)
# The bytes at their ends belong to later frames.
MOVING = {"save_all": True, "append_images": [Image.new("RGB", (40, 40))]}
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("grey.png", "L", {}),
    ("palette.png", "P", {}),
    ("translucent.png", "RGBA", {}),
    ("turned.png", "RGB", {"exif": turned(6)}),
    ("xmp.png", "RGB", {"pnginfo": XMP}),
    ("moving.png", "RGB", MOVING),
    ("turned.webp", "RGB", {"exif": turned(5), "lossless": True}),
    ("cut.png", "RGB", {}),
    ("late.png", "RGB", {**MOVING, "default_image": True}),
    ("plain.bmp", "RGB", {}),
    ("cmyk.jpg", "CMYK", {"quality": 90}),
    ("bits.tif", "1", {}),
    ("turned.tif", "RGB", {"compression": "lzma", "tiffinfo": {0x112: 8}}),
    ("deep.tif", "RGB", {}),  # of 16 bits
]
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "stray.jpg": lambda content: content[:20] + b"\0\0\0" + content[20:],  # DALI refuses it
    "behind.jpg": lambda content: content + b"behind the end",
    "cut.png": lambda content: content[:-12],  # the last chunk is missing
}


NOT_BY_DALI = (
    *("translucent.png", "moving.png", "cut.png", "late.png", "turned.webp"),
    *("bits.tif", "turned.tif", "stray.jpg", "xmp.png"),
)


def photos(root: Path, by_dali: bool = False) -> Data:
    """JPEGs with any orientation, 0 and 9 too, and other forms of files, in three class folders."""
    data = Data([*FOLDERS, *PLAIN])
    forms = OTHERS + 3 * JPEGS
    if by_dali:
        forms = [form for form in OTHERS + 6 * JPEGS if form[0] not in NOT_BY_DALI]
    for number, (form, mode, options) in enumerate(forms[: NUM_VAL + NUM_TRAIN]):
        image = Image.fromarray(smooth(number, 45 + number, 80 - number))
        if form.endswith("jpg") and mode == "RGB":
            options = options | {"exif": turned(number % 10), "quality": 90}
        name, label = f"bild-ä {number} {form}", f"class {number % 3}"
        path = root / label / name
        data.inputs[name], data.targets[name] = save(path, image.convert(mode), **options), label
        if change := CHANGES.get(form):
            path.write_bytes(change(path.read_bytes()))
        if form == "deep.tif":
            tifffile.imwrite(path, 257 * np.asarray(image, np.uint16), photometric="rgb")
    return data


TIFFS: list[dict[str, Any]] = [
    {},
    {"planarconfig": "separate"},
    {"compression": "lzw", "predictor": 2},
    {"compression": "deflate"},
    {"compression": "lzma"},
    {"byteorder": ">"},
    {"photometric": "rgb"},  # the rest has three channels
    {"photometric": "rgb", "extratags": [(0x112, 3, 1, 3, True)]},  # turned by 180 degrees
    {"photometric": "cielab"},
]


def cells(root: Path, channels: int, dtype: str, kinds: Sequence[dict[str, Any]]) -> Data:
    """TIFFs of these kinds in turn."""
    data, largest = Data(["data=cells", *PLAIN]), np.iinfo(dtype).max
    for number in range(NUM_VAL + NUM_TRAIN):
        random, size = np.random.default_rng(number), (45, 48, channels)
        image = random.integers(0, largest, size, dtype=dtype, endpoint=True)
        name, label, kind = f"{number}.tif", "ab"[number % 2], kinds[number % len(kinds)]
        stored = np.moveaxis(image, -1, 0) if "planarconfig" in kind else image
        save_tiff(root / label / name, stored.squeeze(), **kind)
        data.inputs[name], data.targets[name] = image / np.float32(largest), label
    return data


def all_formats(root: Path, first: bool, background: list[int]) -> Data:
    """Photos in the first or in the last of all formats and modes; some are transparent."""
    data = Data([*FOLDERS, *PLAIN, f"data.background={background}"])
    written = write_all(root / "a", background)
    (root / "b").mkdir()
    num_files = NUM_VAL + NUM_TRAIN
    names = [*written][:num_files] if first else [*written][-num_files:]
    for number, name in enumerate(written):
        if name not in names:
            (root / "a" / name).unlink()
            continue
        data.inputs[name], data.targets[name] = written[name] / np.float32(255), "ab"[number % 2]
        (root / "a" / name).rename(root / "ab"[number % 2] / name)
    return data


def small_digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for 66 digits of three classes, and 9 that validate, with a small model."""
    root = digit_folders(tmp_path_factory.mktemp("images"), range(3), 22, 3)
    return [
        *(*FOLDERS, f"data.root={root}", "epochs=3", "model.kwargs.width=8"),
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        *("data.resize=null", "data.crop=[20,20]", "data.random_crop=true"),
        *("data.mean=[0.5]", "data.std=[0.25]"),
    ]
