"""What a name in the configuration stands for: `model.name=tiny_net` is in `models/tiny_net.py`.

A folder of such files needs no table: its own are found by looking into it. What its files share is
in a folder below it. A file is imported when its name is used.
"""

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

from conf.errors import UserError, unknown_name


def names_in(package: str) -> list[str]:
    """Return the names that the files of a package stand for, such as those of `models`."""
    files = pkgutil.iter_modules(import_module(package).__path__)
    return [file.name for file in files if not file.ispkg]


def file_of(package: str, name: str, key: str) -> ModuleType:
    """Import the file of a name; raise UserError if there is none."""
    names = names_in(package)
    if name not in names:
        raise unknown_name(key, name, names)
    return import_module(f"{package}.{name}")


def find(package: str, name: str, key: str, form: str = "{}") -> Any:
    """Return the class or function of a name: `TinyNet` or `tiny_net` in `tiny_net.py`, or in the
    form `{}Logger`, `CSVLogger` in `csv.py`. Raises UserError if there is none."""
    defined = vars(file_of(package, name, key))
    wanted = form.format(name)
    if callable(defined.get(wanted)):  # a function goes before its class: digits, Digits
        return defined[wanted]
    letters = wanted.replace("_", "").lower()
    for other, value in defined.items():
        if other.replace("_", "").lower() == letters and callable(value):
            return value
    raise UserError(
        f"{key}={name}: {package.replace('.', '/')}/{name}.py has no class or function of its "
        f"name; define one, such as class {form.format(name.title()).replace('_', '')}"
    )
