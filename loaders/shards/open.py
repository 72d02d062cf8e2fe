"""Open a data set in shards: tar files, and the columns of the index that were written with them.

`data.root`, a folder, web server or bucket, then holds:

    shards.json                       written last: settings, and the columns with their checksums
    train/000000.tar ..., val/...     the files of the samples, as WebDataset names them
    index/train/*.npy ..., .../val    columns of `loaders.index`, and where in the shards files lie
    pieces/train/000000.bin ...       the part of the columns that belongs to each complete shard

Remote columns are copied into `data.cache_dir` at the start, remote shards when they are needed.
"""

import hashlib
import re
from functools import partial
from pathlib import Path

import numpy as np

from conf.credentials import without_credentials
from conf.errors import UserError
from conf.facts import check_kind
from conf.schema import DataConfig
from loaders.index import SPLITS, Index, open_column, open_columns, read_description
from loaders.shards.copies import Copies, copy_columns, room_for_copies
from loaders.shards.files import SPAN, ShardFiles, Shards
from loaders.shards.index import ShardIndex
from loaders.storage import MissingError, open_storage

FORMAT = 2  # increased when the index or the pieces change
DESCRIPTION = "shards.json"
COLUMN_FILE = re.compile(r"index/(train|val)/([a-z]+(_[a-z]+)*(-[01])?\.npy|facts\.json)")
"""Names of the files of the index."""

Spans = tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]
"""`spans`, `order` and `starts` of `Shards`."""


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard below the root."""
    return f"{split}/{number:06d}.tar"


def open_shards(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split from the shards below `data.root`.

    Raises:
        UserError: the shards are missing, incomplete, damaged, packed with other settings or by
            another version, or there is no space for their copies.
        StorageError: their storage cannot be used.
    """
    storage, shown = open_storage(data.root, data), without_credentials(data.root)
    try:
        text = storage.read(DESCRIPTION)
    except MissingError as error:
        raise UserError(
            f"data.root={shown} holds no complete shards: {DESCRIPTION} is missing; write them by "
            f"python -m loaders.pack data={data.layout} data.root=FOLDER format=shards out={shown}"
        ) from error
    columns = _columns_of(text, data, shown)
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    cache = Path(data.cache_dir)
    local = None if "://" in data.root else Path(data.root)
    folder = local or cache / f"index-{fingerprint}"
    if local is None:
        copy_columns(storage, columns, folder)
    sizes = {split: _sizes_of(*_open_spans(folder / "index" / split)) for split in SPLITS}
    if local is None:
        room = room_for_copies(np.concatenate(list(sizes.values())), data, cache / "shards")

    def open_split(split: str) -> Index:
        names = [shard_name(split, number) for number in range(len(sizes[split]))]
        files = (
            ShardFiles(local, names)
            if local is not None
            else Copies(storage, names, sizes[split], cache / "shards", fingerprint, room)
        )
        return _open_split(folder / "index" / split, data.max_pixels, files, shown, fingerprint)

    train, val = map(open_split, SPLITS)
    return train, val


def _open_split(
    folder: Path, max_pixels: int, files: ShardFiles, root: str, fingerprint: str
) -> Index:
    shards = Shards(files, root, *_open_spans(folder), fingerprint)
    reopen = partial(_open_split, folder, max_pixels, files, root, fingerprint)
    index = open_columns(folder, max_pixels, "", ShardIndex, shards=shards, reopen=reopen)
    if (len(shards.order), len(shards.spans)) != (len(index), len(index.sides)):
        raise UserError(
            f"{folder}: the spans do not fit {len(index):,} samples of {len(index.sides)} images; "
            "pack again into another place"
        )
    return index


def _columns_of(text: bytes, data: DataConfig, shown: str) -> dict[str, dict[str, int]]:
    """Return the files of the index that `shards.json` lists, by name, with their sizes and
    checksums."""
    where = f"data.root={shown}: {DESCRIPTION}"
    fix = "pack again into another place, or check data.root, and whether it asks for a login"
    about = read_description(text, FORMAT, data, where, fix)
    check_kind(about, {"columns": {}}, where, fix)
    for name, facts in about["columns"].items():
        if not COLUMN_FILE.fullmatch(name):
            raise UserError(f"{where} names {name!r} as a file of the index; {fix}")
        kind = {"size": range(1 << 62), "crc32": range(1 << 32)}
        check_kind(facts, kind, f"{where}: {name}", fix)
    return dict(about["columns"])


def _sizes_of(sides: tuple[np.ndarray, ...], order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the number of bytes of each shard up to the end of its last image, (S,) int64."""
    last = order[starts[1:] - 1]
    return np.max([side["start"][last] + side["length"][last] for side in sides], axis=0)


def _open_spans(columns: Path) -> Spans:
    order, starts = (
        open_column(columns / f"{name}.npy", np.int64, (None,)) for name in ("order", "starts")
    )
    paths = sorted(columns.glob("spans-*.npy"))
    spans = tuple(open_column(path, SPAN, (len(order),)) for path in paths)
    fits = len(starts) > 1 and starts[0] == 0 and starts[-1] == len(order)
    if not (paths and fits and (np.diff(starts) > 0).all()):
        raise UserError(
            f"{columns}: starts.npy does not divide {len(order):,} samples among shards; pack "
            "again into another place"
        )
    last = order[starts[1:] - 1]
    if (last < 0).any() or (last >= len(order)).any():
        raise UserError(
            f"{columns}: order.npy names samples that are not there; pack again into another place"
        )
    return spans, order, starts
