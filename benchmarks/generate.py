"""Generator of stand-ins for four published data sets.

    python -m benchmarks.generate caltech256 --size 30607 \\
        --root data/caltech256/caltech256/256_ObjectCategories
    python -m benchmarks.generate deblur --root data/deblur --size 3214
    python -m benchmarks.generate lowlight --root data/lowlight --size 153856
    python -m benchmarks.generate cells --root data/cells --size 90000

Sizes, folders, image sizes and roughly the file sizes are those of the published sets; classes and
their names are not. Models can learn the labels and targets.

The content of a file depends only on the seed and the number of its sample, not on the number of
workers. The appearance of a class (hue, shape, brightness of a cell) does not depend on the seed:
data sets of different seeds have the same classes.
"""

import argparse
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import Image
from tqdm import tqdm

from benchmarks.photos import ByteImage, blur, cell, dead_leaves, low_light, shake_kernel, stream

SHAPES = ("disc", "square", "diamond", "triangle", "cross")
HUES = (
    *("red", "orange", "yellow", "lime", "green"),
    *("mint", "cyan", "azure", "blue", "violet", "pink"),
)
# At most 90 degrees: a mirrored image keeps its class.
ANGLES_DEG = (0.0, 22.5, 45.0, 67.5, 90.0)
CELLS = ("b_cell", "cd4_t_cell", "cd8_t_cell", "dendritic", "monocyte", "neutrophil", "nk_cell")
FRAMES_PER_SCENE = 10
RECORD = ".generated.json"


def _write_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name first; a killed run leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _save_photo(path: Path, image: ByteImage, quality: int = 85) -> None:
    """Write a PNG or JPEG file, according to the suffix of the path."""
    file = io.BytesIO()
    kind = "PNG" if path.suffix == ".png" else "JPEG"
    Image.fromarray(image).save(file, kind, quality=quality, compress_level=3)
    _write_file(path, file.getvalue())


