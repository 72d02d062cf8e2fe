"""The index of a data set as columns in files, which `python -m loaders.index` writes once.

A start maps the columns into memory, shared by all processes of the machine, and reads only what it
needs of them. Facts about whole columns are written with them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, first_few, shown
from conf.facts import CHANNELS, parse_json
from conf.schema import DataConfig
from loaders.images import HEADER
from loaders.index.headers import in_threads
from loaders.index.index import Index
from loaders.index.paths import Paths, folder_of
from loaders.index.store import open_column, replaced_folder, save_columns
from loaders.targets import Labels, Target, describe_target, target_of

SPLITS = ("train", "val")
SETTINGS = ("layout", "val_fraction", "val_count", "split_seed")
"""Keys of all `data` that decide which samples there are, besides those that only a layout has."""
FORMAT = 3  # changes when what an index on disk holds does
FACTS = {
    "name": str,
    "channels": CHANNELS,
    "dtype": ("uint8", "uint16"),
    "keep_channels": bool,
    "resized": bool,
}
MORE_FACTS = {"left_out": [str], "target": {}, "known": {"fingerprint": str}}
"""Kinds of values in facts.json, see `conf.facts.check_kind`: an index's attributes, and others."""


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
        for side, headers in zip(
            self.sides, (column[samples] for column in self.headers), strict=False
        ):
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
                "impossible; bring the folder back, or write it again"
            )


def settings_of(data: DataConfig, *more: str) -> dict[str, Any]:
    """Return the keys of `data` that decide which samples there are and what their targets are, and
    further ones, with their values."""
    if data.fold is not None:  # else left out, as by earlier versions
        more = (*more, "fold", "num_folds")
    of_layout = vars(data).keys() - vars(DataConfig()).keys()
    keys = [key for key in vars(data) if key in of_layout or key in (*SETTINGS, *more)]
    return {key: getattr(data, key) for key in keys}


def read_description(
    content: bytes, version: int, data: DataConfig, where: str, fix: str
) -> dict[str, Any]:
    """Read the description of an index, a pack or shards.

    Args:
        content: content of the JSON file.
        version: required value of "format".
        data: configuration, with which its "settings" must agree.
        where: name of the file in messages.
        fix: advice in messages.

    Raises:
        UserError: it is not such a file, was written by another version, or with other settings.
    """
    facts = parse_json(content, {"format": int, "settings": {}}, where, fix)
    if facts["format"] != version:
        raise UserError(f"{where} was written by another version; {fix}")
    differing = [
        f"data.{key}={getattr(data, key)} (there: {shown(there)})"
        for key, there in ({"fold": None} | facts["settings"]).items()
        if key in vars(data) and getattr(data, key) != there  # others are of other layouts
    ]
    if differing:
        raise UserError(
            f"{where} was written with other settings: {', '.join(differing)}; use those, or {fix}"
        )
    return facts


def write_index(indexes: dict[str, Index], data: DataConfig, out: Path) -> None:
    """Write the index of each split into the folder `out`, in place of an older one.

    Raises:
        UserError: `out` holds something else, or the data set is not made of image files.
    """
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_empty and not (out / "index.json").exists():
        raise UserError(f"{out} holds no index; choose another out=DIR")
    if not all(index.files for index in indexes.values()):
        raise UserError(f"data={data.layout} is not made of image files and needs no index")
    with replaced_folder(out) as folder:
        for split, index in indexes.items():
            write_columns(index, folder / split)
        about = {"format": FORMAT, "settings": settings_of(data)}
        (folder / "index.json").write_text(json.dumps(about, indent=2, default=list) + "\n")


