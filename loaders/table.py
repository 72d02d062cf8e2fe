"""Reading the tables of `data=table`: CSV and Parquet files, as text."""

import math
import os
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.folders import IMAGE_ENDINGS
from loaders.splits import SPLIT_NAMES, used_splits

SPLIT_COLUMN = "split"
SEPARATOR = ";"
FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""


@dataclass(frozen=True)
class Table:
    """The columns of a table that are used, as text."""

    name: str
    """Name of the file."""
    numbers: list[int]
    """Number of each row, as a spreadsheet shows it; of a Parquet file, from 1."""
    cells: dict[str, list[str]]
    """Cells by column: the paths, the labels and, if there is such a column, the splits."""

    def take(self, rows: np.ndarray) -> "Table":
        """Return some rows of the table, given as their positions."""
        cells = {name: [column[i] for i in rows] for name, column in self.cells.items()}
        return Table(self.name, [self.numbers[i] for i in rows], cells)

    def refuse(self, wrong: Mapping[int, str], what: str, fix: str) -> None:
        """Raise UserError with the texts of wrong rows, by position, if there are any."""
        if wrong:
            named = first_few(f"row {self.numbers[i]} ({text})" for i, text in wrong.items())
            rows = f"{len(wrong)} of {counted(len(self.numbers), 'row')} of {self.name}"
            raise UserError(f"{rows}: {what}: {named}; {fix}")


def read_table(data: DataConfig) -> Table:
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
    numbers = np.arange(len(read)) + (1 if is_parquet else 2)
    used = _used_columns(read.column_names, data)
    cells = {
        column: [_text(cell) for cell in read.column(position).to_pylist()]
        for column, position in used.items()
    }
    filled = [i for i in range(len(read)) if any(column[i] for column in cells.values())]
    if not filled:
        raise UserError(f"{name} has no row below its header; add one for each image")
    found = Table(name, numbers.tolist(), cells).take(np.array(filled))
    _check_cells(found)
    return found


def _read_csv(name: str) -> pyarrow.Table:
    return csv.read_csv(
        name,
        csv.ReadOptions(use_threads=False),  # with threads, errors have no numbers of rows
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(default_column_type=pyarrow.string()),
    )


def _used_columns(header: list[str], data: DataConfig) -> dict[str, int]:
    """Return the positions of the columns that are used, by name."""
    names = [name.strip() for name in header]
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
    return {name: names.index(name) for name in used}


def _text(cell: object) -> str:
    """Return a cell as a CSV file would hold it."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, list):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return str(cell).strip()


def _check_cells(read: Table) -> None:
    """Raise UserError if cells are empty, or splits are unknown."""
    for name, cells in read.cells.items():
        empty = {
            i: f"{name}: {cell!r}"
            for i, cell in enumerate(cells)
            if not cell or not MISSING_VALUES.isdisjoint(names_in_cell(cell))
        }
        fix = "fix or remove the rows, or rename the class if one is meant"
        read.refuse(empty, "empty cells", fix)
    splits = read.cells.get(SPLIT_COLUMN, [])
    unknown = {i: split for i, split in enumerate(splits) if split not in SPLIT_NAMES}
    read.refuse(unknown, f"an unknown {SPLIT_COLUMN}", f"use {', '.join(SPLIT_NAMES)}")


def existing_files(read: Table, data: DataConfig) -> list[str]:
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


def rows_of_splits(read: Table, data: DataConfig, splits: Collection[str]) -> dict[str, np.ndarray]:
    """Return the positions of the rows of `train` and of those of the `splits` that there are; of
    `train` alone if these are to be split by seed."""
    if SPLIT_COLUMN not in read.cells:
        return {"train": np.arange(len(read.numbers))}
    column = np.array(read.cells[SPLIT_COLUMN])
    used = used_splits({*column}, data, f"the column {SPLIT_COLUMN} of {read.name}")
    return {
        split: np.flatnonzero(column == name)
        for split, name in used.items()
        if split in ("train", *splits)
    }


def names_in_cell(cell: str) -> list[str]:
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]
