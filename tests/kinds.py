"""Data sets of every kind that a project reads, and ways to read them."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.formats import write_all
from tests.helpers import make_config
from tests.images import (
    CROPPED,
    NUM_TRAIN,
    NUM_VAL,
    PLAIN,
    TIFFS,
    Data,
    all_formats,
    cells,
    common,
    photos,
    reading,
    save,
    smooth,
)
from tests.rows import rows


def pairs(root: Path, factor: int = 1) -> Data:
    """Pairs whose targets are `factor` times as large as the inputs."""
    data = Data(["data=pairs", "data.input_dir=blurry", "data.target_dir=sharp"])
    data.options += ["data.value_range=[0,1]"]
    for number in range(NUM_VAL + NUM_TRAIN):
        folder = root / ("test" if number < NUM_VAL else "train")
        name, height = f"{number}.png", 41 + number % 3
        image = smooth(number, height, 50)
        target = smooth(number + 50, factor * height, factor * 50)
        data.inputs[name] = save(folder / f"blurry/scene{number % 2}" / name, image)
        data.targets[name] = save(folder / f"sharp/scene{number % 2}" / name, target)
    return data


def pairs_of_all_formats(root: Path) -> Data:
    """Each target is a copy of its input."""
    data = Data(["data=pairs", "data.value_range=[0,1]"])
    written = write_all(root / "input", background=[255, 255, 255])
    for name in [*written][NUM_VAL + NUM_TRAIN :]:
        (root / "input" / name).unlink()
    for name in [*written][: NUM_VAL + NUM_TRAIN]:
        data.inputs[name] = data.targets[name] = written[name] / np.float32(255)
    shutil.copytree(root / "input", root / "target")
    return data


def split_folders(write: Callable[[Path], Data], root: Path) -> list[str]:
    """Write data of a kind into train/, val/ and test/; returns the overrides that read it."""
    for split in ("train", "val", "test"):
        data = write(root / split)
    return [*data.options, *reading(root), *CROPPED]


def without_val(root: Path) -> None:
    shutil.rmtree(root / "val")


def split_pairs(root: Path) -> list[str]:
    """Pairs in all splits; returns the overrides that read them."""
    data = pairs(root)
    shutil.copytree(root / "test", root / "val")
    return [*data.options, *reading(root), *CROPPED]


CLASSES, IGNORED = (0, 1, 7, 200), 255  # far apart, so that a mixture is a new one


def masks(root: Path) -> Data:
    """Masks of 1 to 32 bits, with palettes and as TIFFs; some images are WebPs."""
    data = Data(["data=masks", f"data.ignore_index={IGNORED}", *PLAIN])
    (root / "masks").mkdir(parents=True)
    types = {1: np.uint16, 4: np.int32, 5: np.bool_}
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
        stored = Image.fromarray(mask.astype(types.get(form, np.uint8)))
        options: dict[str, Any] = {"tiffinfo": {0x112: 3}} if form == 3 else {}
        if form == 2:
            stored.putpalette([(37 * i) % 256 for i in range(768)])
        elif form == 3:
            stored = stored.rotate(180)
        stored.save(root / "masks" / f"{number}.{'tif' if form in (3, 4) else 'png'}", **options)
    return data


def table(root: Path, labels: Sequence[str]) -> Data:
    """Images whose labels are in a CSV file."""
    data = Data(["data=table", "model=small_cnn", f"data.table={root}.csv", *PLAIN])
    for number in range(NUM_VAL + NUM_TRAIN):
        name = f"{number}.png"
        data.inputs[name] = save(root / name, smooth(number, 42, 44))
        data.targets[name] = labels[number % len(labels)]
    lines = ["path,label", *map(",".join, data.targets.items())]
    Path(f"{root}.csv").write_text("\n".join(lines))
    return data


def split_table(root: Path, labels: Sequence[str]) -> list[str]:
    """A table with a column of all splits; returns the overrides that read it."""
    data, path = table(root, labels), Path(f"{root}.csv")
    head, *lines = path.read_text().splitlines()
    splits = [("train", "val", "test", "train")[number % 4] for number in range(len(lines))]
    lines = [f"{line},{split}" for line, split in zip(lines, splits, strict=True)]
    path.write_text("\n".join([f"{head},split", *lines]))
    return [*data.options, *reading(root), *CROPPED]


def without_val_rows(root: Path) -> None:
    path = Path(f"{root}.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.endswith(",val")))


def sharded(root: Path, write: Callable[[Path], Data], *options: str) -> Data:
    """The same data in shards of a few samples."""
    data = write(files := root.parent / "files" / root.name)
    import_module("tests.shards").shard(make_config(*data.options, *common(files)).data, root)
    data.options += options
    data.spoil = spoil
    return data


def spoil(index: Any, sample: int) -> None:
    """Damage the bytes of the target of a sample, or of its image."""
    spans = index.source.columns.of_sides("spans")[-1]
    shard, start, length, _ = spans[sample].item()
    path = index.source.copies.path(shard)
    damaged = bytearray(path.read_bytes())
    damaged[start + length - 10] ^= 1
    path.write_bytes(damaged)


def photos_in_shards(root: Path) -> Data:
    data = sharded(root, photos)
    data.copy_of = "photos"
    return data


def masks_in_windows(root: Path) -> Data:
    return sharded(root, masks, "data.shuffle=window", "data.shuffle_window=2")


SEVERAL = ("cat;dog", "dog", ";", "cow; cat")
NUMBERS = [f"{number}.25" for number in range(50)]
one_channel = partial(cells, channels=1, dtype="uint8", kinds=TIFFS[:4])
five_channels = partial(cells, channels=5, dtype="uint16")
# name of the kind -> the function that writes it
KINDS: dict[str, Callable[[Path], Data]] = dict(
    [
        ("photos", photos),
        ("photos that DALI reads", partial(photos, by_dali=True)),
        ("cells that DALI reads", partial(five_channels, kinds=[{}, *TIFFS[2:4], *TIFFS[5:6]])),
        ("formats", partial(all_formats, first=True, background=[255, 255, 255])),
        ("other formats", partial(all_formats, first=False, background=[10, 200, 70])),
        (
            "cells of 8 bits, not compressed",
            partial(cells, channels=5, dtype="uint8", kinds=[{}]),
        ),
        ("cells of 16 bits", partial(five_channels, kinds=TIFFS[:6])),
        ("cells of three channels", partial(cells, channels=3, dtype="uint16", kinds=TIFFS)),
        ("cells of one channel", one_channel),
        *rows(
            ("pairs", pairs),
            ("pairs, targets twice as large", partial(pairs, factor=2)),
            ("pairs of all formats", pairs_of_all_formats),
            ("masks", masks),
            needs="data=pairs",
        ),
        *rows(
            ("several labels", partial(table, labels=SEVERAL)),
            ("numbers", partial(table, labels=NUMBERS)),
            needs="data=table",
        ),
    ]
)
ARCHIVED: dict[str, Callable[[Path], Data]] = dict(
    [
        *rows(("photos in shards", photos_in_shards), needs="loaders.shards"),
        *rows(("masks in shards, in windows", masks_in_windows), needs="loaders.shards data=masks"),
    ]
)
# name of the kind -> the function that writes it in all splits, and the one that removes val
SPLIT = dict(
    [
        ("photos", (partial(split_folders, photos), without_val)),
        ("cells", (partial(split_folders, one_channel), without_val)),
        *rows(
            ("pairs", (split_pairs, without_val)),
            ("masks", (partial(split_folders, masks), without_val)),
            needs="data=pairs",
        ),
        *rows(
            ("several labels", (partial(split_table, labels=SEVERAL), without_val_rows)),
            ("numbers", (partial(split_table, labels=NUMBERS), without_val_rows)),
            needs="data=table",
        ),
    ]
)
# name of a way to read files -> the overrides that choose it
OTHERS = dict(rows(("dali", ["loader=dali", "loader.num_threads=2"])))
READERS = {
    "threads": ["loader=pytorch", "loader.num_threads=2"],
    "workers": ["loader=pytorch", "loader.num_workers=2"],
    **OTHERS,
}
COPIES = dict(rows(("packed", ["loader=packed"])))
"""Those that read pixels which were stored before."""
