"""A CSV or Parquet file that lists images with their labels: its cells as text, the files that they
name, and the targets that they become."""

import math
import os
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits
from loaders.folders import IMAGE_ENDINGS
from loaders.headers import read_headers
from loaders.index import Index
from loaders.splits import SPLIT_NAMES, used_splits
from loaders.targets import Labels, MultiLabels, RegressionTargets, Target, check_rounding

SPLIT_COLUMN = "split"
SEPARATOR = ";"
OTHER_SEPARATORS = "|,/+& "
"""Which labels in one cell may be separated by, in tables of others."""
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""
TRUTH_VALUES = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
INTEGER = re.compile(r"[+-]?\d+")
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")
FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")


@dataclass(frozen=True)
class Table:
    """Rows of a table, and the columns of it that are used, as text."""

    name: str
    """Name of the file."""
    numbers: np.ndarray
    """(N,): number of each row, as a spreadsheet shows it; of a Parquet file, from 1."""
    cells: dict[str, np.ndarray]
    """(N,) str by column: the paths, the labels and, if there is such a column, the splits."""

    def take(self, rows: np.ndarray) -> "Table":
        """Return some rows of the table, given as their positions."""
        cells = {column: texts[rows] for column, texts in self.cells.items()}
        return Table(self.name, self.numbers[rows], cells)

    def refuse(self, wrong: Mapping[int, str], what: str, fix: str) -> None:
        """Raise UserError with the texts of wrong rows, by position, if there are any."""
        if wrong:
            named = first_few(f"row {self.numbers[i]} ({text})" for i, text in wrong.items())
            rows = f"{len(wrong)} of {counted(len(self.numbers), 'row')} of {self.name}"
            raise UserError(f"{rows}: {what}: {named}; {fix}")


def table(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    read = _read(data)
    rows = {"train": np.arange(len(read.numbers))}
    if (column := read.cells.get(SPLIT_COLUMN)) is not None:
        used = used_splits({*column}, data, f"the column {SPLIT_COLUMN} of {read.name}")
        wanted = [split for split in used if split in ("train", *splits)]
        rows = {split: np.flatnonzero(column == used[split]) for split in wanted}
    kind = _kind(read, data)
    # Files of no wanted split may be broken or missing.
    read = read.take(np.concatenate([*rows.values()]))
    counts = {split: len(positions) for split, positions in rows.items()}
    target = _target(read, data, kind, counts["train"])
    files = read_headers(_files(read, data), data, "rgb")
    labels = None
    if data.fold is not None and kind != "numbers":  # folds share out each combination of labels
        labels = np.unique(target.values, axis=0, return_inverse=True)[1].ravel()
    return index_splits(Path(read.name).stem, data, splits, (files,), target, counts, labels)


def _read(data: DataConfig) -> Table:
    """Read the table that `data.table` names.

    Raises:
        UserError: there is no such file, it lacks columns or has no rows, or cells are wrong.
    """
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
    read = read.rename_columns([column.strip() for column in read.column_names])
    cells = {
        column: np.array([_text(cell) for cell in read.column(column).to_pylist()], object)
        for column in _used_columns(read.column_names, data)
    }
    filled = np.flatnonzero(np.any([texts != "" for texts in cells.values()], axis=0))
    if not len(filled):
        raise UserError(f"{name} has no row below its header; add one for each image")
    found = Table(name, np.arange(len(read)) + (1 if is_parquet else 2), cells).take(filled)
    for column, texts in found.cells.items():
        empty = {
            i: f"{column}: {text!r}"
            for i, text in enumerate(texts)
            if not text or not MISSING_VALUES.isdisjoint(_names_in(text))
        }
        fix = "fix or remove the rows, or rename the class if one is meant"
        found.refuse(empty, "empty cells", fix)
    given = enumerate(found.cells.get(SPLIT_COLUMN, ()))
    unknown = {i: split for i, split in given if split not in SPLIT_NAMES}
    found.refuse(unknown, f"an unknown {SPLIT_COLUMN}", f"use {', '.join(SPLIT_NAMES)}")
    return found


def _read_csv(name: str) -> pyarrow.Table:
    return csv.read_csv(
        name,
        csv.ReadOptions(use_threads=False),  # with threads, errors have no numbers of rows
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(default_column_type=pyarrow.string()),
    )


def _used_columns(names: list[str], data: DataConfig) -> list[str]:
    """Return which of a table's columns are used."""
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
    used = [*needed, SPLIT_COLUMN] if SPLIT_COLUMN in names else needed
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
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]


