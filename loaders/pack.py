"""Decode and resize a data set once, ahead of training.

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos data.resize=256 loader=packed loader.pack=data/packed

Started again, it goes on where it was stopped. With `format=shards`, see `loaders.pack_shards`.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
from filelock import FileLock
from hydra import compose, initialize_config_dir
from tqdm import tqdm

from conf.check import check
from conf.mistakes import Mistake, end_in_a_few_lines
from conf.schema import Config, DataConfig
from loaders.columns import SPLITS, settings_of
from loaders.index import Index
from loaders.layouts import build_index
from loaders.limits import cpus_per_rank
from loaders.pack_shards import pack_shards, shard_options
from loaders.packed import FORMAT, SETTINGS, describe_split
from loaders.plan import resized_sizes
from loaders.resize import read_resized
from loaders.targets import Labels, Numbers, SeveralLabels

CHUNK = 1024  # samples that are written before they count as done


def pack(data: DataConfig, out: Path) -> None:
    """Write the data set, resized by `data.resize`, into the folder `out`.

    Raises:
        ValueError: `out` holds a pack of other data.
    """
    indexes = dict(zip(SPLITS, build_index(data), strict=True))
    description = {
        "format": FORMAT,
        "settings": settings_of(data, SETTINGS),
        "splits": {split: describe_split(index) for split, index in indexes.items()},
    }
    text = json.dumps(description, indent=2, default=list) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    begun, finished = out / "unfinished.json", out / "pack.json"
    with FileLock(out / ".lock"):
        for path in (begun, finished):
            if path.exists() and path.read_text() != text:
                raise ValueError(
                    f"{out} holds a pack of other data or settings; choose another out=DIR"
                )
        if finished.exists():
            print(f"{out} is packed already")
            return
        begun.write_text(text)
        for split, index in indexes.items():
            _pack_split(data, index, out, split)
        begun.rename(finished)
        for split in indexes:
            (out / f"{split}-done.npy").unlink()


def _pack_split(data: DataConfig, index: Index, out: Path, split: str) -> None:
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    arrays = {"sizes": sizes, "offsets": offsets}
    if isinstance(index.target, Labels | SeveralLabels | Numbers):
        arrays["values"] = index.target.values
    np.savez(out / f"{split}.npz", **arrays)  # type: ignore[arg-type]
    done = _open(out / f"{split}-done.npy", (len(index),), "bool")
    pixels = [
        _open(out / f"{split}-{number}.npy", (int(lengths.sum()) * side.per_pixel,), side.dtype)
        for number, side in enumerate(index.sides)
    ]

    def write(sample: int) -> None:
        for number, side in enumerate(index.sides):
            image = read_resized(index, sample, number, sizes[sample], data.reduced_decoding)
            start = offsets[sample] * side.per_pixel
            pixels[number][start : start + image.size] = image.ravel()

    samples = np.flatnonzero(~done)
    with (
        ThreadPoolExecutor(cpus_per_rank()) as pool,
        tqdm(total=len(samples), desc=f"packing {index.name}") as bar,
    ):
        for part in np.split(samples, range(CHUNK, len(samples), CHUNK)):
            for _ in pool.map(write, part):
                bar.update()
            for array in pixels:
                array.flush()  # the pixels first: what counts as done must be on the disk
            done[part] = True
            done.flush()


def _open(path: Path, shape: tuple[int, ...], dtype: str) -> np.memmap:
    """The array in the file, or a new one of zeros, whose room on the disk is taken.

    Raises:
        OSError: there is not so much room.
    """
    if path.exists():
        return cast(np.memmap, np.load(path, mmap_mode="r+"))
    partial = path.with_suffix(".partial")
    array = np.lib.format.open_memmap(partial, "w+", dtype, shape)
    try:
        with partial.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    except OSError as error:  # a full disk would end the process when a page is written
        partial.unlink()
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"out={path.parent}: {error.strerror}: {path.name} needs {array.nbytes / 1e9:.3g} GB, and "
            f"{free / 1e9:.3g} GB are free; choose another out=DIR, or run this again when there is room"
        ) from error
    partial.rename(path)
    return array


def command_line(options: dict[str, str | None]) -> Config:
    """The configuration that the Hydra overrides among the arguments give; others go to `options`."""
    overrides = []
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key in options:
            options[key] = value
        else:
            overrides.append(argument)
    sys.argv[1:] = overrides  # what a mistake is looked for in
    end_in_a_few_lines()
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        cfg = cast(Config, compose("config", overrides))
    check(cfg, overrides)
    return cfg


def main() -> None:
    """Command line: Hydra overrides of the data, `out=DIR`, and `format` with what belongs to it."""
    options: dict[str, str | None] = {"out": None, "format": "arrays"}
    options |= {"shard_mb": None, "part": None, "quality": None}
    cfg = command_line(options)
    if options["out"] is None:
        raise Mistake("out=DIR is missing: the place that the pack is written to")
    out, kind = options.pop("out"), options.pop("format")
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    if kind == "shards":
        pack_shards(cfg.data, str(out), **shard_options(**options))
    elif kind != "arrays":
        raise Mistake(f"format={kind} is not possible; use arrays or shards")
    elif given:
        raise Mistake(f"{given[0]} belongs to format=shards")
    else:
        pack(cfg.data, Path(str(out)))


if __name__ == "__main__":
    main()
