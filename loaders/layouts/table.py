"""A CSV or Parquet file that lists images with their labels: its cells as text, the files that they
name, and the targets that they become."""

import os
import unicodedata
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits, read_headers
from loaders.folders import IMAGE_ENDINGS
from loaders.images import reason_of
from loaders.index import Index
from loaders.splits import used_splits
from loaders.targets import Target, check_rounding

SEPARATOR = ";"
OTHER_SEPARATORS = "|,/+& "
"""Which labels in one cell may be separated by, in tables of others."""
NO_VALUE = r"^$|(?:^|;)\s*(?:nan|NaN|None|null|NULL|<NA>)\s*(?:;|$)"
"""In empty cells, as pandas, Python and databases write them."""
TRUTH_VALUES = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}


def table(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    cells = _read(data)
    kind = _kind(cells[data.label_columns], data)
    parts = {"train": cells}
    if "split" in cells:
        found = dict(iter(cells.groupby("split")))
        used = used_splits(found, data, f"the column split of {data.table}")
        parts = {split: found[name] for split, name in used.items() if split in splits}
    # Files of no wanted split may be broken or missing.
    cells = pandas.concat(parts.values())
    counts = {split: len(part) for split, part in parts.items()}
    target = _target(cells, data, kind, counts["train"])
    files = read_headers([_files(cells, data)], data)
    return index_splits(Path(str(data.table)).stem, data, files, target, counts)


def _refuse(
    wrong: Iterable[tuple[int, str]], num_rows: int, data: DataConfig, what: str, fix: str
) -> None:
    """Raise UserError with numbers of rows that are wrong and what is in them, if there are any."""
    if wrong := [*wrong]:
        named = first_few(f"row {number} ({text})" for number, text in wrong)
        num_wrong = len({number for number, _ in wrong})
        of_all = f"{num_wrong} of {counted(num_rows, 'row')} of data.table={data.table}"
        raise UserError(f"{of_all}: {what}: {named}; {fix}")


def _read(data: DataConfig) -> pandas.DataFrame:
    """Return the columns of paths, labels and, if there is one, `split` of `data.table` as text, by
    the numbers of the rows, as a spreadsheet shows them; of a Parquet file, from 1.

    Raises:
        UserError: it lacks columns or has no rows, or cells are empty.
    """
    name = str(data.table)
    try:
        if name.lower().endswith((".parquet", ".pq")):
            # An index that pandas has stored is a column like others.
            cells = pandas.read_parquet(name, to_pandas_kwargs={"ignore_metadata": True})
        else:
            # Of a header, pandas would rename columns of one name.
            options: Any = {"header": None, "keep_default_na": False, "skip_blank_lines": False}
            cells = pandas.read_csv(name, dtype=str, **options)
            cells = cells.set_axis(cells.iloc[0], axis=1)[1:]
    except (ValueError, OSError) as error:
        raise UserError(
            f"data.table={name} cannot be read ({reason_of(error, name)}); set data.table=FILE to "
            "a Parquet file, or to a CSV file in UTF-8 with commas, and quotes around cells"
        ) from error
    cells.index += 1
    cells.columns = cells.columns.astype(str).str.strip()
    cells = cells[_used_columns([*cells.columns], data)].map(_text)
    cells = cells[(cells != "").any(axis=1)]  # without blank rows
    if cells.empty:
        raise UserError(f"{name} has no row below its header; add one for each image")

    each = cells.stack()
    empty = each[each.str.contains(NO_VALUE)].items()
    fix = "fix or remove the rows, or rename the class if one is meant"
    wrong = [(number, f"{column}: {cell!r}") for (number, column), cell in empty]
    _refuse(wrong, len(cells), data, "empty cells", fix)
    return cells


def _used_columns(names: list[str], data: DataConfig) -> list[str]:
    """Return which of a table's columns are used: paths, labels and, if there is one, the split."""
    needed = [data.path_column, *data.label_columns]
    if files := [name for name in names if name.lower().endswith(IMAGE_ENDINGS)]:
        raise UserError(
            f"{data.table} has no header: its first row lists {files[0]}; put a row with the names "
            f"of the columns above it, such as {','.join(needed)}"
        )
    used = [*needed, "split"] if "split" in names else needed
    if len({*used}) < len(used) or not data.label_columns:
        raise UserError(
            f"data.table={data.table} data.path_column={data.path_column} data.label_columns="
            f"{data.label_columns}: name one or more columns of labels, each once"
        )
    if wrong := [name for name in used if names.count(name) != 1]:
        raise UserError(
            f"{data.table} has none or several of the column {', '.join(wrong)}; set "
            f"data.path_column and data.label_columns to some of its columns, {', '.join(names)}"
        )
    return used


def _text(cell: object) -> str:
    """Return a cell as a CSV file would hold it."""
    if isinstance(cell, np.ndarray):
        return SEPARATOR.join(map(str, cell)) or SEPARATOR
    return "" if pandas.isna(cell) else str(cell).strip()


def _files(cells: pandas.DataFrame, data: DataConfig) -> list[str]:
    """Return the paths of the files below `data.root`; raise UserError unless all exist, once."""
    paths = cells[data.path_column]
    root = os.path.join(os.path.abspath(data.root), "")
    files_in = cache(_files_in)  # to list folders is faster than to look at each file
    found = [_existing_file(path, root, files_in) for path in paths]
    files = pandas.Series(found, cells.index, object)
    missing = paths[files == ""].items()
    fix = f"correct the paths or data.root={data.root}, or remove the rows"
    _refuse(missing, len(cells), data, "files that are missing below data.root", fix)
    twice = files[files.duplicated(keep=False)].sort_values(kind="stable").items()
    _refuse(twice, len(cells), data, "paths that are listed twice", "keep one row of each")
    return found


def _files_in(folder: str) -> set[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}
    return set()


def _existing_file(cell: str, root: str, files_in: Callable[[str], set[str]]) -> str:
    """Return the path below `root` of a file in short; its name may have another Unicode normal
    form in the table, as macOS and Linux write them. Empty: there is no such file."""
    path = os.path.normpath(os.path.join(root, cell)).removeprefix(root)
    if os.path.isabs(path):
        return ""
    for form in (path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)):
        file = os.fsdecode(form.encode())  # the names of files are UTF-8 in any locale
        folder, name = os.path.split(file)
        if name in files_in(root + folder) or os.path.isfile(root + file):
            return file
    return ""


