"""What a name in the configuration stands for: `model.name=tiny_net` is in `models/tiny_net.py`.

A folder of such files needs no table: its own are found by looking into it. What its files share is
in a folder below it. A file is imported when its name is used.
"""

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

from conf.errors import UserError, unknown_name


def file_of(package: str, name: str, key: str) -> ModuleType:
    """Import the file of a name; raise UserError if the package has none."""
    files = pkgutil.iter_modules(import_module(package).__path__)
    names = [file.name for file in files if not file.ispkg]
    if name not in names:
        raise unknown_name(key, name, names)
    return import_module(f"{package}.{name}")


def find(package: str, name: str, key: str, form: str = "{}") -> Any:
    """Return the class or function of a name: `TinyNet` or `tiny_net` in `tiny_net.py`, or in the
    form `{}Logger`, `CSVLogger` in `csv.py`. Raises UserError if there is none."""
    defined = vars(file_of(package, name, key))
    wanted = form.format(name)
    letters = wanted.replace("_", "").lower()
    # A function goes before its class: digits, Digits
    for other in (wanted, *defined):
        if other.replace("_", "").lower() == letters and callable(defined.get(other)):
            return defined[other]
    raise UserError(
        f"{key}={name}: {package.replace('.', '/')}/{name}.py has no class or function of its "
        f"name; define one, such as class {form.format(name.title()).replace('_', '')}"
    )
