"""A CSV or Parquet file that lists images with their labels."""

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.files import VALIDATION_FOLDERS, file_index, split_by_seed
from loaders.index.headers import read_headers
from loaders.index.index import Index
from loaders.targets import Labels, MultiLabels, RegressionTargets

SPLIT_COLUMN = "split"
SEPARATOR = ";"
KINDS = ("auto", "classes", "several", "numbers")

Values = Labels | MultiLabels | RegressionTargets


class Table(NamedTuple):
    """The cells of a table that are used, as text."""

    name: str
    """Name of the file."""
    places: list[str]
    """Place of each sample, for messages: `line 2`."""
    paths: list[str]
    labels: list[list[str]]
    """Cells of the label columns of each sample."""
    splits: list[str]
    """Split of each sample; empty if there is no such column."""


def table(data: DataConfig) -> tuple[Index, Index]:
    read = read_table(data)
    _check_cells(read, data)
    files = [os.path.join(data.root, path) for path in read.paths]
    _check_files(read, files, data.root)
    parts = _split(read, data)
    train_target, val_target = _targets(read, data, parts)
    headers = read_headers(files, data, "rgb")
    train, val = (
        file_index(
            f"{Path(read.name).stem}/{name}", ([files[i] for i in part],), (headers[part],), target
        )
        for name, part, target in zip(
            ("train", "val"), parts, (train_target, val_target), strict=True
        )
    )
    return train, val


def read_table(data: DataConfig) -> Table:
    """The table that `data.table` names.

    Raises:
        UserError: there is no such file or no folder `data.root`, pyarrow is missing for a Parquet file, or
            the file lacks columns or has no lines.
    """
    if data.table is None:
        raise UserError("data=table needs data.table=FILE, a CSV or Parquet file")
    if not os.path.isfile(data.table):
        raise UserError(f"data.table={data.table} is not a file; set it to the table's path")
    if not os.path.isdir(data.root):
        raise UserError(
            f"data.root={data.root} is not a folder; set data.root to the folder that the paths in "
            f"{data.table} start at"
        )
    if data.label_kind not in KINDS:
        raise UserError(
            f"data.label_kind={data.label_kind} is unknown; use one of {', '.join(KINDS)}"
        )
    if not data.label_columns:
        raise UserError("data.label_columns is empty; name one column or several: [label]")
    is_parquet = data.table.lower().endswith((".parquet", ".pq"))
    header, places, rows = _read_parquet(data) if is_parquet else _read_csv(data)
    if not rows:
        raise UserError(f"{data.table} has no line below its header; add one for each image")
    position = {name: number for number, name in enumerate(header)}
    split = [position[SPLIT_COLUMN]] if SPLIT_COLUMN in position else []
    return Table(
        name=data.table,
        places=places,
        paths=[row[position[data.path_column]] for row in rows],
        labels=[[row[position[name]] for name in data.label_columns] for row in rows],
        splits=[row[number] for row in rows for number in split],
    )


def _check_columns(header: list[str], data: DataConfig) -> None:
    missing = [name for name in (data.path_column, *data.label_columns) if name not in header]
    if missing:
        raise UserError(
            f"{data.table} has no column {', '.join(missing)}; its columns are {', '.join(header)}: set "
            "data.path_column and data.label_columns to some of these"
        )


def _read_csv(data: DataConfig) -> tuple[list[str], list[str], list[list[str]]]:
    """Names of the columns, places of the rows, and their cells."""
    places, rows, wrong = [], [], []
    with open(data.table or "", newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_columns(header, data)
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
                f"{data.table} cannot be read below line {reader.line_num} ({error}); save it as CSV in "
                "UTF-8 with commas"
            ) from error
    if wrong:
        raise UserError(
            f"{len(wrong)} lines of {data.table} do not have {len(header)} cells as the header does: "
            f"{first_few(wrong)}; put quotes around cells with commas"
        )
    return header, places, rows


def _read_parquet(data: DataConfig) -> tuple[list[str], list[str], list[list[str]]]:
    """The same as `_read_csv`; rows are counted from 1."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.table={data.table} needs pyarrow: pip install pyarrow, or save the table as CSV"
        ) from error
    header = parquet.read_schema(data.table).names
    _check_columns(header, data)
    used = [data.path_column, *data.label_columns, *({SPLIT_COLUMN} & set(header))]
    columns = parquet.read_table(data.table, columns=list(dict.fromkeys(used))).to_pydict()
    rows = [[_text(cell) for cell in cells] for cells in zip(*columns.values(), strict=True)]
    return list(columns), [f"row {number}" for number in range(1, len(rows) + 1)], rows


def _text(cell: object) -> str:
    """A cell of a Parquet file as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(int(cell)) if isinstance(cell, bool) else str(cell).strip()


def _check_cells(read: Table, data: DataConfig) -> None:
    """UserError where cells are empty, paths come twice or splits are unknown."""
    empty = []
    for number, (place, path, labels) in enumerate(
        zip(read.places, read.paths, read.labels, strict=True)
    ):
        cells = dict(zip([data.path_column, *data.label_columns], [path, *labels], strict=True))
        if read.splits:
            cells[SPLIT_COLUMN] = read.splits[number]
        empty += [f"{place} ({name})" for name, cell in cells.items() if not cell]
    if empty:
        raise UserError(
            f"{read.name} has {len(empty)} empty cells: {first_few(empty)}; fill them in or remove the lines"
        )
    first: dict[str, str] = {}
    twice = []
    for place, path in zip(read.places, read.paths, strict=True):
        path = os.path.normpath(path)
        if path in first:
            twice.append(f"{place} ({path}, as {first[path]})")
        first.setdefault(path, place)
    if twice:
        raise UserError(
            f"{read.name} lists {len(twice)} paths twice: {first_few(twice)}; keep one line of each"
        )
    known = ("train", *VALIDATION_FOLDERS)
    _refuse(
        read,
        [split not in known for split in read.splits],
        read.splits,
        f"lines have an unknown {SPLIT_COLUMN}",
        f"use {', '.join(known)}",
    )


