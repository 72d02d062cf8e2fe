"""Data sets of every kind that a project reads, ways to read them, and what their samples are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from loaders import Loader, build_loaders
from loaders.layouts import open_index
from tests.formats import write_all
from tests.helpers import make_config
from tests.images import (
    FOLDERS,
    PLAIN,
    index_in,
    paths_in,
    reading,
    save,
    save_tiff,
    smooth,
    turned,
)
from tests.rows import rows

NUM_VAL, NUM_TRAIN = 7, 22
NUM_FILES = NUM_VAL + NUM_TRAIN
WHITE = (255, 255, 255)


@dataclass
class Data:
    """A data set on disk, and what its files hold."""

    options: list[str]
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    """(height, width, C) in [0, 1], upright, by file name."""
    targets: dict[str, Any] = field(default_factory=dict)
    """What an image is trained on: an array (height, width, C) or (height, width), or numbers."""
    copy_of: str = ""
    """The kind of data whose samples it has in another form."""


def common(root: Path) -> list[str]:
    """Overrides that read the data set of a kind in this folder."""
    is_split = (root / "test").is_dir()
    return reading(root, *([] if is_split else [f"data.val_count={NUM_VAL}"]))


JPEGS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("progressive", {"progressive": True}),
    ("profile", {"icc_profile": bytes(20_000)}),
    ("behind", {}),
]
READ_BY_DALI = ["grey uint8.png", "palette.png", "bmp.png", "turned.JPEG", "cmyk.jpg"]
READ_BY_DALI += ["deep rgb.tif"]


def photos(root: Path, chosen: slice | list[str], background: Sequence[int] = WHITE) -> Data:
    """Files of these formats, and JPEGs with any orientation, 0 and 9 too, in three classes."""
    data = Data([*FOLDERS, *PLAIN, f"data.background={[*background]}"])
    written = write_all(folder := root.with_name(f"all of {root.name}"), background)
    names = chosen if isinstance(chosen, list) else [*written][chosen]
    for number in range(NUM_FILES):
        label = f"class {number % 3}"
        if number < len(names):
            path = root / label / f"bild-ä {names[number]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            (folder / names[number]).rename(path)
            data.inputs[path.name] = written[names[number]] / np.float32(255)
        else:
            form, options = JPEGS[number % len(JPEGS)]
            path = root / label / f"bild-ä {number} {form}.jpg"
            options = options | {"exif": turned(number % 10), "quality": 90}
            data.inputs[path.name] = save(path, smooth(number, 45 + number, 80 - number), **options)
            if form == "behind":
                path.write_bytes(path.read_bytes() + b"behind the end")
        data.targets[path.name] = number % 3
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


def cells(root: Path, channels: int, dtype: str, tiffs: Sequence[dict[str, Any]]) -> Data:
    """TIFFs of these kinds in turn."""
    data, largest = Data(["data=cells", *PLAIN]), np.iinfo(dtype).max
    for number in range(NUM_FILES):
        random, size = np.random.default_rng(number), (45, 48, channels)
        image = random.integers(0, largest, size, dtype=dtype, endpoint=True)
        name = f"{number}.tif"
        save_tiff(root / "ab"[number % 2] / name, image, **tiffs[number % len(tiffs)])
        data.inputs[name], data.targets[name] = image / np.float32(largest), number % 2
    return data


def pairs(root: Path, factor: int = 1) -> Data:
    """Pairs whose targets are `factor` times as large as the inputs."""
    data = Data(["data=pairs", "data.input_dir=blurry", "data.target_dir=sharp"])
    data.options += ["data.value_range=[0,1]"]
    for number in range(NUM_FILES):
        folder = root / ("test" if number < NUM_VAL else "train")
        name, height = f"{number}.png", 41 + number % 3
        image = smooth(number, height, 50)
        target = smooth(number + 50, factor * height, factor * 50)
        data.inputs[name] = save(folder / f"blurry/scene{number % 2}" / name, image)
        data.targets[name] = save(folder / f"sharp/scene{number % 2}" / name, target)
    return data


CLASSES, IGNORED = (0, 1, 7, 200), 255  # far apart, so that a mixture is a new one


def masks(root: Path) -> Data:
    """Masks of 1 to 32 bits, with palettes and as TIFFs; some images are WebPs."""
    data = Data(["data=masks", f"data.ignore_index={IGNORED}", *PLAIN])
    (root / "masks").mkdir(parents=True)
    types = {1: np.uint16, 4: np.int32, 5: np.bool_}
    for number in range(NUM_FILES):
        random, height = np.random.default_rng(number), 40 + 4 * (number % 3)
        mask = random.choice([*CLASSES, IGNORED], (height // 4, 14)).astype(np.uint8)
        mask = mask.repeat(4, axis=0).repeat(4, axis=1)
        name, form = f"{number}.{'webp' if number % 3 == 1 else 'png'}", number % 6
        if form == 5:
            mask = (mask == 1).astype(np.uint8)
        image = np.stack([mask, mask, np.full_like(mask, number)], axis=-1)
        data.inputs[name] = save(root / "images" / name, image, lossless=True)
        data.targets[name] = mask.astype(np.int64)
        stored = Image.fromarray(mask.astype(types.get(form, np.uint8)))
        options: dict[str, Any] = {"tiffinfo": {0x112: 3}} if form == 3 else {}
        if form == 2:
            stored.putpalette([(37 * i) % 256 for i in range(768)])
        elif form == 3:
            stored = stored.rotate(180)
        stored.save(root / "masks" / f"{number}.{'tif' if form in (3, 4) else 'png'}", **options)
    return data


def table(root: Path, labels: dict[str, list[float]]) -> Data:
    """Images whose labels are in a CSV file: the cells of some in turn, and what they become."""
    data = Data(["data=table", "model=small_cnn", f"data.table={root}.csv", *PLAIN])
    lines = ["path,label"]
    for number, cell in zip(range(NUM_FILES), cycle(labels), strict=False):
        name = f"{number}.png"
        data.inputs[name] = save(root / name, smooth(number, 42, 44))
        data.targets[name] = labels[cell]
        lines.append(f"{name},{cell}")
    Path(f"{root}.csv").write_text("\n".join(lines))
    return data


def sharded(root: Path, kind: str, options: Sequence[str] = ()) -> Data:
    """Data of this kind in shards of a few samples."""
    data = KINDS[kind](files := root.parent / "files" / root.name)
    packed = make_config(*data.options, *common(files)).data
    import_module("loaders.shards").pack_shards(packed, open_index(packed), str(root), "0.02")
    data.options += options
    data.copy_of = "" if options else kind
    return data


SEVERAL = {"cat;dog": [1.0, 0, 1], "dog": [0, 0, 1.0], ";": [0.0, 0, 0], "cow; cat": [1.0, 1, 0]}
five_channels = partial(cells, channels=5, dtype="uint16")
WINDOWS = ["data.shuffle=window", "data.shuffle_window=2"]
in_windows = partial(sharded, kind="masks", options=WINDOWS)
KINDS: dict[str, Callable[[Path], Data]] = {
    "photos": partial(photos, chosen=[]),
    "photos that DALI reads": partial(photos, chosen=READ_BY_DALI),
    "cells that DALI reads": partial(five_channels, tiffs=[{}, *TIFFS[2:4], *TIFFS[5:6]]),
    "formats": partial(photos, chosen=slice(NUM_FILES)),
    "other formats": partial(photos, chosen=slice(NUM_FILES, None), background=[10, 200, 70]),
    "cells of 8 bits, not compressed": partial(cells, channels=5, dtype="uint8", tiffs=[{}]),
    "cells of 16 bits": partial(five_channels, tiffs=TIFFS[:6]),
    "cells of three channels": partial(cells, channels=3, dtype="uint16", tiffs=TIFFS),
    "cells of one channel": partial(cells, channels=1, dtype="uint8", tiffs=TIFFS[:4]),
    **dict(
        rows(
            ("pairs", pairs),
            ("pairs, targets twice as large", partial(pairs, factor=2)),
            ("masks", masks),
            needs="data=pairs",
        )
    ),
    **dict(
        rows(
            ("several labels", partial(table, labels=SEVERAL)),
            ("numbers", partial(table, labels={f"{n}.25": [n + 0.25] for n in range(50)})),
            needs="data=table",
        )
    ),
}
"""Name of a kind of data in files -> function that writes it below a folder."""
IN_SHARDS: dict[str, Callable[[Path], Data]] = dict(
    [
        *rows(("photos in shards", partial(sharded, kind="photos")), needs="loaders.shards"),
        *rows(("masks in shards, in windows", in_windows), needs="loaders.shards data=masks"),
    ]
)
OTHERS = dict(rows(("dali", ["loader=dali", "loader.num_threads=2"])))
READERS = {
    "threads": ["loader=pytorch", "loader.num_threads=2"],
    "workers": ["loader=pytorch", "loader.num_workers=2"],
    **OTHERS,
}
"""Name of a way to read files -> the overrides that choose it."""
COPIES = dict(rows(("packed", ["loader=packed"])))
"""Those that read pixels which were stored before."""
CROPS = ["data.crop=[24,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]


class Sample(NamedTuple):
    name: str
    row: np.void
    inputs: Tensor
    target: Tensor


class Place:
    """A kind of data in a folder, its loaders and, by split, the names of its files."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.root = folder, folder / "data"
        self.data = (KINDS | IN_SHARDS)[kind](self.root)
        self.epochs: dict[tuple[object, ...], list[Sample]] = {}
        self.names = {
            index_in(loader).name: [Path(file).name for file in paths_in(index_in(loader))]
            for loader in self.loaders("threads")
        }

    def loaders(self, way: str, *more: str, rank=0, num_ranks=1) -> tuple[Loader, Loader]:
        """Those of training and validation, in batches of four random crops of 24x32 pixels."""
        options = (*self.data.options, *CROPS, *common(self.root), *(READERS | COPIES)[way])
        out = self.folder / f"pack {' '.join(more)}".replace("=", " ")
        options += (f"loader.pack='{out}'",) * (way in COPIES)
        cfg = make_config(*options, "global_batch_size=4", *more)
        if way in COPIES:
            import_module("loaders.pack").pack(cfg.data, out)
        return build_loaders(cfg, torch.device("cpu"), rank, num_ranks)

    def read(self, loader: Loader, epoch: int | None = 0) -> list[Sample]:
        """The samples of an epoch."""
        loader.set_epoch(epoch or 0)
        names, found = self.names[index_in(loader).name], []
        for batch in loader:
            rows = loader.last_rows
            in_order = [names[sample] for sample in rows["sample"]]
            found += [Sample(*one) for one in zip(in_order, rows, *batch, strict=True)]
        return found

    def epoch(self, way: str, epoch: int | None, *more: str) -> list[Sample]:
        """An epoch of training, or (None) the validation, by one process."""
        if (way, epoch, *more) not in self.epochs:
            loader = self.loaders(way, *more)[epoch is None]
            self.epochs[way, epoch, *more] = self.read(loader, epoch)
        return self.epochs[way, epoch, *more]

    def assert_right(self, sample: Sample) -> None:
        """Inputs and target are what the files hold in the rectangle of the row."""
        inputs, stored = self.data.inputs[sample.name], self.data.targets[sample.name]
        if isinstance(stored, np.ndarray):
            target = cut_out(stored, sample.row, len(stored) // len(inputs))
        else:
            target = torch.tensor(stored)
        expected = [cut_out(inputs, sample.row), target]
        atol = 4.01 / 255 if sample.name.endswith("jpg") else 1e-5
        torch.testing.assert_close([*sample[2:]], expected, rtol=0, atol=atol, msg=sample.name)


def cut_out(image: np.ndarray, row: np.void, factor: int = 1) -> Tensor:
    """The rectangle of a row of the plan, flipped, as (C, H, W), or (H, W) of a mask."""
    y, x, height, width = (factor * int(row[key]) for key in ("y", "x", "height", "width"))
    image = image[y : y + height, x : x + width]
    image = image[::-1] if row["vflip"] else image
    image = image[:, ::-1] if row["hflip"] else image
    return torch.from_numpy((image if image.ndim == 2 else np.moveaxis(image, -1, 0)).copy())
