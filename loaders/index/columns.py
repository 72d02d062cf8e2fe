"""The index of a data set as columns in a folder, which processes map into memory.

A start reads only what it needs of the columns. Facts about whole columns are written with them.
They may come from somebody else and are used only if they are what this version writes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, shown
from conf.facts import CHANNELS, parse_json
from loaders.images import HEADER
from loaders.index.index import Index, Paths, folder_of
from loaders.targets import Labels, describe_target, target_of

FACTS = {
    "name": str,
    "channels": CHANNELS,
    "dtype": ("uint8", "uint16"),
    "keep_channels": bool,
    "resized": bool,
}
MORE_FACTS = {"left_out": [str], "target": {}, "known": {"fingerprint": str}}
"""Kinds of values in facts.json, see `conf.facts.check_kind`: an index's attributes, and others."""
FIX = "bring it back, or write the folder again"


@dataclass(frozen=True)
class StoredIndex(Index):
    """An index whose columns are in a folder and mapped into memory."""

    folder: str = ""

    reopen: Callable[[], Index] | None = None
    """Call that opens it in another process, which shares the memory of the columns."""

    def __reduce__(self) -> Any:
        return (self.reopen, ())

    def check(self, samples: np.ndarray | slice) -> None:
        """Check the columns of these samples, which somebody else may have written.

        Raises:
            UserError: a size, a header or a label is impossible.
        """
        sizes = self.sizes[samples].astype(np.int64)
        largest = self.distinct_sizes.max(axis=0)
        is_possible = ((sizes >= 1) & (sizes <= largest)).all(axis=1)
        if self.is_raw:
            is_possible &= (sizes == largest).all(axis=1)
        for side, column in zip(self.sides, self.headers, strict=False):
            headers = column[samples]
            shape = np.stack([headers["height"], headers["width"]], axis=1)
            is_possible &= (shape == side.size_factor * sizes).all(axis=1)
            is_possible &= headers["channels"] == side.channels
        for side, pixels in zip(self.sides, self.pixels, strict=False):
            offsets = self.offsets[samples]  # type: ignore[index]
            room = len(pixels) // side.per_pixel - sizes.prod(axis=1)
            is_possible &= (offsets >= 0) & (offsets <= room)
        if isinstance(self.target, Labels):
            values = self.target.values[samples]
            is_possible &= (values >= 0) & (values < len(self.target.classes))
        if not is_possible.all():
            wrong = np.arange(len(self))[samples][~is_possible][0]
            raise UserError(
                f"{self.folder}: size, header or label of sample {wrong} of {self.name} is "
                f"impossible; {FIX}"
            )


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
    if (values := getattr(index.target, "values", None)) is not None:
        columns["values"] = values.astype(index.target.dtype)
    if index.offsets is not None:
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
    root = index.files[0].folder if index.files else ""
    write_columns(index, folder)
    return open_columns(folder, int(index.distinct_sizes.prod(axis=1).max()), root)


def open_column(path: Path, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
    """Map the array in a NumPy file into memory; the dtype `np.bytes_` stands for texts of any
    length, and None in the shape for any length.

    Raises:
        UserError: the file is missing, no regular file (such as a link), or holds something else.
    """
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path} is missing, a link or no regular file; {FIX}")
    try:
        # Unlike np.load, this opens no archives and no pickles. Copy-on-write, because torch warns
        # of arrays that cannot be written to.
        array = np.lib.format.open_memmap(path, "c").view(np.ndarray)
    except Exception as error:  # damaged headers make NumPy raise errors of any type
        raise UserError(f"{path} is not a complete NumPy file ({shown(error)}); {FIX}") from None
    fitting = [known in (None, found) for known, found in zip(shape, array.shape, strict=False)]
    is_right = array.dtype.kind == "S" if dtype is np.bytes_ else array.dtype == dtype
    if not is_right or array.ndim != len(shape) or not all(fitting):
        raise UserError(
            f"{path} holds an array of shape {array.shape} and dtype {shown(array.dtype)}, not of "
            f"shape {shape} and dtype {shown(np.dtype(dtype))}; {FIX}"
        )
    return array


def check_sizes(sizes: np.ndarray, max_pixels: int, where: Path) -> None:
    """Raise UserError unless the (M, 2) heights and widths, one at least, are all those of images
    of up to `max_pixels` pixels."""
    is_possible = (sizes >= 1) & (sizes <= max_pixels)
    if not (len(sizes) and is_possible.all() and (sizes.prod(axis=1) <= max_pixels).all()):
        raise UserError(
            f"{where}: no images of up to {max_pixels:,} pixels have the sizes "
            f"{shown(sizes.tolist())}; {FIX}"
        )


def open_columns(
    folder: Path,
    max_pixels: int,
    root: str = "",
    kind: type[StoredIndex] = StoredIndex,
    **others: Any,
) -> Index:
    """Open the index that `write_columns` wrote.

    Values of single samples are checked when these are used, see `Index.check`.

    Args:
        folder: folder of the columns.
        max_pixels: maximum number of pixels of an image.
        root: folder of the data set now.
        kind: class of the index; `others` are its further fields, such as another `reopen`.

    Raises:
        UserError: a file of the folder is missing, or `write_columns` does not write such a file.
    """

    def column(name: str, dtype: np.dtype | type, *shape: int | None) -> np.ndarray:
        return open_column(folder / f"{name}.npy", dtype, shape)

    where = folder / "facts.json"
    if not where.is_file():
        raise UserError(f"{where} is missing; {FIX}")
    facts = parse_json(where.read_bytes(), FACTS | MORE_FACTS, str(where), FIX)
    sizes = column("sizes", np.int32, None, 2)
    distinct = column("distinct_sizes", np.int64, None, 2)
    check_sizes(distinct, max_pixels, folder / "distinct_sizes.npy")
    count, target = len(sizes), target_of(facts["target"], str(where))
    if hasattr(target, "values"):
        shape = (count,) if isinstance(target, Labels) else (count, target.channels)
        values = column("values", np.dtype(target.dtype), *shape)
        target = replace(target, values=values)  # type: ignore[call-arg]
    has_pixels = (folder / "offsets.npy").exists()
    sides = range(0 if has_pixels else 1 + (target.interpolation != "none"))
    names = [column(f"names-{n}", np.bytes_, count) for n in sides]
    index = kind(
        **{name: facts[name] for name in FACTS},
        left_out=dict.fromkeys(facts["left_out"], "left out when the index was made"),
        sizes=sizes,
        target=target,
        files=tuple(Paths(folder_of(root), each) for each in names),
        headers=tuple(column(f"headers-{n}", HEADER, count) for n in sides),
        folder=str(folder),
        **{"reopen": partial(open_columns, folder, max_pixels, root)} | others,
    )
    if has_pixels:
        pixels = tuple(
            column(f"pixels-{number}", np.dtype(side.dtype), None)
            for number, side in enumerate(index.sides)
        )
        check_sizes(distinct, len(pixels[0]) // index.channels, folder / "distinct_sizes.npy")
        index = replace(index, pixels=pixels, offsets=column("offsets", np.int64, count))
    # Otherwise computed from whole columns.
    vars(index).update(facts["known"], distinct_sizes=distinct)
    return index