def _check_files(read: Table, files: list[str], root: str) -> None:
    missing = [not os.path.isfile(path) for path in files]
    _refuse(
        read,
        missing,
        files,
        "files are missing",
        "correct the paths or data.root, or remove the lines",
    )
    top = os.path.join(os.path.abspath(root), "")
    outside = [not os.path.abspath(path).startswith(top) for path in files]
    if any(outside):
        fix = f"set data.root={os.path.commonpath([top, *map(os.path.abspath, files)])}"
        _refuse(read, outside, files, "paths lead out of data.root", fix)
    absolute = [os.path.isabs(path) for path in files]
    if not all(absolute):
        fix = f"set data.root={os.path.abspath(root)}"
        _refuse(read, absolute, files, "paths are absolute, unlike the others,", fix)


def _refuse(read: Table, wrong: list[bool], cells: list[str], what: str, fix: str) -> None:
    """UserError that names the places and cells of what is wrong, if anything is."""
    named = [f"{read.places[i]} ({cells[i]})" for i, is_wrong in enumerate(wrong) if is_wrong]
    if named:
        raise UserError(f"{len(named)} {what} in {read.name}: {first_few(named)}; {fix}")


def _split(read: Table, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the training and of the validation samples."""
    if not read.splits:
        return split_by_seed(len(read.paths), data)
    splits = np.array(read.splits)
    train = np.flatnonzero(splits == "train")
    for name in VALIDATION_FOLDERS:
        val = np.flatnonzero(splits == name)
        if len(train) and len(val):
            return train, val
    raise UserError(
        f"the column {SPLIT_COLUMN} of {read.name} has {len(train)} lines of train and "
        f"{len(read.paths) - len(train)} of val or test; it needs some of both, or remove the column"
    )


def _targets(
    read: Table, data: DataConfig, parts: tuple[np.ndarray, np.ndarray]
) -> tuple[Values, Values]:
    """The targets of both splits."""
    kind = data.label_kind if data.label_kind != "auto" else _kind_of(read)
    columns = tuple(data.label_columns)
    if kind == "numbers":
        numbers = np.array([_numbers(read, i) for i in range(len(columns))], np.float32).T
        return RegressionTargets(numbers[parts[0]], columns), RegressionTargets(
            numbers[parts[1]], columns
        )
    if kind == "several" and len(columns) > 1:
        for number, column in enumerate(columns):
            cells = [row[number] for row in read.labels]
            wrong = [cell not in ("0", "1", "0.0", "1.0") for cell in cells]
            _refuse(read, wrong, cells, f"cells of {column} are neither 0 nor 1", "use 0 and 1")
        several = np.array([[float(cell) for cell in row] for row in read.labels], np.float32)
        return (
            MultiLabels(several[parts[0]], columns),
            MultiLabels(several[parts[1]], columns),
        )
    if len(columns) > 1:
        raise UserError(
            f"data.label_columns names {len(columns)} columns, but classes stand in one; name one column"
        )
    cells = [row[0] for row in read.labels]
    names_of = _names if kind == "several" else lambda cell: [cell]
    # Without a column `split`, which samples validate is chance, and so is which classes they have.
    known = parts[0].tolist() if read.splits else range(len(cells))
    classes = _sorted({name for i in known for name in names_of(cells[i])})
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [[n for n in names_of(cell) if n not in number_of] for cell in cells]
    is_val = np.isin(np.arange(len(cells)), parts[1]).tolist()
    _refuse(
        read,
        [used and bool(names) for used, names in zip(is_val, unknown, strict=True)],
        [SEPARATOR.join(names) for names in unknown],
        "lines of the validation split have labels that no training line has",
        "correct them or add training lines",
    )
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        raise UserError(
            f"{read.name} has {len(classes)} classes ({', '.join(classes)}); it needs {needed} or more"
        )

    def target(part: np.ndarray) -> Values:
        if kind == "classes":
            return Labels(np.array([number_of[cells[i]] for i in part], np.int64), classes)
        values = np.zeros((len(part), len(classes)), np.float32)
        for row, i in enumerate(part):
            values[row, [number_of[name] for name in names_of(cells[i])]] = 1
        return MultiLabels(values, classes)

    return target(parts[0]), target(parts[1])


def _kind_of(read: Table) -> str:
    """Kind of labels that the cells look like."""
    cells = [cell for row in read.labels for cell in row]
    if len(read.labels[0]) > 1:
        return "several" if set(cells) <= {"0", "1", "0.0", "1.0"} else "numbers"
    if any(SEPARATOR in cell for cell in cells):
        return "several"
    if all(map(_is(int), cells)) or not any(map(_is(float), cells)):
        return "classes"
    if all(map(_is(float), cells)):
        return "numbers"
    num_numbers = sum(map(_is(float), cells))
    return "numbers" if 2 * num_numbers > len(cells) else "classes"


def _is(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(cell: str) -> bool:
        try:
            kind(cell)
        except ValueError:
            return False
        return True

    return check


def _numbers(read: Table, column: int) -> list[float]:
    cells = [row[column] for row in read.labels]
    wrong = [not (_is(float)(cell) and math.isfinite(float(cell))) for cell in cells]
    fix = "correct them, or set data.label_kind=classes if labels are meant"
    _refuse(read, wrong, cells, "cells are no finite numbers", fix)
    return [float(cell) for cell in cells]


def _names(cell: str) -> list[str]:
    """The names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Integers by value, others by name."""
    if all(map(_is(int), names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))