def _write_caltech256(number: int, root: Path, seed: int, num_classes: int) -> None:
    c, index = number % num_classes, number // num_classes
    # 11 and 5 have no common factor: 55 classes have different pairs of hue and shape.
    hue, shape = c % len(HUES), SHAPES[c % len(SHAPES)]
    angle_deg = ANGLES_DEG[c // (len(HUES) * len(SHAPES))]
    folder = root / f"{c + 1:03d}.{HUES[hue]}-{shape}-{angle_deg:g}"
    path = folder / f"{c + 1:03d}_{index + 1:04d}.jpg"
    if path.exists():
        return
    rng = stream(seed, number)
    width = int(np.clip(rng.normal(490, 80), 300, 640))
    height = round(width * rng.choice([2 / 3, 3 / 4, 3 / 4, 3 / 4, 1, 4 / 3]))
    image = dead_leaves(rng, height, width, hue / len(HUES), shape, angle_deg)
    _save_photo(path, image, quality=int(rng.integers(55, 85)))


def _write_deblur(number: int, root: Path, seed: int, height: int, width: int) -> None:
    split, scene = "test" if number % 3 == 2 else "train", number // 3 // FRAMES_PER_SCENE
    name = f"{split}_{scene:04d}/{number:06d}.png"
    sharp_path, blurry_path = (root / split / side / name for side in ("sharp", "blurry"))
    if sharp_path.exists() and blurry_path.exists():
        return
    rng = stream(seed, number)
    border = max(1, min(height, width) // 40)
    kernel = shake_kernel(rng, 2 * border + 1)
    image = dead_leaves(rng, height + 2 * border, width + 2 * border)
    _save_photo(sharp_path, image[border:-border, border:-border])
    _save_photo(blurry_path, blur(image, kernel))


def _write_lowlight(number: int, root: Path, seed: int, height: int, width: int) -> None:
    low_path, high_path = (root / side / f"{number:06d}.jpg" for side in ("low", "high"))
    if low_path.exists() and high_path.exists():
        return
    rng = stream(seed, number)
    image = dead_leaves(rng, height, width)
    _save_photo(high_path, image)
    _save_photo(low_path, low_light(rng, image))


def _write_cells(number: int, root: Path, seed: int, num_classes: int) -> None:
    c, index = number % num_classes, number // num_classes
    path = root / CELLS[c] / f"{CELLS[c]}_{index:05d}.tif"
    if path.exists():
        return
    image, file = cell(stream(seed, number), c), io.BytesIO()
    tifffile.imwrite(file, image, photometric="minisblack", planarconfig="contig", metadata=None)
    _write_file(path, file.getvalue())


WRITERS: dict[str, Callable[..., None]] = {
    "caltech256": _write_caltech256,
    "deblur": _write_deblur,
    "lowlight": _write_lowlight,
    "cells": _write_cells,
}
# The options of each data set, with their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "caltech256": {"num_classes": 257},
    "deblur": {"height": 720, "width": 1280},
    "lowlight": {"height": 360, "width": 640},
    "cells": {"num_classes": len(CELLS)},
}


def generate(
    name: str,
    root: str | Path,
    size: int,
    seed: int = 0,
    workers: int | None = None,
    **options: Any,
) -> None:
    """Write the data set `name` (a key of OPTIONS): `size` images or pairs in the folder `root`.

    The files do not depend on the number of worker processes (default: one per core). A stopped run
    can be repeated: complete files are kept.

    Raises:
        ValueError: an option is unknown, or there would be classes without two images.
        FileExistsError: `root` contains anything else.
    """
    defaults = OPTIONS[name]
    if unknown := options.keys() - defaults.keys():
        raise ValueError(f"{', '.join(unknown)}: no option of {name}; use {', '.join(defaults)}")
    if "num_classes" in defaults and "num_classes" not in options:
        options["num_classes"] = max(2, min(defaults["num_classes"], size // 2))
    options = {**defaults, **options}
    smallest = 3 if name == "deblur" else 2 * options.get("num_classes", 1)
    if size < smallest:
        raise ValueError(f"size={size} is too small for {name}, {options}; use {smallest} or more")
    workers = workers or os.cpu_count() or 1

    root = Path(root)
    record = json.dumps({"name": name, "size": size, "seed": seed, **options})
    earlier = (root / RECORD).read_text() if (root / RECORD).exists() else None
    if earlier is None and root.exists() and any(root.iterdir()):
        raise FileExistsError(
            f"root={root} contains files that were not generated; use an empty root"
        )
    if earlier not in (None, record):
        raise FileExistsError(
            f"root={root} was generated with {earlier}, not with {record}; "
            "use the earlier arguments to finish it, or another root"
        )
    _write_file(root / RECORD, record.encode())

    write = partial(WRITERS[name], root=root, seed=seed, **options)
    unit = "image" if "num_classes" in options else "pair"
    with ProcessPoolExecutor(workers) as pool:
        chunksize = max(1, min(32, size // (4 * workers)))
        run = map if workers == 1 else partial(pool.map, chunksize=chunksize)
        for _ in tqdm(run(write, range(size)), desc=name, total=size, unit=unit, delay=1):
            pass


def link_often(root: Path, links: Path, copies: int) -> None:
    """Link each image of class folders `copies` times in `links`, for long epochs of few images."""
    for image in root.glob("*/*"):
        for copy in range(copies):
            link = links / image.parent.name / f"{copy}-{image.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(image, link)


def main() -> None:
    """Run the command line; invalid arguments end it with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate",
        usage="%(prog)s NAME --root FOLDER --size COUNT; -h lists the options",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=OPTIONS)
    parser.add_argument("--root", required=True, help="folder to write, missing or empty")
    parser.add_argument("--size", type=int, required=True, help="number of images or pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    for key in ("num-classes", "height", "width"):
        parser.add_argument(f"--{key}", type=int)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    try:
        generate(**given)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
