"""A CSV or Parquet file that lists images with their labels."""

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conf.data.table import TableConfig
from conf.errors import UserError, first_few
from loaders.index import (
    VALIDATION_SPLITS,
    Index,
    Parts,
    index_splits,
    read_headers,
    split_by_names,
)
from loaders.targets import Labels, MultiLabels, RegressionTargets

SPLIT_COLUMN = "split"
SEPARATOR = ";"
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""
INTEGER = re.compile(r"[+-]?\d+")


class Table(NamedTuple):
    """The columns of a table that are used, as text."""

    name: str
    """Name of the file."""
    places: list[str]
    """Place of each sample, for messages: `line 2`."""
    cells: Mapping[str, Sequence[str]]
    """Cells by column: the paths, the labels and, if there is such a column, the splits."""

    def take(self, lines: np.ndarray) -> "Table":
        """Return some lines of the table, given as their positions."""
        cells = {name: [column[i] for i in lines] for name, column in self.cells.items()}
        return Table(self.name, [self.places[i] for i in lines], cells)


def table(data: TableConfig, held_out: str = "val") -> tuple[Index, Index]:
    read = read_table(data)
    _check_cells(read, data)
    parts = _split(read, data, held_out)
    # Where chance splits, which samples validate is chance, and so is which classes they have.
    by_chance = SPLIT_COLUMN not in read.cells or (held_out == "val" and data.fold is not None)
    known = np.concatenate(parts) if by_chance else parts[0]
    target = _target(read, data, (known, parts[1]))
    used = np.sort(np.concatenate(parts))  # files of neither split may be broken or missing
    sides = (read_headers(_existing_files(read.take(used), data), data, "rgb"),)
    train, val = (np.searchsorted(used, part) for part in parts)
    name, parts = Path(read.name).stem, (train, val)
    return index_splits(name, data.root, sides, target.take(used), parts, held_out=held_out)


def test_table(data: TableConfig) -> Index:
    return table(data, "test")[1]


def read_table(data: TableConfig) -> Table:
    """Read the table that `data.table` names.

    Raises:
        UserError: there is no such file or no folder `data.root`, or the file lacks columns or has
            no lines.
    """
    if data.table is None:
        raise UserError("data=table needs data.table=FILE, a CSV or Parquet file")
    if not os.path.isfile(data.table):
        path = os.path.abspath(data.table)
        raise UserError(f"data.table={data.table}: there is no file {path}; set another path")
    if not os.path.isdir(data.root):
        raise UserError(
            f"data.root={data.root} is not a folder; set data.root to the folder to which the "
            f"paths in {data.table} are relative"
        )
    is_parquet = data.table.lower().endswith((".parquet", ".pq"))
    read = _read_parquet(data) if is_parquet else _read_csv(data)
    if not read.places:
        raise UserError(f"{data.table} has no line below its header; add one for each image")
    return read


def _used_columns(header: list[str], data: TableConfig) -> list[str]:
    needed = [data.path_column, *data.label_columns]
    if len(header) == 1 and (found := re.search("[;\t|]", header[0])):
        raise UserError(f"{data.table} separates cells by {found[0]!r}; save it with commas")
    missing = [name for name in needed if name not in header]
    if missing:
        raise UserError(
            f"{data.table} has no column {', '.join(missing)}; set data.path_column and "
            f"data.label_columns to some of its columns, {', '.join(header)}"
        )
    used = list(dict.fromkeys([*needed, *({SPLIT_COLUMN} & set(header))]))
    if twice := [name for name in used if header.count(name) > 1]:
        raise UserError(f"{data.table} has several columns {', '.join(twice)}; keep one of each")
    return used


