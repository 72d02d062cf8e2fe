"""A CSV or Parquet file that lists images with their labels."""

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from conf.data.table import TableConfig
from conf.errors import UserError, counted, first_few
from loaders.index import (
    Index,
    held_out_split,
    index_splits,
    read_headers,
)
from loaders.targets import Labels, MultiLabels, RegressionTargets, check_rounding

SPLIT_COLUMN = "split"
SPLITS = ("train", "val", "test")
SEPARATOR = ";"
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""
ZERO_OR_ONE = {"0", "1", "0.0", "1.0"}
INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Table:
    """The columns of a table that are used, as text."""

    name: str
    """Name of the file."""
    places: Sequence[str]
    """Place of each sample, for messages: `line 2`."""
    cells: Mapping[str, Sequence[str]]
    """Cells by column: the paths, the labels and, if there is such a column, the splits."""

    def take(self, lines: np.ndarray) -> "Table":
        """Return some lines of the table, given as their positions."""
        cells = {name: [column[i] for i in lines] for name, column in self.cells.items()}
        return replace(self, places=[self.places[i] for i in lines], cells=cells)

    def refuse(
        self, wrong: Iterable[bool], cells: Sequence[str], name: str, what: str, fix: str
    ) -> None:
        """Raise UserError with the places and values of wrong cells, if there are any.

        The message counts them by their name, such as `line`; `what` says what is wrong.
        """
        named = [f"{self.places[i]} ({cells[i]})" for i, is_wrong in enumerate(wrong) if is_wrong]
        if named:
            count = counted(len(named), name)
            raise UserError(f"{count} {what} in {self.name}: {first_few(named)}; {fix}")


def table(data: TableConfig, held_out: str = "val") -> tuple[Index, Index]:
    """Return the index of the training split and of `held_out`, `val` or `test`."""
    read = _checked(read_table(data), data)
    kind, lines = _kind(read, data), _lines_of(read, data, held_out)
    # Files of neither split may be broken or missing.
    read = read.take(np.concatenate([*lines.values()]))
    counts = {split: len(numbers) for split, numbers in lines.items()}
    target = _target(read, data, kind, counts["train"])
    files = read_headers(_existing_files(read, data), data, "rgb")
    labels = None
    if data.fold is not None and kind != "numbers":  # folds share out each combination of labels
        columns = [read.cells[name] for name in data.label_columns]
        cells = map(SEPARATOR.join, zip(*columns, strict=True))
        labels = np.unique(list(cells), return_inverse=True)[1]
    return index_splits(Path(read.name).stem, data, (files,), target, counts, labels)


def test_table(data: TableConfig) -> Index:
    """Return the index of the test split."""
    return table(data, "test")[1]


def read_table(data: TableConfig) -> Table:
    """Read the table that `data.table` names.

    Raises:
        UserError: there is no such file, or it lacks columns or has no lines.
    """
    if data.table is None or not os.path.isfile(data.table):
        raise UserError(
            f"data.table={data.table} is no file in {os.getcwd()}; set data.table=FILE to a CSV or "
            "Parquet file"
        )
    is_parquet = data.table.lower().endswith((".parquet", ".pq"))
    read = (_read_parquet if is_parquet else _read_csv)(data.table, data)
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


