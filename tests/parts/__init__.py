"""Rows of tables that belong to parts of a project: `dali.py` has those of tests that need DALI.

A test of the core adds them to its own rows. A project has the files of its parts.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np


def rows_of(table: str) -> list[Any]:
    """The rows that the files of this folder have in tables of a name; of a dict, its items."""
    files = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    tables = [getattr(file, table, []) for file in files]
    return [row for rows in tables for row in (rows.items() if isinstance(rows, dict) else rows)]


class Trained(NamedTuple):
    """A task with data that it is trained on, and what its predictions are."""

    task: str
    kind: str
    """Of data: a row of KINDS."""
    options: list[str]
    folder: str
    """Below the data's, that of the validation images."""
    columns: list[str]
    tolerance: float = 1e-4
    values_of: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Function of what an exported file answers."""
    palette: list[int] | None = None
