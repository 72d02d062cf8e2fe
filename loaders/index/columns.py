"""The index of a data set as columns in a folder, which processes map into memory.

A start reads only what it needs of the columns. Facts about whole columns are written with them.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, shown
from loaders.images import reason_of
from loaders.index.index import Index, Stored
from loaders.index.memory import MemoryIndex
from loaders.index.paths import Paths, folder_of
from loaders.targets import describe_target, target_of

FACTS = ("name", "channels", "dtype", "keep_channels", "resized", "notes")
"""Attributes of an index that facts.json holds as they are."""
FIX = "bring it back, or write the folder again"


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


def save_columns(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write arrays as the files NAME.npy of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)


def write_columns(index: Index, folder: Path) -> None:
    """Write the columns of an index, and facts about them, to a folder."""
    columns = {"sizes": index.sizes.astype(np.int32), "distinct_sizes": index.distinct_sizes}
    if index.target.has_values:
        columns["values"] = index.target.values.astype(index.target.dtype)
    if isinstance(index, MemoryIndex):
        columns["offsets"] = index.offsets
        columns |= {f"pixels-{number}": pixels for number, pixels in enumerate(index.pixels)}
    for number, (paths, headers) in enumerate(zip(index.files, index.headers, strict=True)):
        columns |= {f"names-{number}": paths.names, f"headers-{number}": headers}
    save_columns(folder, columns)
    facts = {
        **{name: getattr(index, name) for name in FACTS},
        "left_out": list(index.left_out),
        "target": describe_target(index.target),
        "known": {"fingerprint": index.fingerprint},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def share(index: Index, folder: Path) -> Index:
    """Write the columns of an index to a folder; return the index that workers map into memory."""
    write_columns(index, folder)
    return open_columns(folder, index.files[0].folder if index.files else "")


def parse_json(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """Parse the content of a JSON file with one object.

    Raises:
        UserError: it is no such file; the message has the name of the file and the advice.
    """
    try:
        facts: Any = json.loads(content)
    except ValueError:
        facts = None
    if isinstance(facts, dict) and facts:
        return facts
    raise UserError(f"{where} is no JSON object with values: {content[:40]!r}; {fix}")


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


def open_columns(folder: Path, root: str = "") -> Index:
    """Open the index that `write_columns` wrote.

    Args:
        folder: folder of the columns.
        root: folder of the data set now.

    Raises:
        UserError: a file of the folder is missing or damaged.
    """
    fields = read_fields(folder, root, partial(open_columns, folder, root))
    if fields["files"]:
        return Index(**fields)
    sides = range(1 + (fields["target"].interpolation != "none"))
    pixels = tuple(open_column(folder / f"pixels-{side}.npy") for side in sides)
    return MemoryIndex(**fields, pixels=pixels, offsets=open_column(folder / "offsets.npy"))


def read_fields(folder: Path, root: str, reopen: Callable[[], Index]) -> dict[str, Any]:
    """Read the fields of an `Index` whose columns are in a folder; see `open_columns`."""
    where = folder / "facts.json"
    if not where.is_file():
        raise UserError(f"{where} is missing; {FIX}")
    facts = parse_json(where.read_bytes(), str(where), FIX)
    target = target_of(facts["target"])
    if target.has_values:
        target = replace(target, values=open_column(folder / "values.npy"))
    is_decoded = (folder / "offsets.npy").exists()  # without files
    sides = range(0 if is_decoded else 1 + (target.interpolation != "none"))
    names = [open_column(folder / f"names-{side}.npy") for side in sides]
    distinct_sizes = open_column(folder / "distinct_sizes.npy")
    return {
        **{name: facts[name] for name in FACTS},
        "notes": tuple(facts["notes"]),
        "sizes": open_column(folder / "sizes.npy"),
        "target": target,
        "files": tuple(Paths(folder_of(root), each) for each in names),
        "headers": tuple(open_column(folder / f"headers-{side}.npy") for side in sides),
        "left_out": dict.fromkeys(facts["left_out"], "left out when the index was made"),
        "stored": Stored(reopen, facts["known"]["fingerprint"], distinct_sizes),
    }