def _kind(labels: pandas.DataFrame, data: DataConfig) -> str:
    if data.label_kind != "auto":
        return data.label_kind
    if len(labels.columns) > 1:
        are_truths = labels.map(str.casefold).isin([*TRUTH_VALUES]).all(axis=None)
        return "several" if are_truths else "numbers"
    cells = labels[data.label_columns[0]]
    if cells.str.contains(SEPARATOR, regex=False).any():
        return "several"
    are_mostly_numbers = pandas.to_numeric(cells, errors="coerce").notna().mean() > 0.5
    are_integers = cells.str.fullmatch(r"[+-]?\d+").all()
    return "numbers" if are_mostly_numbers and not are_integers else "classes"


def _target(cells: pandas.DataFrame, data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the targets of all rows, of which the first `num_train` are those of `train`."""
    labels = cells[data.label_columns]
    if kind != "numbers" and len(data.label_columns) == 1:
        return _classes(labels[data.label_columns[0]], data, kind, num_train)
    if kind == "classes":
        raise UserError(
            f"data.label_columns={data.label_columns} are several, but classes are in one; name one"
        )
    if kind == "numbers":
        values = labels.apply(pandas.to_numeric, errors="coerce")
        fault = "are no finite numbers"
        fix = "correct them, or set data.label_kind=classes if labels are meant"
    else:
        values = labels.map(str.casefold).map(TRUTH_VALUES.get)
        fault, fix = "are neither 0 nor 1", "use 0 and 1"
    values = values.astype(float)
    is_good = values.abs() <= np.finfo(np.float32).max  # False for nan
    for name in labels:
        wrong = labels[name][~is_good[name]].items()
        _refuse(wrong, len(cells), data, f"cells of {name} that {fault}", fix)
    kind = "numbers" if kind == "numbers" else "several labels"
    target = Target(kind, values.to_numpy(), tuple(data.label_columns))
    check_rounding(target)
    return target


def _classes(cells: pandas.Series, data: DataConfig, kind: str, num_train: int) -> Target:
    """Return the class in each cell or, if `kind` is `several`, any number of them: those of the
    training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    names = cells.str.normalize("NFC")
    if data.label_kind != "classes" and not names.str.contains(SEPARATOR, regex=False).any():
        _refuse_combinations({*names}, data)
    if kind == "several":
        names = names.str.split(SEPARATOR).explode().str.strip()
        names = names[names != ""]
    are_whole_numbers = names.str.fullmatch(r"[+-]?\d+(\.0*)?").all()
    if are_whole_numbers:
        names = names.str.replace(r"\..*", "", regex=True)
    classes = sorted({*names[names.index.isin(cells.index[:num_train])]})
    if are_whole_numbers:
        classes.sort(key=int)
    unknown = names[~names.isin(classes)].items()
    fault = "labels of validation or tests that no training row has"
    _refuse(unknown, len(cells), data, fault, "correct them or add training rows")
    needed = 2 if kind == "classes" else 1
    if len(classes) < needed:
        found = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"data.table={data.table} has {found}; use {needed} or more")
    numbers = pandas.Index(classes).get_indexer(names)
    if kind == "classes":
        return Target("labels", numbers, tuple(classes))
    values = np.zeros((len(cells), len(classes)), np.float32)
    values[cells.index.get_indexer(names.index), numbers] = 1
    return Target("several labels", values, tuple(classes))


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