def open_index(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split in the folder `data.index`.

    Raises:
        UserError: there is no finished index, it was made with other settings, or (unless
            `data.check_files` is off) files have changed since.
    """
    folder = Path(str(data.index))
    again = f"python -m loaders.index data={data.layout} data.root={data.root} out={folder}"
    if not (folder / "index.json").is_file():
        raise UserError(
            f"data.index={folder} is not an index; make one if {data.layout} has image files: "
            f"{again}; else leave it out"
        )
    text = (folder / "index.json").read_bytes()
    read_description(text, FORMAT, data, f"data.index={folder}", f"make it again: {again}")
    train, val = (open_columns(folder / split, data.max_pixels, data.root) for split in SPLITS)
    for index in (train, val) if data.check_files else ():
        parts = np.array_split(np.arange(len(index)), -(-len(index) // 256))
        found = in_threads(index.changed, parts, "looking at files")
        changed = [why for reasons in found for why in reasons.values()]
        if changed and data.on_error == "raise":
            raise UserError(
                f"{len(changed)} samples of {index.name} are not what data.index={folder} knows: "
                f"{first_few(changed)}; make it again: {again}"
            )
    return train, val


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


def check_sizes(sizes: np.ndarray, max_pixels: int, where: str) -> None:
    """Raise UserError unless the (M, 2) heights and widths, one at least, are all those of images
    of up to `max_pixels` pixels."""
    is_possible = (sizes >= 1) & (sizes <= max_pixels)
    if not (len(sizes) and is_possible.all() and (sizes.prod(axis=1) <= max_pixels).all()):
        raise UserError(
            f"{where}: no images of up to {max_pixels:,} pixels have the sizes "
            f"{shown(sizes.tolist())}; bring it back, or write the folder again"
        )


def open_target(facts: dict[str, Any], values: Path, count: int, where: str) -> Target:
    """Return the target that `describe_target` described, with the values of `count` samples from a
    file."""
    target = target_of(facts, where)
    if not hasattr(target, "values"):
        return target
    shape = (count,) if isinstance(target, Labels) else (count, target.channels)
    column = open_column(values, np.dtype(target.dtype), shape)
    return replace(target, values=column)  # type: ignore[call-arg]


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
        kind: class of the index.
        others: further fields of the index, such as another `reopen`.

    Raises:
        UserError: a file of the folder is missing, or `write_columns` does not write such a file.
    """
    where, fix = folder / "facts.json", "bring it back, or write the folder again"
    if not where.is_file():
        raise UserError(f"{where} is missing; {fix}")
    facts = parse_json(where.read_bytes(), FACTS | MORE_FACTS, str(where), fix)
    has_pixels = (folder / "offsets.npy").exists()
    is_photos = not (has_pixels or facts["keep_channels"])
    if is_photos and facts["channels"] not in (1, 3):
        raise UserError(f"{where}: photos have 1 or 3 channels, not {facts['channels']}; {fix}")

    def column(name: str, dtype: np.dtype | type, *shape: int | None) -> np.ndarray:
        return open_column(folder / f"{name}.npy", dtype, shape)

    sizes, distinct = (
        column("sizes", np.int32, None, 2),
        column("distinct_sizes", np.int64, None, 2),
    )
    check_sizes(distinct, max_pixels, f"{folder}/distinct_sizes.npy")
    target = open_target(facts["target"], folder / "values.npy", len(sizes), str(where))
    sides = range(0 if has_pixels else 1 + (target.interpolation != "none"))
    index = kind(
        **{name: facts[name] for name in FACTS},
        left_out=dict.fromkeys(facts["left_out"], "left out when the index was made"),
        sizes=sizes,
        target=target,
        files=tuple(
            Paths(folder_of(root), column(f"names-{n}", np.bytes_, len(sizes))) for n in sides
        ),
        headers=tuple(column(f"headers-{n}", HEADER, len(sizes)) for n in sides),
        folder=str(folder),
        **{"reopen": partial(open_columns, folder, max_pixels, root)} | others,
    )
    if has_pixels:
        pixels = tuple(
            column(f"pixels-{number}", np.dtype(side.dtype), None)
            for number, side in enumerate(index.sides)
        )
        check_sizes(distinct, len(pixels[0]) // index.channels, f"{folder}/distinct_sizes.npy")
        offsets = column("offsets", np.int64, len(sizes))
        index = replace(index, pixels=pixels, offsets=offsets)
    # Otherwise computed from whole columns.
    vars(index).update(facts["known"], distinct_sizes=distinct)
    return index
