"""What a name in the configuration stands for: `model.name=tiny_net` is in `models/tiny_net.py`.

A folder of such files needs no table: its own are found by looking into it. What its files share is
in a folder below it. A file is imported when its name is used.
"""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from conf.errors import UserError, unknown_name


def names_in(package: str) -> list[str]:
    """Return the names that the files of a package stand for, such as those of `models`; folders
    stand for none."""
    files = pkgutil.iter_modules(import_module(package).__path__)
    return [file.name for file in files if not file.ispkg]


def file_of(package: str, name: str, key: str) -> ModuleType:
    """Import the file of a name.

    Raises:
        UserError: there is no such file (the message lists the others), or it imports a package
            that is not installed.
    """
    if name not in (names := names_in(package)):
        raise unknown_name(key, name, names)
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if find_spec(missing):  # a file within it is missing
            raise
        raise UserError(f"{key}={name} needs a package: pip install {missing}") from error


def find(package: str, name: str, key: str, form: str = "{}") -> Any:
    """Return the class or function of a name: `TinyNet` or `tiny_net` in `tiny_net.py`.

    Args:
        package: folder of the file, such as `models`.
        name: value of the key, without the file's ending.
        key: key of the configuration, for messages.
        form: what it is called in its file: `{}Logger` for `CSVLogger` in `csv.py`.

    Raises:
        UserError: there is no such file, or it does not define what it is named after.
    """
    module, wanted = file_of(package, name, key), form.format(name)
    for defined in (wanted, *vars(module)):  # a function goes before its class: digits, Digits
        if _plain(defined) == _plain(wanted) and callable(value := getattr(module, defined, None)):
            return value
    words = wanted.split("_")
    capitals = "".join(word[:1].upper() + word[1:] for word in words)
    raise UserError(
        f"{key}={name}: {package.replace('.', '/')}/{name}.py has no class {capitals} and no "
        f"function {wanted}; define one of them"
    )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
