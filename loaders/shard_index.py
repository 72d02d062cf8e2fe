"""The index of a data set in shards: columns beside the tar files, that were written together with them.

What `data.root` then holds, be it a folder, on a web server or in a bucket:

    shards.json                       written last: settings, and the columns with their checksums
    train/000000.tar ..., val/...     the files of the samples, as WebDataset names them
    index/train/*.npy ..., .../val    the columns of `loaders.columns`, and where in the shards each file lies
    pieces/train/000000.npy ...       of each whole shard what the columns were made of

Columns from afar are copied into `data.cache_dir` once, which all processes of a machine share.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from conf.schema import DataConfig
from loaders.columns import SPLITS, differences, open_columns
from loaders.headers import one_process_at_a_time
from loaders.index import Index
from loaders.shards import Shards
from loaders.shared import mapped
from loaders.storage import Folder, MissingError, Storage, open_storage, without_credentials

FORMAT = 1  # changes when what lies beside the shards does
DESCRIPTION = "shards.json"
RANGE, RANGES_AT_ONCE = 1 << 20, 64
"""Bytes of the ranges that columns are copied in, and how many of them are on their way or in memory."""


def holds_shards(root: str) -> bool:
    """Whether a data set is read from shards; all that is no folder is."""
    return "://" in root or os.path.isfile(os.path.join(root, DESCRIPTION))


def open_shards(data: DataConfig) -> tuple[Index, Index]:
    """Index of the training and of the validation split from the shards below `data.root`.

    Raises:
        FileNotFoundError: there are no whole shards.
        ValueError: they were packed with other settings, or by another version.
        StorageError: their place cannot be read.
    """
    storage, shown = open_storage(data.root, data), without_credentials(data.root)
    try:
        text = storage.origin.read_whole(DESCRIPTION)
    except MissingError as error:
        raise FileNotFoundError(
            f"data.root={shown} holds no (whole) shards: {DESCRIPTION} is missing; write them: "
            f"python -m loaders.pack data={data.layout} data.root=FOLDER format=shards out={shown}"
        ) from error
    try:
        about = json.loads(text)
    except ValueError:
        raise ValueError(
            f"data.root={shown} holds no shards: its {DESCRIPTION} is not JSON but begins with "
            f"{text[:40]!r}; see whether data.root names what is meant, and whether it asks for a login"
        ) from None
    if about["format"] != FORMAT:
        raise ValueError(f"data.root={shown} was packed by another version; pack it again")
    if differing := differences(data, about["settings"]):
        raise ValueError(
            f"data.root={shown} was packed with other settings: {differing}; use those of the shards, or "
            "pack again into another place"
        )
    folder = (
        Path(storage.path) if isinstance(storage, Folder) else _copied(storage.origin, text, data)
    )

    def open_split(split: str) -> Index:
        columns = folder / "index" / split
        spans = tuple(map(mapped, sorted(columns.glob("spans-*.npy"))))
        order, starts = (mapped(columns / f"{name}.npy") for name in ("order", "starts"))
        shards = Shards(storage, split, spans, order, starts, fingerprint_of(text))
        return open_columns(columns, "", shards)

    train, val = map(open_split, SPLITS)
    return train, val


def fingerprint_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _copied(storage: Storage, text: bytes, data: DataConfig) -> Path:
    """The folder with copies of the columns, which `shards.json` describes."""
    folder = Path(data.cache_dir, f"index-{fingerprint_of(text)}")
    with one_process_at_a_time(folder):
        if not folder.is_dir():
            unfinished = folder.with_suffix(".tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            _copy(storage, json.loads(text)["columns"], unfinished)
            unfinished.rename(folder)
    return folder


def _copy(storage: Storage, columns: dict[str, dict[str, int]], folder: Path) -> None:
    crc32s = dict.fromkeys(columns, 0)
    for name, content in _contents(storage, columns):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
        crc32s[name] = zlib.crc32(content, crc32s[name])
    for name, crc32 in crc32s.items():
        if crc32 != columns[name]["crc32"]:
            raise ValueError(
                f"{without_credentials(storage.root)}: {name} is not the one that was packed with the "
                "shards; bring it back, or pack again into another place"
            )


def _contents(storage: Storage, columns: dict[str, dict[str, int]]) -> Iterator[tuple[str, bytes]]:
    """The columns in ranges, one behind another; of these the next ones are on their way already."""
    begun: deque[tuple[str, Future[bytes]]] = deque()
    for name, facts in columns.items():
        for start in range(0, facts["size"], RANGE):
            end = min(start + RANGE, facts["size"])
            begun.append((name, storage.begin(name, start, end)))
            if len(begun) == RANGES_AT_ONCE:
                first, content = begun.popleft()
                yield first, content.result()
    for name, content in begun:
        yield name, content.result()
