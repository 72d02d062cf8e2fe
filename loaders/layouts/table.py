"""A CSV or Parquet file that lists images with their labels: its cells as text, the files that they
name, and the targets that they become."""

import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

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
NO_VALUE = re.compile(r"^$|(^|;)\s*(nan|NaN|None|null|NULL|<NA>)\s*(;|$)")
"""In empty cells, as pandas, Python and databases write them."""
TRUTH_VALUES = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}
INTEGER = re.compile(r"[+-]?\d+")
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")
FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")


def table(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    cells = _read(data)
    _, *labels, split_of, _ = cells
    kind = _kind(labels, data)
    parts = {"train": cells}
    if split_of[0]:
        used = used_splits({*split_of}, data, f"the column split of {data.table}")
        parts = {
            split: cells[:, split_of == used[split]]
            for split in used
            if split in ("train", *splits)
        }
    # Files of no wanted split may be broken or missing.
    cells = np.concatenate([*parts.values()], axis=1)
    counts = {split: part.shape[1] for split, part in parts.items()}
    target = _target(cells, data, kind, counts["train"])
    files = read_headers([_files(cells, data)], data)
    return index_splits(Path(str(data.table)).stem, data, splits, files, target, counts)


def _refuse(
    wrong: list[tuple[int, str]], cells: np.ndarray, data: DataConfig, what: str, fix: str
) -> None:
    """Raise UserError with numbers of rows that are wrong and what is in them, if there are any."""
    if wrong:
        named = first_few(f"row {number} ({text})" for number, text in wrong)
        num_wrong = len({number for number, _ in wrong})
        num_rows = f"{num_wrong} of {counted(cells.shape[1], 'row')} of data.table={data.table}"
        raise UserError(f"{num_rows}: {what}: {named}; {fix}")


def _read(data: DataConfig) -> np.ndarray:
    """Return what is used of the rows of `data.table`, column by column, (columns, N): as text the
    paths, labels of each column, and splits, empty if there are none; and the rows' numbers, as a
    spreadsheet shows them; of a Parquet file, from 1.

    Raises:
        UserError: it lacks columns or has no rows, or cells are empty or no split.
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
    names = [column.strip() for column in read.column_names]
    used = _used_columns(names, data)
    columns = [[*map(_text, read.column(names.index(name)).to_pylist())] for name in used]
    if "split" not in used:
        columns.append([""] * len(read))
    first = 1 if is_parquet else 2
    cells = np.array([*columns, range(first, first + len(read))], object)
    cells = cells[:, (cells[:-1] != "").any(axis=0)]  # without blank rows
    if not cells.size:
        raise UserError(f"{name} has no row below its header; add one for each image")
    empty = [
        (number, f"{column}: {cell!r}")
        for column, texts in zip(used, cells, strict=False)
        for cell, number in zip(texts, cells[-1], strict=True)
        if NO_VALUE.search(cell)
    ]
    fix = "fix or remove the rows, or rename the class if one is meant"
    _refuse(sorted(empty), cells, data, "empty cells", fix)
    *_, splits, numbers = cells
    found = zip(numbers, splits, strict=True)
    unknown = [(number, split) for number, split in found if split not in ("", *SPLIT_NAMES)]
    _refuse(unknown, cells, data, "an unknown split", f"use {', '.join(SPLIT_NAMES)}")
    return cells


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


def _files(cells: np.ndarray, data: DataConfig) -> list[str]:
    """Return the paths of the files below `data.root`; raise UserError unless all exist, once."""
    paths, *_, numbers = cells.tolist()
    files_in = cache(_files_in)  # to list folders is faster than to look at each file
    files = [_existing_file(path, data.root, files_in) for path in paths]
    missing = [
        (number, os.path.join(data.root, path))
        for number, path, file in zip(numbers, paths, files, strict=True)
        if not file
    ]
    fix = f"correct the paths or data.root={data.root}, or remove the rows"
    _refuse(missing, cells, data, "files that are missing below data.root", fix)
    first: dict[str, int] = {}
    twice = [
        (number, f"{os.path.join(data.root, file)}, as row {first[file]}")
        for number, file in zip(numbers, files, strict=True)
        if first.setdefault(file, number) != number
    ]
    _refuse(twice, cells, data, "paths that are listed twice", "keep one row of each")
    return files


def _files_in(folder: str) -> set[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}
    return set()


def _existing_file(cell: str, root: str, files_in: Callable[[str], set[str]]) -> str:
    """Return the path below `root` of a file in short; its name may have another Unicode normal
    form in the table, as macOS and Linux write them. Empty: there is no such file."""
    path = os.path.normpath(cell)
    if path.startswith(("/", "../")):
        path = os.path.relpath(os.path.join(root, path), root)
    if path.startswith("../"):
        return ""
    for form in (None, *FORMS):
        written = unicodedata.normalize(form, path) if form else path
        file = os.fsdecode(written.encode())  # the names of files are UTF-8 in any locale
        folder, name = os.path.split(file)
        if name in files_in(os.path.join(root, folder)) or os.path.isfile(os.path.join(root, file)):
            return file
    return ""


def _kind(labels: list[np.ndarray], data: DataConfig) -> str:
    if data.label_kind != "auto":
        return data.label_kind
    counts = Counter(cell for column in labels for cell in column)
    if len(labels) > 1:
        return "several" if {*map(str.casefold, counts)} <= TRUTH_VALUES.keys() else "numbers"
    if any(SEPARATOR in cell for cell in counts):
        return "several"
    num_numbers = sum(count for cell, count in counts.items() if not math.isnan(_number(cell)))
    are_integers = all(map(INTEGER.fullmatch, counts))
    return "numbers" if 2 * num_numbers > counts.total() and not are_integers else "classes"


def _target(cells: np.ndarray, data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the targets of all rows, of which the first `num_train` are those of `train`."""
    names, labels = tuple(data.label_columns), cells[1:-2]
    if kind != "numbers" and len(names) == 1:
        return _classes(cells, data, kind, num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns names {len(names)} columns, but classes are in one; name one"
        )
    if kind == "numbers":
        value_of, fault = _number, "are no finite numbers"
        fix = "correct them, or set data.label_kind=classes if labels are meant"
    else:
        value_of, fault, fix = _truth, "are neither 0 nor 1", "use 0 and 1"
    values = np.array([[*map(value_of, column)] for column in labels])
    is_good = np.abs(values) <= np.finfo(np.float32).max  # False for nan
    for name, texts, good in zip(names, labels, is_good, strict=True):
        wrong = [*zip(cells[-1][~good], texts[~good], strict=True)]
        _refuse(wrong, cells, data, f"cells of {name} that {fault}", fix)
    target = Target("numbers" if kind == "numbers" else "several labels", values.T, names)
    check_rounding(target)
    return target


def _classes(cells: np.ndarray, data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the class in each cell or, if `kind` is `several`, any number of them: those of the
    training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    texts = cells[1].tolist()
    distinct = {*texts}
    if data.label_kind != "classes" and not any(SEPARATOR in text for text in distinct):
        _refuse_combinations(distinct, data)
    names_of = {text: [unicodedata.normalize("NFC", text)] for text in distinct}
    if kind == "several":
        parts_of = {text: name.split(SEPARATOR) for text, [name] in names_of.items()}
        names_of = {text: [*filter(None, map(str.strip, parts_of[text]))] for text in parts_of}
    are_whole = all(WHOLE_NUMBER.fullmatch(name) for names in names_of.values() for name in names)
    if are_whole:
        names_of = {
            text: [name.partition(".")[0] for name in names] for text, names in names_of.items()
        }
    found = {name for text in {*texts[:num_train]} for name in names_of[text]}
    classes = tuple(sorted(found, key=lambda name: (int(name) if are_whole else 0, name)))
    strange = {text: SEPARATOR.join({*names} - found) for text, names in names_of.items()}
    numbers = zip(texts, cells[-1], strict=True)
    unknown = [(number, strange[text]) for text, number in numbers if strange[text]]
    fault = "labels of validation or tests that no training row has"
    _refuse(unknown, cells, data, fault, "correct them or add training rows")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        found_classes = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"data.table={data.table} has {found_classes}; use {needed} or more")
    number_of = {name: number for number, name in enumerate(classes)}
    labels_of = {text: [number_of[name] for name in names] for text, names in names_of.items()}
    flat = np.array([label for text in texts for label in labels_of[text]], int)
    if kind == "classes":
        return Target("labels", flat, classes)
    values = np.zeros((len(texts), len(classes)), np.float32)
    rows = np.repeat(np.arange(len(texts)), [len(labels_of[text]) for text in texts])
    values[rows, flat] = 1
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


def _truth(cell: str) -> float:
    """Return 0 or 1; nan if a cell is neither."""
    return TRUTH_VALUES.get(cell.casefold(), math.nan)
