"""Write a data set as shards: tar files in WebDataset's format, and their index.

    python -m loaders.pack data=imagefolder data.root=photos format=shards out=s3://photos part=3/64

Files are copied unchanged, or with `quality=90` resized by `data.resize` and encoded again: photos
as JPEG (`quality=lossless`: PNG), masks always as PNG, TIFFs with any number of channels as TIFF.

After each complete shard its piece of the index is stored: a restart continues with the shards that
have no piece. The process that stores the last piece joins all of them.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from conf.credentials import without_credentials
from conf.errors import UserError, counted
from conf.files import checksum
from conf.schema import DataConfig
from loaders.common import cpus_per_rank
from loaders.index import SPLITS, open_splits, save_columns, settings_of, write_columns
from loaders.shards.files import shard_name
from loaders.shards.open import DESCRIPTION, FORMAT
from loaders.shards.split import LOSSLESS, PIECE, Split
from loaders.shards.storage import Storage

BEGUN = "begun.json"
OF_FILES = ("table", "path_column")
"""Keys of `data` that locate labels, which the shards contain."""
SHARDS_AT_ONCE, IN_FLIGHT = 4, 32


Part = tuple[int, int]
"""The shards that a process writes: (3, 64) is every 64th one, from the third on."""


def part_of(text: str, environment: Mapping[str, str] = os.environ) -> Part:
    """Parse `3/64`; of an empty text, take the part of a Slurm array or torchrun, else all shards.

    Raises:
        UserError: the part is not possible, as that of a Slurm array with gaps.
    """
    if not text and "SLURM_ARRAY_TASK_ID" in environment:
        task, first, step, count = (
            int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "STEP", "COUNT")
        )
        text = f"{(task - first) // step + 1}/{count}"
    if not text and "RANK" in environment:
        text = f"{int(environment['RANK']) + 1}/{environment['WORLD_SIZE']}"
    number, _, of = (text or "1/1").partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise UserError(f"part={text} is not possible; use part=1/64 to part=64/64, for example")
    return int(number), int(of)


def shard_options(shard_mb: str, part: str, quality: str) -> dict[str, Any]:
    """Convert options of the command line, empty if not given, to arguments of `pack_shards`.

    Raises:
        UserError: a value is not possible.
    """
    try:
        size = float(shard_mb or 128)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise UserError(f"shard_mb={shard_mb} is not possible; use a number above 0, such as 128")
    if quality not in ("", LOSSLESS, *map(str, range(1, 101))):
        raise UserError(
            f"quality={quality} is not possible; use 1 to 100 (JPEG), or {LOSSLESS} (PNG)"
        )
    return {"shard_mb": size, "part": part_of(part), "quality": quality or None}


def pack_shards(
    data: DataConfig,
    out: str,
    shard_mb: float = 128,
    part: Part = (1, 1),
    quality: str | None = None,
) -> None:
    """Write the shards of a part into `out`, and the index once all parts are complete.

    Raises:
        UserError: `out` holds shards of other data, or the data has no files.
        StorageError: `out` cannot be read or written.
        BadFileError: a file cannot be read.
    """
    storage, shown = Storage(out, data.retry_s), without_credentials(out)
    indexes = zip(SPLITS, open_splits(data), strict=True)
    splits = {name: Split(name, index, data, shard_mb, quality) for name, index in indexes}
    for line in splits["train"].index.notes:
        print(line)
    resized = ["resize"] if splits["train"].resizes else []
    settings = settings_of(data, *resized)
    about: dict[str, Any] = {
        "format": FORMAT,
        "settings": {key: settings[key] for key in settings if key not in OF_FILES},
        "shard_mb": shard_mb,
        "encoded": [quality, data.reduced_decoding] if quality else None,
        "splits": {name: split.describe() for name, split in splits.items()},
    }
    text = json.dumps(about, indent=2, default=list).encode() + b"\n"
    if not storage.exists(BEGUN):
        storage.write(BEGUN, text)
    elif storage.read(BEGUN) != text:
        raise UserError(f"{shown} holds shards of other data or settings; choose another out=")
    if storage.exists(DESCRIPTION):
        print(f"{shown} is packed already")
        return

    def is_complete(job: tuple[str, int]) -> bool:
        return storage.exists(piece_name(*job))

    def write(job: tuple[str, int]) -> None:
        if not is_complete(job):
            split, shard = job
            with NamedTemporaryFile(suffix=".tar") as file:
                piece = splits[split].write(shard, Path(file.name))
                storage.write(shard_name(*job), Path(file.name))
            storage.write(piece_name(*job), piece.tobytes())

    jobs = [(name, number) for name, split in splits.items() for number in range(len(split))]
    number, of = part
    mine = jobs[number - 1 :: of]
    with ThreadPoolExecutor(max(SHARDS_AT_ONCE, cpus_per_rank())) as pool:
        list(tqdm(pool.map(write, mine), f"part {number}/{of}", len(mine), unit="shard"))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        complete = list(pool.map(is_complete, jobs))
        if not all(complete):
            missing = complete.index(False)
            print(
                f"part {number}/{of} is complete; {shard_name(*jobs[missing])} of part "
                f"{missing % of + 1}/{of} is missing: the part that ends last writes the index"
            )
            return
        columns = [_write_index(split, storage, pool) for split in splits.values()]
    about["columns"] = columns[0] | columns[1]
    storage.write(DESCRIPTION, json.dumps(about, indent=2, default=list).encode())
    print(f"{shown} is packed: {counted(len(jobs), 'shard')}")


def _write_index(
    split: Split, storage: Storage, pool: ThreadPoolExecutor
) -> dict[str, dict[str, int]]:
    """Join a split's pieces to columns and store them; return their names, sizes and checksums."""
    with TemporaryDirectory(prefix="shards-") as temporary:
        shape = len(split.index), len(split.index.sides)
        table = np.lib.format.open_memmap(Path(temporary, "table.npy"), "w+", PIECE, shape)

        def join(number: int) -> None:
            piece = storage.read(piece_name(split.name, number))
            table[split.samples_of(number)] = np.frombuffer(piece, PIECE).reshape(-1, shape[1])

        list(pool.map(join, range(len(split))))
        folder, columns, sides = Path(temporary, "index"), {}, range(shape[1])
        headers = tuple(table["header"][:, side] for side in sides)
        index = replace(split.index, headers=headers, sizes=split.sizes, resized=split.resizes)
        write_columns(replace(index, stored=None), folder)
        spans = {f"spans-{side}": table["span"][:, side] for side in sides}
        save_columns(folder, spans | {"order": split.order, "starts": split.starts})
        for path in sorted(folder.iterdir()):
            name = f"index/{split.name}/{path.name}"
            columns[name] = {"size": path.stat().st_size, "crc32": checksum(path)}
            storage.write(name, path)
    return columns


def piece_name(split: str, number: int) -> str:
    """Return the path of a shard's piece below the root."""
    return f"pieces/{split}/{number:06d}.bin"
