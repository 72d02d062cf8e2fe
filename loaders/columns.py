"""The one form of an index on disk: a folder of `.npy` files, and `index.json` with facts of them.

The copy for worker processes, a pack and the index of shards are such folders. Processes map the
columns into memory, so a start reads only what it needs and workers share them.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, shown
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import Index, Source
from loaders.targets import ImageSpec, describe_target, target_of

FORMAT = 11
"""Increased when what is on disk changes."""

FACTS = "index.json"
FIX = "bring it back, or remove the folder and write it again"


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; at the end of the block it replaces `folder`.

    Processes that have mapped columns of the old folder keep them.
    """
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_columns(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write arrays as the files NAME.npy of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)


def open_column(path: Path) -> np.ndarray:
    """Map the array in a NumPy file into memory.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        # Unlike np.load, this opens no pickles. Copy-on-write, because torch warns of arrays that
        # cannot be written to.
        return np.lib.format.open_memmap(path, "c").view(np.ndarray)
    except Exception as error:  # damaged headers make NumPy raise errors of any type
        reason = shown(reason_of(error, str(path)))
        raise UserError(f"{path} cannot be read as a NumPy file ({reason}); {FIX}") from None


def write_index(index: Index, folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write an index, and the columns of its source."""
    own = {"sizes": index.sizes, "distinct_sizes": index.distinct_sizes}
    if index.target.has_values:
        own["values"] = index.target.values.astype(index.target.dtype)
    write_columns(folder, own | dict(columns))
    facts = {
        "format": FORMAT,
        "name": index.name,
        "target": describe_target(index.target),
        "inputs": index.inputs._asdict(),
        "fingerprint": index.fingerprint,
        "is_resized": index.is_resized,
        "left_out": index.left_out,
        "notes": index.notes,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def open_index(folder: Path, source: Source) -> Index:
    """Open the index that `write_index` wrote.

    Raises:
        UserError: a file of the folder is missing, damaged or of another version.
    """
    facts = read_facts(folder / FACTS, FIX)
    target = target_of(facts["target"])
    if target.has_values:
        target = replace(target, values=open_column(folder / "values.npy"))
    return Index(
        facts["name"],
        open_column(folder / "sizes.npy"),
        target,
        ImageSpec(**facts["inputs"]),
        source,
        open_column(folder / "distinct_sizes.npy"),
        facts["fingerprint"],
        facts["is_resized"],
        facts["left_out"],
        tuple(facts["notes"]),
        partial(open_index, folder, source),
    )


def stored(index: Index, data: DataConfig) -> Index:
    """Return the same index over columns on disk, which worker processes map into memory; in
    `data.cache_dir`, where it may lie already.

    Raises:
        UserError: the folder cannot be written to.
    """
    if index.reopen is not None:
        return index
    columns = index.source.columns()
    content = 0  # of all columns: files of the same names may have other headers
    for column in columns.values():
        content = zlib.crc32(np.ascontiguousarray(column).data.cast("B"), content)
    name = f"{index.name.replace('/', '-')}-{index.fingerprint}-{content:08x}-{FORMAT}"
    folder = Path(data.cache_dir, name).absolute()
    if not (folder / FACTS).is_file():
        try:
            with replaced_folder(folder) as unfinished:
                write_index(index, unfinished, columns)
        except OSError as error:
            if not (folder / FACTS).is_file():  # else another process has written it
                raise UserError(
                    f"data.cache_dir={data.cache_dir} cannot be written to ({error}); use another "
                    "folder, or loader.num_workers=0"
                ) from error
    return replace(open_index(folder, index.source.opened(folder)), notes=index.notes)


def read_facts(path: Path, fix: str) -> dict[str, Any]:
    """Read the facts about columns on disk.

    Raises:
        UserError: the file is missing, damaged or of another version; the message ends with `fix`.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; {fix}")
    return parse_facts(path.read_bytes(), str(path), fix)


def parse_facts(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """Parse the content of a JSON file with one object whose `format` is FORMAT."""
    try:
        facts: Any = json.loads(content)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not facts:
        raise UserError(f"{where} is no JSON object with values: {content[:40]!r}; {fix}")
    if facts.get("format") != FORMAT:
        raise UserError(f"{where} was written by another version; {fix}")
    return facts