def _read_csv(data: TableConfig) -> Table:
    name = str(data.table)
    places, rows, wrong = [], [], []
    with open(name, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = [column.strip() for column in next(reader, [])]
            used = _used_columns(header, data)
            line = reader.line_num + 1
            for row in reader:
                if row:
                    places.append(f"line {line}")
                    rows.append([cell.strip() for cell in row])
                    if len(row) != len(header):
                        wrong.append(f"{places[-1]} ({len(row)})")
                line = reader.line_num + 1  # a cell in quotes may have several
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(
                f"{name} cannot be read below line {reader.line_num} ({error}); save it as CSV in "
                "UTF-8 with commas"
            ) from error
    if wrong:
        raise UserError(
            f"{len(wrong)} lines of {name} do not have {len(header)} cells as the header does: "
            f"{first_few(wrong)}; put quotes around cells with commas"
        )
    columns = dict(zip(header, zip(*rows, strict=True), strict=False))  # none without rows
    return Table(name, places, {column: columns.get(column, ()) for column in used})


def _read_parquet(data: TableConfig) -> Table:
    """Read a Parquet file as `_read_csv` does; rows are counted from 1."""
    from pyarrow import parquet

    used = _used_columns(parquet.read_schema(data.table).names, data)
    columns = parquet.read_table(data.table, columns=used).to_pydict()
    places = [f"row {number}" for number in range(1, len(columns[data.path_column]) + 1)]
    return Table(str(data.table), places, {name: [*map(_text, columns[name])] for name in used})


def _text(cell: object) -> str:
    """Return a cell of a Parquet file as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(int(cell)) if isinstance(cell, bool) else str(cell).strip()


def _check_cells(read: Table, data: TableConfig) -> None:
    """Raise UserError where cells are empty, paths come twice or splits are unknown."""
    for name, cells in read.cells.items():
        are_empty = [not cell or not MISSING_VALUES.isdisjoint(_names(cell)) for cell in cells]
        named = [f"{name}: {cell!r}" for cell in cells]
        fix = "fix or remove the lines, or rename the class if one is meant"
        _refuse(read, are_empty, named, "empty cells", fix)
    first: dict[str, str] = {}
    paths = _below_root(read, data)
    earlier = [first.setdefault(path, at) for path, at in zip(paths, read.places, strict=True)]
    are_twice = [one != other for one, other in zip(earlier, read.places, strict=True)]
    named = [f"{path}, as {place}" for path, place in zip(paths, earlier, strict=True)]
    _refuse(read, are_twice, named, "paths are listed twice", "keep one line of each")
    known = ("train", *VALIDATION_SPLITS)
    splits = read.cells.get(SPLIT_COLUMN, ())
    unknown = [split not in known for split in splits]
    _refuse(
        read, unknown, splits, f"lines have an unknown {SPLIT_COLUMN}", f"use {', '.join(known)}"
    )


def _below_root(read: Table, data: TableConfig) -> list[str]:
    """Return the paths of the files relative to `data.root`, equal ones in equal words."""
    names = read.cells[data.path_column]
    relative = [os.path.relpath(p, data.root) if os.path.isabs(p) else p for p in names]
    return list(map(os.path.normpath, relative))


def _existing_files(read: Table, data: TableConfig) -> list[str]:
    """Return the paths of the files; raise UserError unless all exist below `data.root`."""
    relative = _below_root(read, data)
    files = [os.path.join(data.root, path) for path in relative]
    missing = [not os.path.isfile(path) for path in files]
    fix = "correct the paths or data.root, or remove the lines"
    _refuse(read, missing, files, "files are missing", fix)
    outside = [path.startswith("../") for path in relative]
    fix = "set data.root to a folder that holds all of them"
    _refuse(read, outside, files, "paths lead out of data.root", fix)
    return files


def _refuse(read: Table, wrong: Iterable[bool], cells: Sequence[str], what: str, fix: str) -> None:
    """Raise UserError with the places and values of wrong cells, if there are any."""
    named = [f"{read.places[i]} ({cells[i]})" for i, is_wrong in enumerate(wrong) if is_wrong]
    if named:
        raise UserError(f"{len(named)} {what} in {read.name}: {first_few(named)}; {fix}")


def _split(read: Table, data: TableConfig, held_out: str) -> Parts:
    columns, labels = [read.cells[name] for name in data.label_columns], None
    if data.fold is not None and _kind(data, columns) != "numbers":
        cells = list(map(SEPARATOR.join, zip(*columns, strict=True)))
        labels = np.unique(cells, return_inverse=True)[1]
    where = f"the column {SPLIT_COLUMN} of {read.name}"
    splits = np.array(read.cells.get(SPLIT_COLUMN, [""] * len(read.places)))
    return split_by_names(splits, data, held_out, labels, where)


def _target(
    read: Table, data: TableConfig, parts: Parts
) -> Labels | MultiLabels | RegressionTargets:
    """Return the targets of all lines; see `_classes`."""
    names = tuple(data.label_columns)
    columns = [read.cells[name] for name in names]
    kind = _kind(data, columns)
    if kind == "numbers":
        return RegressionTargets(_numbers(read, columns), names)
    if len(columns) == 1:
        return _classes(read, kind, columns[0], parts)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(columns)} columns, but classes are in one; name one"
        )
    for name, cells in zip(names, columns, strict=True):
        wrong = [cell not in ("0", "1", "0.0", "1.0") for cell in cells]
        _refuse(read, wrong, cells, f"cells of {name} are neither 0 nor 1", "use 0 and 1")
    return MultiLabels(np.array(columns).T.astype(np.float32), names)


def _classes(read: Table, kind: str, cells: Sequence[str], parts: Parts) -> Labels | MultiLabels:
    """Return the class in each of the cells or, if `kind` is `several`, any number of them: those
    of the lines in the first part."""
    named = [_names(cell) if kind == "several" else [cell] for cell in cells]
    classes = _sorted({name for i in parts[0].tolist() for name in named[i]})
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [""] * len(cells)
    for i in parts[1].tolist():
        unknown[i] = SEPARATOR.join(name for name in named[i] if name not in number_of)
    fault = "lines of the validation or test split have labels that no training line has"
    _refuse(read, map(bool, unknown), unknown, fault, "correct them or add training lines")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        raise UserError(
            f"{read.name} has {len(classes)} classes ({', '.join(classes)}); use {needed} or more"
        )
    if kind == "classes":  # -1: of a line that is in neither split
        return Labels(np.array([number_of.get(cell, -1) for cell in cells]), classes)
    values = np.zeros((len(cells), len(classes)), np.float32)
    for row, names in zip(values, named, strict=True):
        row[[number_of[name] for name in names if name in number_of]] = 1
    return MultiLabels(values, classes)


def _kind(data: TableConfig, columns: list[Sequence[str]]) -> str:
    """Return the kind of labels that `data.label_kind` names or that the cells look like."""
    if data.label_kind != "auto":
        return data.label_kind
    cells = [cell for column in columns for cell in column]
    if len(columns) > 1:
        return "several" if set(cells) <= {"0", "1", "0.0", "1.0"} else "numbers"
    if any(SEPARATOR in cell for cell in cells):
        return "several"
    are_numbers = [not math.isnan(_number(cell)) for cell in cells]
    are_integers = all(map(INTEGER.fullmatch, cells))
    return "numbers" if 2 * sum(are_numbers) > len(cells) and not are_integers else "classes"


def _number(cell: str) -> float:
    """Return the number in a cell; nan if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _numbers(read: Table, columns: list[Sequence[str]]) -> np.ndarray:
    fix = "correct them, or set data.label_kind=classes if labels are meant"
    values = np.array([list(map(_number, cells)) for cells in columns], np.float32)
    for cells, are_finite in zip(columns, np.isfinite(values), strict=True):
        _refuse(read, ~are_finite, cells, "cells are no finite numbers", fix)
    return values.T


def _names(cell: str) -> list[str]:
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Sort integers by value, other names as text."""
    if all(map(INTEGER.fullmatch, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))