def _files(read: Table, data: DataConfig) -> list[str]:
    """Return the paths of the files; raise UserError unless all exist below `data.root`, once."""
    paths = [os.path.join(data.root, path) for path in read.cells[data.path_column]]
    files = [_existing_file(path, data.root) for path in paths]
    missing = {i: paths[i] for i, file in enumerate(files) if not file}
    fix = f"correct the paths or data.root={data.root}, or remove the rows"
    read.refuse(missing, "files that are missing below data.root", fix)
    first: dict[str, int] = {}
    twice = {
        i: f"{file}, as row {read.numbers[first[file]]}"
        for i, file in enumerate(files)
        if first.setdefault(file, i) < i
    }
    read.refuse(twice, "paths that are listed twice", "keep one row of each")
    return files


def _existing_file(path: str, root: str) -> str:
    """Return the path of a file in short; its name may have another Unicode normal form in the
    table, as macOS and Linux write them. Empty: there is no such file below `root`."""
    relative = os.path.relpath(path, root)
    for form in (relative, *(unicodedata.normalize(form, relative) for form in FORMS)):
        file = os.path.join(root, form)
        if os.path.isfile(file) and not relative.startswith("../"):
            return file
    return ""


def _kind(read: Table, data: DataConfig) -> str:
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


def _target(read: Table, data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the targets of all rows, of which the first `num_train` are those of `train`."""
    names = tuple(data.label_columns)
    if kind == "numbers":
        return _numbers(read, names)
    if len(names) == 1:
        return _classes(read, data, kind, num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(names)} columns, but classes are in one; name one"
        )
    columns = [[TRUTH_VALUES.get(cell.casefold()) for cell in read.cells[name]] for name in names]
    for name, marks in zip(names, columns, strict=True):
        wrong = {i: read.cells[name][i] for i, mark in enumerate(marks) if mark is None}
        read.refuse(wrong, f"cells of {name} that are neither 0 nor 1", "use 0 and 1")
    return MultiLabels(np.array(columns, np.float32).T, names)


def _numbers(read: Table, names: tuple[str, ...]) -> RegressionTargets:
    """Return the numbers in these columns."""
    values = np.array([[_number(cell) for cell in read.cells[name]] for name in names])
    are_finite = np.abs(values) <= np.finfo(np.float32).max  # False for nan
    for name, are_good in zip(names, are_finite, strict=True):
        wrong = {i: read.cells[name][i] for i in np.flatnonzero(~are_good).tolist()}
        fix = "correct them, or set data.label_kind=classes if labels are meant"
        read.refuse(wrong, "cells that are no finite numbers", fix)
    check_rounding(values.T, names)
    return RegressionTargets(values.T.astype(np.float32), names)


def _classes(read: Table, data: DataConfig, kind: str, num_train: int) -> Labels | MultiLabels:
    """Return the class in each cell or, if `kind` is `several`, any number of them: those of the
    training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    cells = read.cells[data.label_columns[0]].tolist()
    if data.label_kind != "classes" and not any(SEPARATOR in cell for cell in cells):
        _refuse_combinations(read.name, {*cells})
    cells = [unicodedata.normalize("NFC", cell) for cell in cells]
    named = [_names_in(cell) if kind == "several" else [cell] for cell in cells]
    are_whole = all(WHOLE_NUMBER.fullmatch(name) for names in named for name in names)
    if are_whole:
        named = [[name.partition(".")[0] for name in names] for names in named]
    found = {name for names in named[:num_train] for name in names}
    classes = tuple(sorted(found, key=lambda name: (int(name) if are_whole else 0, name)))
    unknown = {i: SEPARATOR.join({*names} - found) for i, names in enumerate(named)}
    unknown = {i: names for i, names in unknown.items() if names}
    fault = "labels of validation or tests that no training row has"
    read.refuse(unknown, fault, "correct them or add training rows")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        found_classes = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"{read.name} has {found_classes}; use {needed} or more")
    number_of = {name: number for number, name in enumerate(classes)}
    if kind == "classes":
        return Labels(np.array([number_of[name] for [name] in named]), classes)
    values = np.zeros((len(cells), len(classes)), np.float32)
    for row, names in zip(values, named, strict=True):
        row[[number_of[name] for name in names]] = 1
    return MultiLabels(values, classes)


def _refuse_combinations(table_name: str, found: set[str]) -> None:
    """Raise UserError if distinct cells look like several labels with another separator between
    them: they have fewer parts than there are cells, as combinations do."""
    for separator in OTHER_SEPARATORS:
        parts = {part for cell in found for part in map(str.strip, cell.split(separator))} - {""}
        combined = sorted(cell for cell in found if separator in cell)
        if combined and (separator == "|" or len(parts) < len(found)):
            raise UserError(
                f"{table_name} seems to have several labels in one cell, such as {combined[0]!r}; "
                f"write {SEPARATOR} between them, or set data.label_kind=classes if each cell is "
                "the name of one class"
            )


def _number(cell: str) -> float:
    """Return the number in a cell; nan if there is none."""
    try:
        return float(cell)
    except ValueError:
        return math.nan
