"""Columns: arrays with one row for each sample, in memory or in a folder.

Such a folder is the one form of an index on disk: the copy for worker processes, a pack and the
joined index of shards. It has a `.npy` file for each column, which processes map into memory, so
that a start reads only what it needs and workers share it, and `index.json` with all other facts.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from filelock import FileLock

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.images import reason_of

FORMAT = 16
"""Increased when what is on disk changes."""

FACTS = "index.json"
FIX = "bring it back, or remove the folder and write it again"

SETTINGS = (
    *("layout", "val_fraction", "val_count", "split_seed", "fold", "num_folds"),
    *("background", "exif"),
)
"""Keys of all `data` that decide which samples there are, besides those that only a layout has."""


class Columns(dict[str, np.ndarray]):
    """Arrays by name, and `facts`, plain values for a JSON file. Those in a `folder` are pickled as
    its path."""

    def __init__(self, *columns: Any, **named: Any) -> None:
        super().__init__(*columns, **named)
        self.folder: Path | None = None
        self.facts: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        if self.folder is None:
            raise TypeError("loaders.index.share(index, data) makes columns fit to pickle")
        return open_columns, (self.folder,)

    def take(self, rows: np.ndarray) -> "Columns":
        """Return some rows in memory, given as their positions, with the same facts."""
        taken = Columns({name: column[rows] for name, column in self.items()})
        taken.facts = self.facts
        return taken

    def of_sides(self, name: str) -> list[np.ndarray]:
        """Return the column of this name of the inputs and, of pairs, that of the targets."""
        return [self[key] for key in (f"{name}-0", f"{name}-1") if key in self]


def write_columns(
    columns: Columns,
    folder: Path,
    key: str = "data.cache_dir",
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write columns and the facts about them in place of a folder, whole or not at all.

    What a killed process has left goes when `folder` is written again. Of two processes that write
    it at once, the first one fails; those that have mapped files of the old folder keep them.

    Args:
        key: what chose the folder, for messages.
        write_more: writes `.npy` files of further columns into the folder that it gets.

    Raises:
        UserError: the folder cannot be written.
    """
    unfinished = folder.with_name(f".{folder.name}.tmp") / uuid4().hex
    try:
        shutil.rmtree(unfinished.parent, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if write_more is not None:
            write_more(unfinished)
        for name, column in columns.items():
            np.save(unfinished / f"{name}.npy", column)
        names = sorted(path.stem for path in unfinished.glob("*.npy"))
        text = json.dumps(columns.facts | {"format": FORMAT, "columns": names}, indent=2)
        (unfinished / FACTS).write_text(text + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); use another {key}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # another process writes there
            unfinished.parent.rmdir()


def open_columns(folder: Path, fix: str = FIX) -> Columns:
    """Map the columns in a folder into memory.

    Raises:
        UserError: a file is missing, damaged or of another version; the message ends with `fix`.
    """
    path = folder / FACTS
    if not path.is_file():
        raise UserError(f"{path} is missing; {fix}")
    columns = Columns()
    columns.folder, columns.facts = folder, parse_facts(path.read_bytes(), str(path), fix)
    for name in columns.facts["columns"]:
        path = folder / f"{name}.npy"
        try:
            # Unlike np.load, this opens no pickles. Copy-on-write, because torch warns of arrays
            # that cannot be written to.
            columns[name] = np.lib.format.open_memmap(path, "c").view(np.ndarray)
        except Exception as error:  # damaged headers make NumPy raise errors of any type
            reason = reason_of(error, str(path))[:60]
            raise UserError(f"{path} cannot be read as a NumPy file ({reason}); {fix}") from None
    return columns


def stored(folder: Path, new: Callable[[], Columns]) -> Columns:
    """Return the columns in a folder in `data.cache_dir`, which are `new()` if there is no such
    folder yet."""
    with one_process_at_a_time(folder):
        if not folder.is_dir():
            write_columns(new(), folder)
    return open_columns(folder)


def parse_facts(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """Parse the content of a JSON file; raise UserError, which ends with `fix`, unless it is an
    object whose `format` is FORMAT."""
    try:
        facts = dict(json.loads(content))
    except (ValueError, TypeError):
        raise UserError(f"{where} is no JSON object: {content[:40]!r}; {fix}") from None
    if facts.get("format") != FORMAT:
        raise UserError(f"{where} was written by another version; {fix}")
    return facts


def settings_of(data: DataConfig, *more: str) -> dict[str, Any]:
    """Return the keys of `data` that decide which samples there are and what their targets are, and
    further ones, with their values."""
    of_layouts = {field.name for field in fields(data) if "data=" in field.metadata.get("of", "")}
    keys = {*SETTINGS, *of_layouts, *more}
    return {key: value for key, value in vars(data).items() if key in keys}


def check_settings(stored: dict[str, Any], data: DataConfig, where: str, fix: str) -> None:
    """Raise UserError if what `settings_of` returned when a file was written differs from `data`;
    settings of other layouts do not count."""
    differing = [
        f"data.{key}={getattr(data, key)} (there: {there})"
        for key, there in stored.items()
        if key in vars(data) and getattr(data, key) != there
    ]
    if differing:
        raise UserError(
            f"{where} was written with other settings: {', '.join(differing)}; use those, or {fix}"
        )


@contextmanager
def one_process_at_a_time(path: Path) -> Iterator[None]:
    """Lock out other processes of this machine; the empty file `path`.lock stays behind. A folder
    that is only read needs no lock."""
    with ExitStack() as locked:
        with suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(FileLock(f"{path}.lock"))
        yield
