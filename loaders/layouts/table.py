"""A CSV or Parquet file that lists images with their labels."""

import math
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from conf.data.table import TableConfig
from conf.errors import UserError, check_utf8, counted, first_few
from loaders.index import IMAGE_ENDINGS, Index, index_splits, read_headers, used_splits
from loaders.targets import Labels, MultiLabels, RegressionTargets, check_rounding

SPLIT_COLUMN = "split"
SPLITS = ("train", "val", "test")
SEPARATOR = ";"
OTHER_SEPARATORS = "|,/+& "
"""Which labels in one cell may be separated by, in tables of others."""
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""
TRUTH_VALUES = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
INTEGER = re.compile(r"[+-]?\d+")
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")


@dataclass(frozen=True)
class Table:
    """The columns of a table that are used, as text."""

    name: str
    """Name of the file."""
    numbers: Sequence[int]
    """Number of each row, from 1; the header of a CSV file is one, too."""
    cells: Mapping[str, Sequence[str]]
    """Cells by column: the paths, the labels and, if there is such a column, the splits."""

    def take(self, rows: np.ndarray) -> "Table":
        """Return some rows of the table, given as their positions."""
        cells = {name: [column[i] for i in rows] for name, column in self.cells.items()}
        return replace(self, numbers=[self.numbers[i] for i in rows], cells=cells)

    def refuse(self, wrong: Iterable[bool], cells: Sequence[str], what: str, fix: str) -> None:
        """Raise UserError with the numbers of rows and values of wrong cells, if there are any."""
        named = [
            f"row {self.numbers[i]} ({cells[i]})" for i, is_wrong in enumerate(wrong) if is_wrong
        ]
        if named:
            rows = f"{len(named)} of {counted(len(self.numbers), 'row')} of {self.name}"
            raise UserError(f"{rows}: {what}: {first_few(named)}; {fix}")


