"""Images that were decoded and resized before training (`loader=packed`).

    python -m loaders.pack data=imagefolder data.root=photos data.resize=256 out=data/packed
    python train.py data=imagefolder data.root=photos \\
        data.resize=256 loader=packed loader.pack=data/packed

A pack is a folder of NumPy files, mapped into memory: the pixels of a split, image after image.
With `format=shards`, shards of about `shard_mb=128` are written instead, by `loaders.shards.pack`
if it is there; `shards=0:64` writes some of them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conf.cli import load_config, parse_options, user_errors
from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.columns import FACTS, FORMAT, Columns, open_columns, read_facts, write_columns
from loaders.headers import in_threads
from loaders.index import Index, read_index
from loaders.layouts import SPLITS, check_settings, settings_of
from loaders.open_index import open_index
from loaders.pixels import Pixels
from loaders.rectangles import resized_sizes

FIX = "pack again into another folder"
SHARDS = {"shard_mb": "128", "shards": ""}
"""Options of `format=shards`, and their defaults."""


def pack(data: DataConfig, out: Path) -> None:
    """Write the data set, resized by `data.resize`, into the folder `out`.

    Raises:
        UserError: `out` holds a pack of other data, or has no room for it.
    """
    indexes = open_index(data)
    description: dict[str, Any] = {
        "format": FORMAT,
        "settings": settings_of(data, "resize", "reduced_decoding"),
        "splits": {split: {"fingerprint": i.fingerprint} for split, i in indexes.items()},
    }
    text = json.dumps(description, indent=2, default=list) + "\n"
    facts = out / FACTS  # written at the end: a pack without it is not finished
    if facts.exists():
        if facts.read_text() != text:
            raise UserError(f"{out} holds a pack of other data or settings; choose another out=DIR")
        print(f"{out} is packed already")
        return
    for line in indexes["train"].notes:
        print(line)
    out.mkdir(parents=True, exist_ok=True)
    for split, index in indexes.items():
        _pack_split(data, index, out / split)
    facts.write_text(text)


def open_pack(cfg: Config) -> dict[str, Index]:
    """Open the index of the training and of the validation split of the pack `loader.pack`.

    Raises:
        UserError: the pack is missing, not finished, or made with other settings or other data.
    """
    if cfg.loader.pack is None:
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    if cfg.data.shuffle == "window":
        raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
    folder = Path(cfg.loader.pack).absolute()
    again = f"python -m loaders.pack data={cfg.data.layout} data.root={cfg.data.root} out={folder}"
    about = read_facts(
        folder / FACTS, f"loader.pack={cfg.loader.pack} is no finished pack; write it with {again}"
    )
    check_settings(about["settings"], cfg.data, str(folder / FACTS), FIX)
    # The original files may be deleted, but not replaced by others.
    if any(Path(cfg.data.root).glob("*")):
        for split, index in open_index(cfg.data).items():
            if index.fingerprint != about["splits"][split]["fingerprint"]:
                raise UserError(
                    f"{folder} was made from other files than {cfg.data.root}/{split} has; {FIX}"
                )
    return {split: read_index(Pixels(open_columns(folder / split))) for split in SPLITS}


def _pack_split(data: DataConfig, index: Index, folder: Path) -> None:
    sizes = resized_sizes(data, index.sizes)
    lengths = sizes.prod(axis=1, dtype=np.int64)
    needed = lengths.sum() * sum(s.per_pixel * np.dtype(s.dtype).itemsize for s in index.sides)
    if needed > (free := shutil.disk_usage(folder.parent).free):
        raise UserError(
            f"out={folder.parent}: the images need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB "
            "are free; choose another out=DIR"
        )
    distinct_sizes = resized_sizes(data, index.distinct_sizes)
    offsets = np.cumsum(lengths) - lengths
    columns = Columns(sizes=sizes, distinct_sizes=distinct_sizes, offsets=offsets)
    if index.target.has_values:
        columns["values"] = index.target.values
    folder.mkdir(exist_ok=True)
    files = [
        np.lib.format.open_memmap(
            *(folder / f"pixels-{number}.npy", "w+", side.dtype),
            (int(lengths.sum()) * side.per_pixel,),
        )
        for number, side in enumerate(index.sides)
    ]

    def write(sample: int) -> None:
        whole = (0, 0, *index.sizes[sample].tolist())
        for number, (side, file) in enumerate(zip(index.sides, files, strict=True)):
            height, width = (side.size_factor * int(length) for length in sizes[sample])
            image = index.source.read_part(
                *(sample, number, side, whole, (height, width)), data.reduced_decoding
            )
            start = side.per_pixel * offsets[sample]
            file[start : start + image.size] = image.ravel()

    in_threads(write, range(len(index)), f"packing {index.name}")
    write_columns(columns, index.facts() | {"is_resized": True}, folder)


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
