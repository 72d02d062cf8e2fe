"""Images that were decoded and resized before training (`loader=packed`).

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos \\
        data.resize=256 loader=packed loader.pack=data/packed

A pack has a folder of NumPy files for each split, mapped into memory: the pixels, image after
image. With `format=shards`, shards of about `shard_mb=128` are written instead, by
`loaders.shards.pack` if it is there; `shards=0:64` writes some of them.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

from conf.cli import load_config, parse_options, user_errors
from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.columns import (
    Columns,
    check_settings,
    open_columns,
    settings_of,
    write_columns,
)
from loaders.index import SPLITS, Index
from loaders.layouts import open_index
from loaders.limits import map_in_threads
from loaders.pixels import Pixels
from loaders.rectangles import resized_sizes

FIX = "pack again into another folder"
SHARDS = {"shard_mb": "128", "shards": ""}
"""Options of `format=shards`, and their defaults."""


def pack(data: DataConfig, out: Path) -> None:
    """Write the data set, resized by `data.resize`, into the folder `out`."""
    indexes = open_index(data)
    for line in indexes["train"].notes:
        print(line)
    for split, index in indexes.items():
        _pack_split(data, index, out / split)


def _pack_split(data: DataConfig, index: Index, folder: Path) -> None:
    settings = settings_of(data, "resize", "reduced_decoding")
    if folder.is_dir():
        packed = open_columns(folder, FIX).facts
        if (packed["fingerprint"], packed["settings"]) != (index.fingerprint, settings):
            raise UserError(
                f"{folder} holds a pack of other data or settings; choose another out=DIR"
            )
        print(f"{folder} is packed already")
        return
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64)
    columns = Columns(sizes=sizes, offsets=np.cumsum(lengths) - lengths)
    if "values" in index.columns:
        columns["values"] = index.columns["values"]
    columns.facts = index.columns.facts | {"is_resized": True, "settings": settings}
    needed = lengths.sum() * sum(s.per_pixel * np.dtype(s.dtype).itemsize for s in index.sides)

    def write_pixels(unfinished: Path) -> None:
        if needed > (free := shutil.disk_usage(unfinished).free):
            raise UserError(
                f"out={folder.parent}: the images need {needed / 1e9:.3g} GB, and "
                f"{free / 1e9:.3g} GB are free; choose another out=DIR"
            )
        files = []
        for number, side in enumerate(index.sides):
            shape = (int(lengths.sum()) * side.per_pixel,)
            path = unfinished / f"pixels-{number}.npy"
            files.append(np.lib.format.open_memmap(path, "w+", side.dtype, shape))

        def write(sample: int) -> None:
            whole = (0, 0, *index.sizes[sample].tolist())
            for number, (side, file) in enumerate(zip(index.sides, files, strict=True)):
                height, width = (side.size_factor * int(length) for length in sizes[sample])
                image = index.read_part(
                    *(sample, number, whole, (height, width)), data.reduced_decoding
                )
                start = side.per_pixel * columns["offsets"][sample]
                file[start : start + image.size] = image.ravel()

        map_in_threads(write, range(len(index)), f"packing {index.name}")

    write_columns(columns, folder, "out=DIR", write_pixels)


def open_pack(cfg: Config) -> dict[str, Index]:
    """Open the index of the training and of the validation split of the pack `loader.pack`; raise
    UserError if it is not finished, or was made with other settings or other data."""
    if cfg.loader.pack is None:
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    if cfg.data.shuffle == "window":
        raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
    # The original files may be deleted, but not replaced by others.
    has_files = any(Path(cfg.data.root).glob("*"))
    originals = open_index(cfg.data) if has_files else {}
    if cfg.data.leave_out is not None and not has_files:
        raise UserError(
            f"data.leave_out={cfg.data.leave_out} cannot be applied, as data.root={cfg.data.root} "
            "is empty: the pack lacks the files that were left out when it was made; drop the key"
        )
    folder, indexes = Path(cfg.loader.pack).absolute(), dict[str, Index]()
    for split in SPLITS:
        again = f"python -m loaders.pack data={cfg.data.layout} data.root={cfg.data.root}"
        fix = f"write loader.pack={cfg.loader.pack} with {again} out={folder}"
        columns = open_columns(folder / split, fix)
        check_settings(columns.facts["settings"], cfg.data, str(folder / split), FIX)
        index = indexes[split] = Pixels(columns)
        if split in originals and originals[split].fingerprint != index.fingerprint:
            raise UserError(
                f"{folder} was made from other files than {cfg.data.root}/{split} has; {FIX}"
            )
    return indexes


def main() -> None:
    """Command line: `out=DIR`, overrides of the data, and the options below."""
    options, overrides = parse_options(__doc__, sys.argv[1:], out=None, format="arrays", **SHARDS)
    data, out, kind = load_config(overrides).data, options["out"], options["format"]
    if kind == "shards":
        from loaders.shards import pack_shards

        pack_shards(data, open_index(data), out, options["shard_mb"], options["shards"])
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