def table(data: TableConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    read = _checked(read_table(data), data)
    kind, rows = _kind(read, data), _rows_of(read, data, splits)
    # Files of no wanted split may be broken or missing.
    read = read.take(np.concatenate([*rows.values()]))
    counts = {split: len(positions) for split, positions in rows.items()}
    target = _target(read, data, kind, counts["train"])
    files = read_headers(_existing_files(read, data), data, "rgb")
    labels = None
    if data.fold is not None and kind != "numbers":  # folds share out each combination of labels
        labels = np.unique(target.values, axis=0, return_inverse=True)[1].ravel()
    return index_splits(Path(read.name).stem, data, splits, (files,), target, counts, labels)


def read_table(data: TableConfig) -> Table:
    """Read the table that `data.table` names.

    Raises:
        UserError: there is no such file, or it lacks columns or has no rows.
    """
    name = data.table
    if name is None or not os.path.isfile(name):
        raise UserError(
            f"data.table={name} is no file in {os.getcwd()}; set data.table=FILE to a CSV or "
            "Parquet file"
        )
    is_parquet = name.lower().endswith((".parquet", ".pq"))
    try:
        read = _read_parquet(name, data) if is_parquet else _read_csv(name, data)
    except pyarrow.ArrowInvalid as error:
        form = "Parquet" if is_parquet else "CSV in UTF-8 with commas"
        raise UserError(f"{name} cannot be read ({error}); save it as {form}") from error
    if not read.numbers:
        raise UserError(f"{name} has no row below its header; add one for each image")
    return read


def _used_columns(header: list[str], data: TableConfig) -> dict[str, str]:
    """Return the columns that are used, as they are called in the file, by name."""
    names = [name.strip() for name in header]
    needed = [data.path_column, *data.label_columns]
    if len(names) == 1 and (found := re.search("[;\t|]", names[0])):
        raise UserError(f"{data.table} separates cells by {found[0]!r}; save it with commas")
    for name in names:
        if name.lower().endswith(IMAGE_ENDINGS) or os.path.isfile(os.path.join(data.root, name)):
            raise UserError(
                f"{data.table} has no header: its first row lists {name}; put a row with the names "
                f"of the columns above it, such as {','.join(needed)}"
            )
    if missing := [name for name in needed if name not in names]:
        raise UserError(
            f"{data.table} has no column {', '.join(missing)}; set data.path_column and "
            f"data.label_columns to some of its columns, {', '.join(names)}"
        )
    used = list(dict.fromkeys([*needed, *({SPLIT_COLUMN} & {*names})]))
    if twice := [name for name in used if names.count(name) > 1]:
        raise UserError(f"{data.table} has several columns {', '.join(twice)}; keep one of each")
    return {name: header[names.index(name)] for name in used}


def _read_csv(name: str, data: TableConfig) -> Table:
    wrong: list[csv.InvalidRow] = []

    def skip(row: csv.InvalidRow) -> str:
        wrong.append(row)
        return "skip"

    # Empty lines are rows without a text in any cell: they count.
    parse = csv.ParseOptions(
        newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=skip
    )
    with csv.open_csv(name, parse_options=parse) as reader:
        header = reader.schema.names
    used = _used_columns(header, data)
    wrong.clear()
    read = csv.read_csv(
        name,
        csv.ReadOptions(use_threads=False),  # with threads, wrong rows have no numbers
        parse,
        csv.ConvertOptions(column_types=dict.fromkeys(header, pyarrow.string())),
    )
    if wrong:
        named = first_few(f"row {row.number} ({row.actual_columns})" for row in wrong)
        raise UserError(
            f"{name} has {counted(len(wrong), 'row')} with more or fewer cells than the header's "
            f"{len(header)}: {named}; put quotes around cells with commas"
        )
    columns = [[cell.strip() for cell in column.to_pylist()] for column in read.columns]
    filled = [number for number, cells in enumerate(zip(*columns, strict=True)) if any(cells)]
    cells = {
        column: [columns[header.index(stored)][number] for number in filled]
        for column, stored in used.items()
    }
    return Table(name, [2 + number for number in filled], cells)


def _read_parquet(name: str, data: TableConfig) -> Table:
    used = _used_columns(parquet.read_schema(name).names, data)
    read = parquet.read_table(name, columns=[*used.values()])
    cells = {column: [*map(_text, read[stored].to_pylist())] for column, stored in used.items()}
    return Table(name, range(1, 1 + len(read)), cells)


def _text(cell: object) -> str:
    """Return a cell of a Parquet file as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(cell).strip()


def _checked(read: Table, data: TableConfig) -> Table:
    """Return the table with paths relative to `data.root`, equal ones in equal words.

    Raises:
        UserError: cells are empty or not UTF-8, paths come twice, or splits are unknown.
    """
    for name, cells in read.cells.items():
        for cell in cells:
            check_utf8(f"{name} of {read.name}:", cell)
        are_empty = [not cell or not MISSING_VALUES.isdisjoint(_names(cell)) for cell in cells]
        named = [f"{name}: {cell!r}" for cell in cells]
        fix = "fix or remove the rows, or rename the class if one is meant"
        read.refuse(are_empty, named, "empty cells", fix)
    names = read.cells[data.path_column]
    relative = [os.path.relpath(p, data.root) if os.path.isabs(p) else p for p in names]
    paths = list(map(os.path.normpath, relative))
    first: dict[str, int] = {}
    earlier = [
        first.setdefault(unicodedata.normalize("NFC", path), number)
        for path, number in zip(paths, read.numbers, strict=True)
    ]
    are_twice = [one != other for one, other in zip(earlier, read.numbers, strict=True)]
    named = [f"{path}, as row {number}" for path, number in zip(paths, earlier, strict=True)]
    read.refuse(are_twice, named, "paths that are listed twice", "keep one row of each")
    given = read.cells.get(SPLIT_COLUMN, ())
    are_unknown = [split not in SPLITS for split in given]
    what = f"an unknown {SPLIT_COLUMN}"
    read.refuse(are_unknown, given, what, f"use {', '.join(SPLITS)}")
    return replace(read, cells={**read.cells, data.path_column: paths})


def _existing_files(read: Table, data: TableConfig) -> list[str]:
    """Return the paths of the files; raise UserError unless all exist below `data.root`."""
    paths = read.cells[data.path_column]
    files = [_existing_file(data.root, path) for path in paths]
    missing = [file is None for file in files]
    whole = [os.path.join(data.root, path) for path in paths]
    fix = f"correct the paths or data.root={data.root}, or remove the rows"
    read.refuse(missing, whole, "files that are missing", fix)
    outside = [path.startswith("../") for path in paths]
    fix = "set data.root to a folder that holds all of them"
    read.refuse(outside, paths, "paths that lead out of data.root", fix)
    return [file for file in files if file]


def _existing_file(root: str, path: str) -> str | None:
    """Return the path of a file; its name may have another Unicode normal form in the table, as
    macOS and Linux write them. None: there is no such file."""
    forms = (path, *(unicodedata.normalize(form, path) for form in ("NFC", "NFD")))
    return next(filter(os.path.isfile, (os.path.join(root, form) for form in forms)), None)


def _rows_of(read: Table, data: TableConfig, splits: Collection[str]) -> dict[str, np.ndarray]:
    """Return the positions of the rows of `train` and of those of the `splits` that there are; of
    `train` alone if these are to be split by seed."""
    if SPLIT_COLUMN not in read.cells:
        return {"train": np.arange(len(read.numbers))}
    column = np.array(read.cells[SPLIT_COLUMN])
    where = f"the column {SPLIT_COLUMN} of {read.name}"
    used = used_splits({*read.cells[SPLIT_COLUMN]}, data, where)
    return {
        split: np.flatnonzero(column == name)
        for split, name in used.items()
        if split in ("train", *splits)
    }


def _kind(read: Table, data: TableConfig) -> str:
    """Return the kind of labels that `data.label_kind` names or that the cells look like."""
    if data.label_kind != "auto":
        return data.label_kind
    cells = [cell for name in data.label_columns for cell in read.cells[name]]
    if len(data.label_columns) > 1:
        return "several" if {*map(str.casefold, cells)} <= TRUTH_VALUES.keys() else "numbers"
    if any(SEPARATOR in cell for cell in cells):
        return "several"
    num_numbers = sum(not math.isnan(_number(cell)) for cell in cells)
    are_integers = all(map(INTEGER.fullmatch, cells))
    return "numbers" if 2 * num_numbers > len(cells) and not are_integers else "classes"


def _target(
    read: Table, data: TableConfig, kind: str, num_train: int
) -> Labels | MultiLabels | RegressionTargets:
    """Return the targets of all rows, of which the first `num_train` are those of `train`."""
    names = tuple(data.label_columns)
    columns = [read.cells[name] for name in names]
    if kind == "numbers":
        values = np.array([list(map(_number, cells)) for cells in columns])
        fix = "correct them, or set data.label_kind=classes if labels are meant"
        if len(columns) > 1:
            fix = "correct them, or write 0 and 1 alone in all columns if each is a label"
        are_finite = np.abs(values) <= np.finfo(np.float32).max  # False for nan
        for cells, are_good in zip(columns, are_finite, strict=True):
            read.refuse(~are_good, cells, "cells that are no finite numbers", fix)
        check_rounding(values.T, names)
        return RegressionTargets(values.T.astype(np.float32), names)
    if len(columns) == 1:
        return _classes(read, data, kind, columns[0], num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(columns)} columns, but classes are in one; name one"
        )
    for name, cells in zip(names, columns, strict=True):
        wrong = [cell.casefold() not in TRUTH_VALUES for cell in cells]
        read.refuse(wrong, cells, f"cells of {name} that are neither 0 nor 1", "use 0 and 1")
    marks = [[TRUTH_VALUES[cell.casefold()] for cell in cells] for cells in columns]
    return MultiLabels(np.array(marks, np.float32).T, names)


def _classes(
    read: Table, data: TableConfig, kind: str, cells: Sequence[str], num_train: int
) -> Labels | MultiLabels:
    """Return the class in each of the cells or, if `kind` is `several`, any number of them: those
    of the training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    is_sure = data.label_kind == "classes" or any(SEPARATOR in cell for cell in cells)
    if not is_sure:
        _refuse_combinations(read, cells)
    named = [_names(cell) if kind == "several" else [cell] for cell in cells]
    named = [[unicodedata.normalize("NFC", name) for name in names] for names in named]
    are_whole = all(WHOLE_NUMBER.fullmatch(name) for names in named for name in names)
    if are_whole:
        named = [[name.partition(".")[0] for name in names] for names in named]
    found = {name for names in named[:num_train] for name in names}
    classes = tuple(sorted(found, key=lambda name: (int(name) if are_whole else 0, name)))
    number_of = {name: number for number, name in enumerate(classes)}
    unknown = [SEPARATOR.join(n for n in names if n not in number_of) for names in named]
    fault = "labels of validation or tests that no training row has"
    read.refuse(map(bool, unknown), unknown, fault, "correct them or add training rows")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        raise UserError(
            f"{read.name} has {counted(len(classes), 'class')} ({', '.join(classes)}); use "
            f"{needed} or more"
        )
    if kind == "classes":
        return Labels(np.array([number_of[name] for [name] in named]), classes)
    values = np.zeros((len(cells), len(classes)), np.float32)
    for row, names in zip(values, named, strict=True):
        row[[number_of[name] for name in names]] = 1
    return MultiLabels(values, classes)


def _refuse_combinations(read: Table, cells: Sequence[str]) -> None:
    """Raise UserError if cells look like several labels with another separator between them: they
    have fewer parts than there are cells, as combinations do."""
    found = {*cells}
    for separator in OTHER_SEPARATORS:
        parts = {part for cell in found for part in map(str.strip, cell.split(separator))} - {""}
        combined = sorted(cell for cell in found if separator in cell)
        if combined and (separator == "|" or len(parts) < len(found)):
            raise UserError(
                f"{read.name} seems to have several labels in one cell, such as {combined[0]!r}; "
                f"write {SEPARATOR} between them, or set data.label_kind=classes if each cell is "
                "the name of one class"
            )


def _number(cell: str) -> float:
    """Return the number in a cell; nan if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _names(cell: str) -> list[str]:
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]
