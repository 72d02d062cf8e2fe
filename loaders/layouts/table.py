"""A CSV or Parquet file that lists images with their labels: its cells as text, the files that they
name, and the targets that they become."""

import math
import os
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits, read_headers
from loaders.folders import IMAGE_ENDINGS
from loaders.index import Index
from loaders.splits import SPLIT_NAMES, used_splits
from loaders.targets import Target, check_rounding

SEPARATOR = ";"
OTHER_SEPARATORS = "|,/+& "
"""Which labels in one cell may be separated by, in tables of others."""
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""
TRUTH_VALUES = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
INTEGER = re.compile(r"[+-]?\d+")
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")
FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")


class Row(NamedTuple):
    """The cells of a row that are used, as text."""

    number: int
    """As a spreadsheet shows it; of a Parquet file, from 1."""
    path: str
    labels: tuple[str, ...]
    split: str
    """Empty without such a column."""


def table(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    rows = _read(data)
    kind = _kind(rows, data)
    parts = {"train": rows}
    if rows[0].split:
        used = used_splits({row.split for row in rows}, data, f"the column split of {data.table}")
        parts = {
            split: [row for row in rows if row.split == used[split]]
            for split in used
            if split in ("train", *splits)
        }
    # Files of no wanted split may be broken or missing.
    rows = [row for part in parts.values() for row in part]
    counts = {split: len(part) for split, part in parts.items()}
    target = _target(rows, data, kind, counts["train"])
    files = read_headers([_files(rows, data)], data, ["rgb"])
    return index_splits(Path(str(data.table)).stem, data, splits, files, target, counts)


def _refuse(
    wrong: list[tuple[Row, str]], rows: list[Row], data: DataConfig, what: str, fix: str
) -> None:
    """Raise UserError with wrong rows and what is in them, if there are any."""
    if wrong:
        named = first_few(f"row {row.number} ({text})" for row, text in wrong)
        num_wrong = len({row.number for row, _ in wrong})
        num_rows = f"{num_wrong} of {counted(len(rows), 'row')} of data.table={data.table}"
        raise UserError(f"{num_rows}: {what}: {named}; {fix}")


def _read(data: DataConfig) -> list[Row]:
    """Read the table that `data.table` names; raise UserError if it lacks columns or has no rows,
    or cells are empty or no split."""
    name = data.table
    if name is None or not os.path.isfile(name):
        raise UserError(
            f"data.table={name} is no file in {os.getcwd()}; set data.table=FILE to a CSV or "
            "Parquet file"
        )
    is_parquet = name.lower().endswith((".parquet", ".pq"))
    try:
        read = parquet.read_table(name) if is_parquet else _read_csv(name)
    except pyarrow.ArrowInvalid as error:
        form = "Parquet" if is_parquet else "CSV in UTF-8 with commas, and quotes around cells"
        raise UserError(f"{name} cannot be read ({error}); save it as {form}") from error
    names = [column.strip() for column in read.column_names]
    used = _used_columns(names, data)
    columns = [map(_text, read.column(names.index(column)).to_pylist()) for column in used]
    num_labels = len(data.label_columns)
    rows = []
    for number, (path, *cells) in enumerate(zip(*columns, strict=True), 1 if is_parquet else 2):
        row = Row(number, path, tuple(cells[:num_labels]), "".join(cells[num_labels:]))
        if any((path, *cells)):  # else it is blank
            rows.append(row)
    if not rows:
        raise UserError(f"{name} has no row below its header; add one for each image")
    empty = [
        (row, f"{column}: {cell!r}")
        for row in rows
        for column, cell in zip(used, (row.path, *row.labels, row.split), strict=False)
        if not cell or not MISSING_VALUES.isdisjoint(_names_in(cell))
    ]
    fix = "fix or remove the rows, or rename the class if one is meant"
    _refuse(empty, rows, data, "empty cells", fix)
    unknown = [(row, row.split) for row in rows if row.split not in ("", *SPLIT_NAMES)]
    _refuse(unknown, rows, data, "an unknown split", f"use {', '.join(SPLIT_NAMES)}")
    return rows


def _read_csv(name: str) -> pyarrow.Table:
    return csv.read_csv(
        name,
        csv.ReadOptions(use_threads=False),  # with threads, errors have no numbers of rows
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(default_column_type=pyarrow.string()),
    )


def _used_columns(names: list[str], data: DataConfig) -> list[str]:
    """Return which of a table's columns are used: paths, labels and, if there is one, the split."""
    needed = [data.path_column, *data.label_columns]
    if files := [name for name in names if name.lower().endswith(IMAGE_ENDINGS)]:
        raise UserError(
            f"{data.table} has no header: its first row lists {files[0]}; put a row with the names "
            f"of the columns above it, such as {','.join(needed)}"
        )
    if missing := [name for name in needed if name not in names]:
        raise UserError(
            f"{data.table} has no column {', '.join(missing)}; set data.path_column and "
            f"data.label_columns to some of its columns, {', '.join(names)}"
        )
    used = [*needed, "split"] if "split" in names else needed
    if twice := [name for name in used if names.count(name) > 1]:
        raise UserError(f"{data.table} has several columns {', '.join(twice)}; keep one of each")
    return used


def _text(cell: object) -> str:
    """Return a cell as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(cell).strip()


def _names_in(cell: str) -> list[str]:
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]


def _files(rows: list[Row], data: DataConfig) -> list[str]:
    """Return the paths of the files; raise UserError unless all exist below `data.root`, once."""
    files = [_existing_file(row.path, data.root) for row in rows]
    missing = [
        (row, os.path.join(data.root, row.path))
        for row, file in zip(rows, files, strict=True)
        if not file
    ]
    fix = f"correct the paths or data.root={data.root}, or remove the rows"
    _refuse(missing, rows, data, "files that are missing below data.root", fix)
    first: dict[str, Row] = {}
    twice = [
        (row, f"{file}, as row {first[file].number}")
        for row, file in zip(rows, files, strict=True)
        if first.setdefault(file, row) is not row
    ]
    _refuse(twice, rows, data, "paths that are listed twice", "keep one row of each")
    return files


def _existing_file(path: str, root: str) -> str:
    """Return the path of a file in short; its name may have another Unicode normal form in the
    table, as macOS and Linux write them. Empty: there is no such file below `root`."""
    relative = os.path.relpath(os.path.join(root, path), root)
    for form in (relative, *(unicodedata.normalize(form, relative) for form in FORMS)):
        file = os.path.join(root, form)
        if os.path.isfile(file) and not relative.startswith("../"):
            return file
    return ""


def _kind(rows: list[Row], data: DataConfig) -> str:
    if data.label_kind != "auto":
        return data.label_kind
    cells = [cell for row in rows for cell in row.labels]
    if len(data.label_columns) > 1:
        return "several" if {*map(str.casefold, cells)} <= TRUTH_VALUES.keys() else "numbers"
    if any(SEPARATOR in cell for cell in cells):
        return "several"
    num_numbers = sum(not math.isnan(_number(cell)) for cell in cells)
    are_integers = all(map(INTEGER.fullmatch, cells))
    return "numbers" if 2 * num_numbers > len(cells) and not are_integers else "classes"


def _target(rows: list[Row], data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the targets of all rows, of which the first `num_train` are those of `train`."""
    names = tuple(data.label_columns)
    if kind != "numbers" and len(names) == 1:
        return _classes(rows, data, kind, num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(names)} columns, but classes are in one; name one"
        )
    if kind == "numbers":
        values = np.array([[*map(_number, row.labels)] for row in rows])
        is_good = np.abs(values) <= np.finfo(np.float32).max  # False for nan
        fault = "are no finite numbers"
        fix = "correct them, or set data.label_kind=classes if labels are meant"
    else:
        marks = [[TRUTH_VALUES.get(cell.casefold(), -1) for cell in row.labels] for row in rows]
        values = np.array(marks)
        is_good = values >= 0
        fault, fix = "are neither 0 nor 1", "use 0 and 1"
    for column, name in enumerate(names):
        wrong = [(rows[i], rows[i].labels[column]) for i in np.flatnonzero(~is_good[:, column])]
        _refuse(wrong, rows, data, f"cells of {name} that {fault}", fix)
    target = Target("numbers" if kind == "numbers" else "several labels", values, names)
    check_rounding(target)
    return target


