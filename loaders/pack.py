"""Images that were decoded and resized before training (`loader=packed`).

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos \\
        data.resize=256 loader=packed loader.pack=data/packed

A pack is a folder of NumPy files, mapped into memory: the pixels of a split, image after image.
With `format=shards`, shards of about `shard_mb=128` are written instead, by `loaders.shards.pack`
if it is there; `shards=0:64` writes some of them.
A stopped command continues when started again.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from conf.cli import load_config, user_errors
from conf.errors import UserError
from conf.loader.packed import PackedConfig
from conf.options import parse_options
from conf.schema import Config, DataConfig
from loaders.columns import FACTS, FORMAT, open_index, read_facts, write_index
from loaders.index import Index
from loaders.layouts import SPLITS, check_settings, settings_of
from loaders.limits import cpus_per_rank
from loaders.open_index import open_index as open_data
from loaders.pixels import open_pixels
from loaders.rectangles import resized_sizes

FIX = "pack again into another folder"
CHUNK = 1024
SHARDS = {"shard_mb": "128", "shards": ""}
"""Options of `format=shards`, and their defaults."""

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
    indexes = open_data(data)
    description: dict[str, Any] = {
        "format": FORMAT,
        "settings": settings_of(data, "resize", "reduced_decoding"),
        "splits": {split: {"fingerprint": i.fingerprint} for split, i in indexes.items()},
    }
    for line in indexes["train"].notes:
        print(line)
    text = json.dumps(description, indent=2, default=list) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    begun, finished = out / "unfinished.json", out / FACTS
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


def open_pack(cfg: Config) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split of the pack `loader.pack`.

    Raises:
        UserError: the pack is missing, not finished, or made with other settings or other data.
    """
    assert isinstance(cfg.loader, PackedConfig)
    if cfg.loader.pack is None:
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    folder = Path(cfg.loader.pack).absolute()
    again = f"python -m loaders.pack data={cfg.data.layout} data.root={cfg.data.root} out={folder}"
    about = read_facts(
        folder / FACTS, f"loader.pack={cfg.loader.pack} is no finished pack; write it with {again}"
    )
    check_settings(about["settings"], cfg.data, str(folder / FACTS), FIX)
    # The original files may be deleted, but not replaced by others.
    if any(Path(cfg.data.root).glob("*")):
        for split, index in open_data(cfg.data).items():
            if index.fingerprint != about["splits"][split]["fingerprint"]:
                raise UserError(
                    f"{folder} was made from other files than {cfg.data.root}/{split} has; {FIX}"
                )
    train, val = (open_index(folder / split, open_pixels(folder / split)) for split in SPLITS)
    return train, val


def _pack_split(data: DataConfig, index: Index, folder: Path, chunk: int) -> None:
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    distinct_sizes = resized_sizes(data, index.distinct_sizes)
    resized = replace(index, sizes=sizes, distinct_sizes=distinct_sizes, is_resized=True)
    write_index(resized, folder, {"offsets": offsets})
    arrays = {
        folder / f"pixels-{number}.npy": (int(lengths.sum()) * side.per_pixel, side.dtype)
        for number, side in enumerate(index.sides)
    }
    _check_space(folder, arrays)
    done = _open(folder / DONE, len(index), "bool")
    pixels = [_open(path, length, dtype) for path, (length, dtype) in arrays.items()]

    def write(sample: int) -> None:
        for number, side in enumerate(index.sides):
            whole, factor = (0, 0, *index.sizes[sample].tolist()), side.size_factor
            size = factor * int(sizes[sample, 0]), factor * int(sizes[sample, 1])
            image = index.source.read_part(sample, number, side, whole, size, data.reduced_decoding)
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
    options, overrides = parse_options(__doc__, sys.argv[1:], out=None, format="arrays", **SHARDS)
    data, out, kind = load_config(overrides).data, options["out"], options["format"]
    if kind == "shards":
        from loaders.shards import pack_shards

        pack_shards(data, out, options["shard_mb"], options["shards"])
    elif kind == "arrays" and all(options[key] == value for key, value in SHARDS.items()):
        pack(data, Path(out))
    else:
        given = " ".join(f"{key}={options[key]}" for key in ("format", *SHARDS))
        raise UserError(
            f"{given} is not possible; use format=arrays alone, or format=shards, which takes "
            "shard_mb= and shards="
        )


if __name__ == "__main__":
    with user_errors():
        main()
