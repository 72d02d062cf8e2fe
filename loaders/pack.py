"""Images that were decoded and resized before training (`loader=packed`).

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos \\
        data.resize=256 loader=packed loader.pack=data/packed

A pack is a folder of NumPy files, mapped into memory: the pixels of a split, image after image.
With `format=shards`, shards are written instead, by `loaders.shards.pack` if it is there.
A stopped command continues when started again.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
from tqdm import tqdm

from conf.cli import load_config, user_errors
from conf.errors import UserError
from conf.options import parse_options
from conf.schema import DataConfig
from loaders.common import cpus_per_rank
from loaders.index import (
    SPLITS,
    Index,
    MemoryIndex,
    import_shards,
    open_splits,
    settings_of,
    write_columns,
)
from loaders.plan import resized_sizes

SETTINGS = ("resize", "reduced_decoding")
"""Keys of `data` that decide the content of a pack, besides those of the index."""
FORMAT = 10  # increased when the content of a pack changes
FIX = "pack again into another folder"
CHUNK = 1024
DONE = "done.npy"
"""(N,) bool: images of a split that are written, until all are."""


def pack(data: DataConfig, out: Path, chunk: int = CHUNK) -> None:
    """Write the data set, resized by `data.resize`, into the folder `out`.

    Args:
        data: the configuration.
        out: folder of the pack.
        chunk: samples that are written before they count as done.

    Raises:
        UserError: `out` holds a pack of other data.
    """
    indexes = dict(zip(SPLITS, open_splits(data), strict=True))
    description = {
        "format": FORMAT,
        "settings": settings_of(data, *SETTINGS),
        "splits": {split: {"fingerprint": i.fingerprint} for split, i in indexes.items()},
    }
    for line in indexes["train"].notes:
        print(line)
    text = json.dumps(description, indent=2, default=list) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    begun, finished = out / "unfinished.json", out / "pack.json"
    for path in (begun, finished):
        if path.exists() and path.read_text() != text:
            raise UserError(f"{out} holds a pack of other data or settings; choose another out=DIR")
    if finished.exists():
        print(f"{out} is packed already")
        return
    begun.write_text(text)
    for split, index in indexes.items():
        _pack_split(data, index, out / split, chunk)
    begun.rename(finished)
    for split in indexes:
        (out / split / DONE).unlink()


def _pack_split(data: DataConfig, index: Index, folder: Path, chunk: int) -> None:
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    own = {field.name: getattr(index, field.name) for field in fields(Index)}
    own |= {"sizes": sizes, "resized": True, "files": (), "headers": (), "stored": None}
    write_columns(MemoryIndex(**own, pixels=(), offsets=offsets), folder)
    arrays = {
        folder / f"pixels-{number}.npy": (int(lengths.sum()) * side.per_pixel, side.dtype)
        for number, side in enumerate(index.sides)
    }
    _check_space(folder, arrays)
    done = _open(folder / DONE, len(index), "bool")
    pixels = [_open(path, length, dtype) for path, (length, dtype) in arrays.items()]

    def write(sample: int) -> None:
        for number, side in enumerate(index.sides):
            image = index.read_whole(sample, number, sizes[sample], data.reduced_decoding)
            start = offsets[sample] * side.per_pixel
            pixels[number][start : start + image.size] = image.ravel()

    samples = np.flatnonzero(~done)
    with (
        ThreadPoolExecutor(cpus_per_rank()) as pool,
        tqdm(total=len(samples), desc=f"packing {index.name}") as bar,
    ):
        for part in np.split(samples, range(chunk, len(samples), chunk)):
            for _ in pool.map(write, part):
                bar.update()
            for array in pixels:
                array.flush()  # the pixels first: what counts as done must be on the disk
            done[part] = True
            done.flush()


def _open(path: Path, length: int, dtype: str) -> np.memmap:
    """Open the array in a file, or create one of zeros."""
    mode = "r+" if path.exists() else "w+"
    return np.lib.format.open_memmap(path, mode, dtype, (length,))


def _check_space(folder: Path, arrays: dict[Path, tuple[int, str]]) -> None:
    """Raise UserError if arrays do not fit on the disk; writing a page would end the process."""
    needed = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays.values())
    written = sum(path.stat().st_blocks * 512 for path in arrays if path.exists())
    free = written + shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"out={folder.parent}: the images need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB "
            "are free; choose another out=DIR, or run this again when there is space"
        )


def main() -> None:
    """Command line: `out=DIR`, overrides of the data, and the options below."""
    own = {"format": "arrays", "shard_mb": "", "part": "", "quality": ""}
    options, overrides = parse_options(__doc__, sys.argv[1:], out=None, **own)
    data, out, kind = load_config(overrides).data, options.pop("out"), options.pop("format")
    if kind == "shards":
        shards = import_shards()
        shards.pack_shards(data, out, **shards.shard_options(**options))
    elif kind == "arrays" and not any(options.values()):
        pack(data, Path(out))
    else:
        given = [f"{key}={value}" for key, value in options.items() if value]
        raise UserError(
            f"{' '.join([f'format={kind}', *given])} is not possible; use format=arrays alone, or "
            "format=shards, which takes shard_mb=, part= and quality="
        )


if __name__ == "__main__":
    with user_errors():
        main()