def _classes(rows: list[Row], data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the class in each cell or, if `kind` is `several`, any number of them: those of the
    training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    cells = [row.labels[0] for row in rows]
    if data.label_kind != "classes" and not any(SEPARATOR in cell for cell in cells):
        _refuse_combinations({*cells}, data)
    cells = [unicodedata.normalize("NFC", cell) for cell in cells]
    named = [_names_in(cell) if kind == "several" else [cell] for cell in cells]
    are_whole = all(WHOLE_NUMBER.fullmatch(name) for names in named for name in names)
    if are_whole:
        named = [[name.partition(".")[0] for name in names] for names in named]
    found = {name for names in named[:num_train] for name in names}
    classes = tuple(sorted(found, key=lambda name: (int(name) if are_whole else 0, name)))
    unknown = [
        (row, SEPARATOR.join({*names} - found))
        for row, names in zip(rows, named, strict=True)
        if not found.issuperset(names)
    ]
    fault = "labels of validation or tests that no training row has"
    _refuse(unknown, rows, data, fault, "correct them or add training rows")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        found_classes = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"data.table={data.table} has {found_classes}; use {needed} or more")
    number_of = {name: number for number, name in enumerate(classes)}
    if kind == "classes":
        return Target("labels", np.array([number_of[name] for [name] in named]), classes)
    values = np.zeros((len(cells), len(classes)), np.float32)
    for row, names in zip(values, named, strict=True):
        row[[number_of[name] for name in names]] = 1
    return Target("several labels", values, classes)


def _refuse_combinations(found: set[str], data: DataConfig) -> None:
    """Raise UserError if distinct cells look like several labels with another separator between
    them: they have fewer parts than there are cells, as combinations do."""
    for separator in OTHER_SEPARATORS:
        parts = {part for cell in found for part in map(str.strip, cell.split(separator))} - {""}
        combined = sorted(cell for cell in found if separator in cell)
        if combined and (separator == "|" or len(parts) < len(found)):
            raise UserError(
                f"data.table={data.table} seems to have several labels in one cell, such as "
                f"{combined[0]!r}; write {SEPARATOR} between them, or set data.label_kind=classes "
                "if each cell is the name of one class"
            )


def _number(cell: str) -> float:
    """Return the number in a cell; nan if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan
