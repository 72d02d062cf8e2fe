"""A CSV or Parquet file that lists images with their labels."""

import math
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted
from conf.schema import DataConfig
from loaders.file_index import index_splits
from loaders.headers import read_headers
from loaders.index import Index
from loaders.table import (
    SEPARATOR,
    Table,
    existing_files,
    names_in_cell,
    read_table,
    rows_of_splits,
)
from loaders.targets import Labels, MultiLabels, RegressionTargets, Target, check_rounding

OTHER_SEPARATORS = "|,/+& "
"""Which labels in one cell may be separated by, in tables of others."""
TRUTH_VALUES = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
INTEGER = re.compile(r"[+-]?\d+")
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0*)?")


def table(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    read = read_table(data)
    rows = rows_of_splits(read, data, splits)
    kind = _kind(read, data)
    # Files of no wanted split may be broken or missing.
    read = read.take(np.concatenate([*rows.values()]))
    counts = {split: len(positions) for split, positions in rows.items()}
    target = _target(read, data, kind, counts["train"])
    files = read_headers(existing_files(read, data), data, "rgb")
    labels = None
    if data.fold is not None and kind != "numbers":  # folds share out each combination of labels
        labels = np.unique(target.values, axis=0, return_inverse=True)[1].ravel()
    return index_splits(Path(read.name).stem, data, splits, (files,), target, counts, labels)


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
        return _classes(read, data, kind, read.cells[names[0]], num_train)
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


def _classes(
    read: Table, data: DataConfig, kind: str, cells: list[str], num_train: int
) -> Labels | MultiLabels:
    """Return the class in each of the cells or, if `kind` is `several`, any number of them: those
    of the training rows, whole numbers in the order of their values and without decimals.

    Where chance splits, which samples validate is chance, and so is which classes they have: all
    rows are training rows then.
    """
    if data.label_kind != "classes" and not any(SEPARATOR in cell for cell in cells):
        _refuse_combinations(read, cells)
    cells = [unicodedata.normalize("NFC", cell) for cell in cells]
    named = [names_in_cell(cell) if kind == "several" else [cell] for cell in cells]
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


def _refuse_combinations(read: Table, cells: list[str]) -> None:
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
