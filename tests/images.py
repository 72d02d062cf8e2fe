"""Small images, and data sets of every kind, for the tests of data."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from loaders.images import HEADER, read_header
from loaders.shards import Part, pack_shards
from tests.helpers import REPOSITORY, make_config

NUM_VAL, NUM_TRAIN = 7, 22
CLASSES, IGNORED = (0, 1, 7, 200), 255  # of masks: far apart, so that a mixture is a new one
PLAIN = ["data.mean=null", "data.std=null", "data.resize=null"]


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
    upright = ImageOps.exif_transpose(Image.open(path))
    assert upright
    return np.asarray(upright.convert("RGB")) / np.float32(255)


def header_of(path: Path, content: str) -> np.void:
    """The header of a file as the index has it; `content` is that of `ImageSpec`."""
    return np.array([tuple(read_header(str(path), content))], HEADER)[0]


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


def replace_file(path: str, content: bytes) -> None:
    """As a new file: the old one may be mapped into memory."""
    os.unlink(path)
    Path(path).write_bytes(content)


def cut_short(path: str) -> None:
    """Only the last lines are missing, which are far below every centre crop."""
    content = Path(path).read_bytes()
    replace_file(path, content[: len(content) * 97 // 100])


# name of a way to read files -> the overrides that choose it
WAYS = {
    "threads": ["loader=pytorch"],
    "workers": ["loader=pytorch", "loader.num_workers=1"],
    "dali": ["loader=dali"],
}


def reading(root: Path, *more: str) -> list[str]:
    """Overrides that read the data set in this folder, with a cache beside it."""
    return [f"data.root={root}", f"data.cache_dir={root.parent / 'cache'}", *more]


# Files that are opened.

LISTENERS: list[Callable[[str], object]] = []


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    for listen in LISTENERS if event == "open" else ():
        listen(str(arguments[0]))


sys.addaudithook(audit)


@contextmanager
def opening(listen: Callable[[str], object]) -> Iterator[None]:
    """Call `listen` with the path of each file that this process opens."""
    LISTENERS.append(listen)
    try:
        yield
    finally:
        LISTENERS.remove(listen)


# Kinds of data. Each function writes one below a folder.


@dataclass
class Data:
    """A data set on disk, and what its files hold."""

    options: list[str]
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    """(height, width, C) in [0, 1], upright, by file name."""
    targets: dict[str, Any] = field(default_factory=dict)


def common(root: Path) -> list[str]:
    """Overrides that read the data set of a kind in this folder."""
    return reading(root, f"data.val_count={NUM_VAL}")


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


# Names of files that decoders read in different ways, what Pillow writes them with, and changes.
JPEGS: list[tuple[str, dict[str, Any]]] = [
    ("plain.jpg", {}),
    ("progressive.jpg", {"progressive": True}),
    ("profile.jpg", {"icc_profile": bytes(20_000)}),
    ("stray.jpg", {}),
    ("behind.jpg", {}),
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


def photos(root: Path) -> Data:
    """JPEGs with any orientation, 0 and 9 too, and other forms of files, in three class folders."""
    data = Data(["data=imagefolder", *PLAIN])
    for number in range(NUM_VAL + NUM_TRAIN):
        image, turn = Image.fromarray(smooth(number, 45 + number, 80 - number)), number // 2
        if number % 2:
            form, mode, options = OTHERS[turn]
        else:
            (form, more), mode = JPEGS[turn % len(JPEGS)], "RGB"
            options = {"exif": turned(turn % 10), "quality": 90, **more}
        name, label = f"bild-ä {number} {form}", f"class {number % 3}"
        path = root / label / name
        data.inputs[name], data.targets[name] = save(path, image.convert(mode), **options), label
        if change := CHANGES.get(form):
            path.write_bytes(change(path.read_bytes()))
        if form == "deep.tif":
            tifffile.imwrite(path, 257 * np.asarray(image, np.uint16), photometric="rgb")
    return data


def table(*cells: str) -> Callable[[Path], Data]:
    """Images whose labels are in a CSV file."""

    def write(root: Path) -> Data:
        data, lines = Data(["data=table", f"data.table={root}.csv", *PLAIN]), ["path,label"]
        for number in range(NUM_VAL + NUM_TRAIN):
            name, cell = f"{number}.png", cells[number % len(cells)]
            data.inputs[name] = save(root / name, smooth(number, 42, 44))
            data.targets[name] = cell
            lines.append(f"{name},{cell}")
        Path(f"{root}.csv").write_text("\n".join(lines))
        return data

    return write


def pairs(factor: int = 1) -> Callable[[Path], Data]:
    """Pairs whose targets are `factor` times as large as the inputs."""

    def write(root: Path) -> Data:
        data = Data(["data=pairs", "data.input_dir=blurry", "data.target_dir=sharp"])
        data.options += ["data.value_range=[0,1]"]
        for number in range(NUM_VAL + NUM_TRAIN):
            folder = "test" if number < NUM_VAL else "train"
            name, height = f"scene{number % 2}/{number}.png", 41 + number % 3
            for side, size in (("blurry", 1), ("sharp", factor)):
                image = smooth(number + 50 * (side == "sharp"), size * height, size * 50)
                values = save(root / folder / side / name, image)
                (data.inputs if side == "blurry" else data.targets)[f"{number}.png"] = values
        return data

    return write


def masks(root: Path) -> Data:
    """Masks of 8 and 16 bits, with palettes, as TIFFs and of one bit; some images are WebPs."""
    data = Data(["data=masks", f"data.ignore_index={IGNORED}", *PLAIN])
    (root / "masks").mkdir(parents=True)
    for number in range(NUM_VAL + NUM_TRAIN):
        random, height = np.random.default_rng(number), 40 + 4 * (number % 3)
        mask = random.choice([*CLASSES, IGNORED], (height // 4, 14)).astype(np.uint8)
        mask = mask.repeat(4, axis=0).repeat(4, axis=1)
        name, form = f"{number}.{'webp' if number % 3 == 1 else 'png'}", number % 6
        if form == 5:
            mask = (mask == 1).astype(np.uint8)
        image = np.stack([mask, mask, np.full_like(mask, number)], axis=-1)
        data.inputs[name] = save(root / "images" / name, image, lossless=True)
        data.targets[name] = mask.astype(np.int64)
        deep = mask.astype(np.uint16) if form in (1, 4) else mask
        if form in (3, 4):
            turned = form == 3  # by 180 degrees
            options: dict[str, Any] = {"extratags": [(274, 3, 1, 3, True)]} if turned else {}
            deep = deep[::-1, ::-1] if turned else deep
            tifffile.imwrite(root / "masks" / f"{number}.tif", deep, **options)
            continue
        stored = Image.fromarray(deep.astype(bool) if form == 5 else deep)
        if form == 2:
            stored.putpalette([(37 * i) % 256 for i in range(768)])
        stored.save(root / "masks" / f"{number}.png")
    return data


TIFFS: list[dict[str, Any]] = [
    {},
    {"planarconfig": "separate"},
    {"compression": "lzw", "predictor": 2},
    {"compression": "deflate"},
    {"compression": "lzma"},
    {"byteorder": ">"},
    {"photometric": "rgb"},  # the rest has three channels
    {"photometric": "rgb", "extratags": [(274, 3, 1, 3, True)]},  # an orientation
    {"photometric": "cielab"},
]


def cells(channels: int, dtype: str, *kinds: dict[str, Any]) -> Callable[[Path], Data]:
    """TIFFs of these kinds in turn."""

    def write(root: Path) -> Data:
        data = Data(["data=cells", *PLAIN])
        for number in range(NUM_VAL + NUM_TRAIN):
            image = np.random.default_rng(number).integers(
                0, np.iinfo(dtype).max, (45, 48, channels), dtype=dtype, endpoint=True
            )
            name, label, kind = f"{number}.tif", "ab"[number % 2], kinds[number % len(kinds)]
            stored = image[..., 0] if channels == 1 else image
            if channels == 1 or "photometric" in kind:
                kind = kind | {"planarconfig": None}
            elif kind.get("planarconfig") == "separate":
                stored = np.moveaxis(image, -1, 0)
            save_tiff(root / label / name, stored, **kind)
            data.inputs[name] = image / np.float32(np.iinfo(dtype).max)
            data.targets[name] = label
        return data

    return write


def sharded(write: Callable[[Path], Data], *options: str) -> Callable[[Path], Data]:
    """The same data in shards of a few samples."""

    def write_shards(root: Path) -> Data:
        data = write(files := root.parent / "files" / root.name)
        cfg = make_config(*data.options, *common(files), "data.crop=[24,32]")
        pack_shards(cfg.data, str(root), 0.02, Part(1, 1))
        data.options += options
        return data

    return write_shards


# name of the kind -> the function that writes it
KINDS: dict[str, Callable[[Path], Data]] = {
    "photos": photos,
    "several labels": table("cat;dog", "dog", ";", "cow; cat"),
    "numbers": table(*(f"{number}.25" for number in range(50))),
    "pairs": pairs(),
    "pairs, targets twice as large": pairs(2),
    "masks": masks,
    "cells of 8 bits, not compressed": cells(5, "uint8", {}),
    "cells of 16 bits": cells(5, "uint16", *TIFFS[:6]),
    "cells of three channels": cells(3, "uint16", *TIFFS),
    "cells of one channel": cells(1, "uint8", *TIFFS[:4]),
    "photos in shards": sharded(photos),
    "masks in shards, in windows": sharded(masks, "data.shuffle=window", "data.shuffle_window=2"),
}