def _read_csv(name: str, data: TableConfig) -> Table:
    places, rows = [], []
    with open(name, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = [column.strip() for column in next(reader, [])]
            used = _used_columns(header, data)
            for row in filter(None, reader):
                places.append(f"line {reader.line_num}")
                rows.append([cell.strip() for cell in row])
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(
                f"{name} cannot be read below line {reader.line_num} ({error}); save it as CSV in "
                "UTF-8 with commas"
            ) from error
    read, lengths = Table(name, places, {}), list(map(len, rows))
    wrong = [length != len(header) for length in lengths]
    what = f"without the {counted(len(header), 'cell')} of the header"
    fix = "put quotes around cells with commas"
    read.refuse(wrong, list(map(str, lengths)), "line", what, fix)
    numbers = {column: header.index(column) for column in used}
    return replace(read, cells={c: [row[n] for row in rows] for c, n in numbers.items()})


def _read_parquet(name: str, data: TableConfig) -> Table:
    """Read a Parquet file as `_read_csv` does; rows are counted from 1."""
    from pyarrow import parquet

    used = _used_columns(parquet.read_schema(name).names, data)
    columns = parquet.read_table(name, columns=used).to_pydict()
    places = [f"row {number}" for number in range(1, len(columns[data.path_column]) + 1)]
    return Table(name, places, {column: [*map(_text, columns[column])] for column in used})


def _text(cell: object) -> str:
    """Return a cell of a Parquet file as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(int(cell)) if isinstance(cell, bool) else str(cell).strip()


def _checked(read: Table, data: TableConfig) -> Table:
    """Return the table with paths relative to `data.root`, equal ones in equal words.

    Raises:
        UserError: cells are empty, paths come twice, or splits are unknown.
    """
    for name, cells in read.cells.items():
        are_empty = [not cell or not MISSING_VALUES.isdisjoint(_names(cell)) for cell in cells]
        named = [f"{name}: {cell!r}" for cell in cells]
        fix = "fix or remove the lines, or rename the class if one is meant"
        read.refuse(are_empty, named, "cell", "without a value", fix)
    names = read.cells[data.path_column]
    relative = [os.path.relpath(p, data.root) if os.path.isabs(p) else p for p in names]
    paths = list(map(os.path.normpath, relative))
    first: dict[str, str] = {}
    earlier = [first.setdefault(path, at) for path, at in zip(paths, read.places, strict=True)]
    are_twice = [one != other for one, other in zip(earlier, read.places, strict=True)]
    named = [f"{path}, as {place}" for path, place in zip(paths, earlier, strict=True)]
    read.refuse(are_twice, named, "path", "listed twice", "keep one line of each")
    splits = read.cells.get(SPLIT_COLUMN, ())
    are_unknown = [split not in SPLITS for split in splits]
    what = f"with an unknown {SPLIT_COLUMN}"
    read.refuse(are_unknown, splits, "line", what, f"use {', '.join(SPLITS)}")
    return replace(read, cells={**read.cells, data.path_column: paths})


def _existing_files(read: Table, data: TableConfig) -> list[str]:
    """Return the paths of the files; raise UserError unless all exist below `data.root`."""
    files = [os.path.join(data.root, path) for path in read.cells[data.path_column]]
    missing = [not os.path.isfile(path) for path in files]
    fix = f"correct the paths or data.root={data.root}, or remove the lines"
    read.refuse(missing, files, "missing file", "listed", fix)
    outside = [path.startswith("../") for path in read.cells[data.path_column]]
    fix = "set data.root to a folder that holds all of them"
    read.refuse(outside, files, "path", "leading out of data.root", fix)
    return files


def _lines_of(read: Table, data: TableConfig, held_out: str) -> dict[str, np.ndarray]:
    """Return the positions of the lines of `train` and of `held_out`, `val` or `test`; of `train`
    alone if these are to be split by seed."""
    where = f"the column {SPLIT_COLUMN} of {read.name}"
    column = read.cells.get(SPLIT_COLUMN, [])
    found = held_out_split(held_out, set(column), data, where)
    splits = np.array(column or ["train"] * len(read.places))
    lines = {"train": np.flatnonzero(splits == "train")}
    if found:
        lines[held_out] = np.flatnonzero(splits == found)
    if all(map(len, lines.values())):
        return lines
    num_train = len(lines["train"])
    raise UserError(
        f"{where} has {counted(num_train, 'line')} of train and "
        f"{len(splits) - num_train} of val or test; it needs some of both, or remove the column"
    )


def _kind(read: Table, data: TableConfig) -> str:
    """Return the kind of labels that `data.label_kind` names or that the cells look like."""
    if data.label_kind != "auto":
        return data.label_kind
    cells = [cell for name in data.label_columns for cell in read.cells[name]]
    if len(data.label_columns) > 1:
        return "several" if set(cells) <= ZERO_OR_ONE else "numbers"
    if any(SEPARATOR in cell for cell in cells):
        return "several"
    num_numbers = sum(not math.isnan(_number(cell)) for cell in cells)
    are_integers = all(map(INTEGER.fullmatch, cells))
    return "numbers" if 2 * num_numbers > len(cells) and not are_integers else "classes"


def _target(
    read: Table, data: TableConfig, kind: str, num_train: int
) -> Labels | MultiLabels | RegressionTargets:
    """Return the targets of all lines, of which the first `num_train` are those of `train`."""
    names = tuple(data.label_columns)
    columns = [read.cells[name] for name in names]
    if kind == "numbers":
        values = np.array([list(map(_number, cells)) for cells in columns])
        fix = "correct them, or set data.label_kind=classes if labels are meant"
        are_finite = np.abs(values) <= np.finfo(np.float32).max  # False for nan
        for cells, are_good in zip(columns, are_finite, strict=True):
            read.refuse(~are_good, cells, "cell", "without a finite number", fix)
        check_rounding(values.T, names)
        return RegressionTargets(values.T.astype(np.float32), names)
    if len(columns) == 1:
        return _classes(read, kind, columns[0], num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(columns)} columns, but classes are in one; name one"
        )
    for name, cells in zip(names, columns, strict=True):
        wrong = [cell not in ZERO_OR_ONE for cell in cells]
        read.refuse(wrong, cells, "cell", f"of {name} with neither 0 nor 1", "use 0 and 1")
    return MultiLabels(np.array(columns).T.astype(np.float32), names)


def _classes(read: Table, kind: str, cells: Sequence[str], num_train: int) -> Labels | MultiLabels:
    """Return the class in each of the cells or, if `kind` is `several`, any number of them: those
    of the training lines, integers in the order of their values.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    lines are training lines then.
    """
    named = [_names(cell) if kind == "several" else [cell] for cell in cells]
    found = {name for names in named[:num_train] for name in names}
    are_integers = all(map(INTEGER.fullmatch, found))
    classes = tuple(sorted(found, key=lambda name: (int(name) if are_integers else 0, name)))
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [SEPARATOR.join(n for n in names if n not in number_of) for names in named]
    fault = "of the validation or test split with labels that no training line has"
    read.refuse(map(bool, unknown), unknown, "line", fault, "correct them or add training lines")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        raise UserError(
            f"{read.name} has {counted(len(classes), 'class')} ({', '.join(classes)}); "
            f"use {needed} or more"
        )
    if kind == "classes":
        return Labels(np.array([number_of[cell] for cell in cells]), classes)
    values = np.zeros((len(cells), len(classes)), np.float32)
    for row, names in zip(values, named, strict=True):
        row[[number_of[name] for name in names]] = 1
    return MultiLabels(values, classes)


def _number(cell: str) -> float:
    """Return the number in a cell; nan if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _names(cell: str) -> list[str]:
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]
