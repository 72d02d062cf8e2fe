"""The files of an index, of a pack and of the header cache: NumPy columns and JSON.

They may come from somebody else and are used only if they are what this version writes.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock

from conf.errors import UserError, shown


def save_columns(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write arrays as the files NAME.npy of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; at the end of the block it replaces `folder`.

    Processes that have mapped columns of the old folder keep them.
    """
    unfinished, old = (
        folder.with_name(f"{folder.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old")
    )
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
    finally:
        for path in (unfinished, old):
            shutil.rmtree(path, ignore_errors=True)


def one_process_at_a_time(path: Path) -> FileLock:
    """Lock out other processes of this machine; the empty file `path`.lock stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


def open_column(path: Path, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
    """Map the array in a NumPy file into memory.

    Args:
        path: path of the file.
        dtype: dtype of the array; `np.bytes_` stands for texts of any length.
        shape: shape of the array; None stands for any length.

    Raises:
        UserError: the file is missing, no regular file (such as a link), or holds something else.
    """
    fix = "bring it back, or write the folder again"
    if not path.exists():
        raise UserError(f"{path} is missing; {fix}")
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path} is a link or no regular file; {fix}")
    try:
        # Unlike np.load, this opens no archives and no pickles. Copy-on-write, because torch warns
        # of arrays that cannot be written to.
        array = np.lib.format.open_memmap(path, "c").view(np.ndarray)
    except Exception as error:  # damaged headers make NumPy raise errors of any type
        raise UserError(f"{path} is not a complete NumPy file ({shown(error)}); {fix}") from None
    fitting = [known in (None, found) for known, found in zip(shape, array.shape, strict=False)]
    is_right = array.dtype.kind == "S" if dtype is np.bytes_ else array.dtype == dtype
    if not is_right or array.ndim != len(shape) or not all(fitting):
        raise UserError(
            f"{path} holds an array of shape {array.shape} and dtype {shown(array.dtype)}, not of "
            f"shape {shape} and dtype {shown(np.dtype(dtype))}; {fix}"
        )
    return array
