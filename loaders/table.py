"""Reading the tables of `data=table`: CSV and Parquet files, as text."""

import math
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from conf.data.table import TableConfig
from conf.errors import UserError, check_utf8, counted, first_few
from loaders.folders import IMAGE_ENDINGS
from loaders.splits import used_splits

SPLIT_COLUMN = "split"
SPLITS = ("train", "val", "test")
SEPARATOR = ";"
MISSING_VALUES = {"nan", "NaN", "None", "null", "NULL", "<NA>"}
"""Empty cells, as pandas, Python and databases write them."""


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


def read_table(data: TableConfig) -> Table:
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
        read = _read_parquet(name, data) if is_parquet else _read_csv(name, data)
    except pyarrow.ArrowInvalid as error:
        form = "Parquet" if is_parquet else "CSV in UTF-8 with commas"
        raise UserError(f"{name} cannot be read ({error}); save it as {form}") from error
    if not read.numbers:
        raise UserError(f"{name} has no row below its header; add one for each image")
    return _checked(read, data)


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
        are_empty = [
            not cell or not MISSING_VALUES.isdisjoint(names_in_cell(cell)) for cell in cells
        ]
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


def existing_files(read: Table, data: TableConfig) -> list[str]:
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


def rows_of_splits(
    read: Table, data: TableConfig, splits: Collection[str]
) -> dict[str, np.ndarray]:
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


def names_in_cell(cell: str) -> list[str]:
    """Return the names between the separators."""
    return [name.strip() for name in cell.split(SEPARATOR) if name.strip()]
