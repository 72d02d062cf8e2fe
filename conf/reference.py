"""Generator of the tables of keys in docs/: `python -m conf.reference`.

docs/configuration.md has the keys of all configurations. A page in docs/configuration/ has, of the
choices that its mark names, such as `<!-- configuration keys of data/NAME, model/NAME -->`, the
keys that only these have and the values that their files set.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.schema import NAMED_BY, Config, own_classes

CONF = Path(__file__).parent
TABLE = CONF.parent / "docs" / "configuration.md"
ENTRY = re.compile(r"^(\w+): ?(.*)\n((?:  .*\n)*)", re.MULTILINE)
MARK = re.compile(r"<!-- configuration keys(?: of (.*))? -->")
GROUPS = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}
END = "<!-- end of configuration keys -->"


def pages() -> list[Path]:
    """Return the pages that hold a table of keys."""
    return [TABLE, *sorted(TABLE.with_suffix("").glob("*.md"))]


def documented_keys(group: Any = Config, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of each key of a class; groups follow the top level."""
    groups = [(prefix, group)]
    for prefix, group in groups:  # grows while it is read
        texts = _texts_of(group)
        for field in fields(group):
            key = prefix + field.name
            if is_dataclass(field.type):
                groups.append((f"{key}.", field.type))
            else:
                default, docstring = texts[field.name]
                yield key, _default(default), _meaning(key, docstring)


@cache
def _texts_of(group: type) -> dict[str, tuple[ast.expr | None, ast.stmt | None]]:
    """Return, by key, what a class or one that it extends has as its default and below it."""
    texts: dict[str, tuple[ast.expr | None, ast.stmt | None]] = {}
    for kind in reversed(group.__mro__[:-1]):
        [definition] = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for field, docstring in pairwise([*definition.body, None]):
            if isinstance(field, ast.AnnAssign):
                texts[ast.unparse(field.target)] = field.value, docstring
    return texts


def _default(value: ast.expr | None) -> str:
    """Return a default as on the command line; empty if there is none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "key":
        value = value.args[0]
    text = ast.unparse(value).strip("'") if value else "MISSING"
    shown = {"MISSING": "", "None": "null", "float('inf')": "inf", "True": "true", "False": "false"}
    return shown.get(text, text)


def _meaning(key: str, docstring: ast.stmt | None) -> str:
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        raise ValueError(f"{key} has no docstring; add one under the field")
    return " ".join(str(docstring.value.value).split())


def _values_of(file: Path) -> dict[str, str]:
    """Return the values that a file of a group sets, such as conf/data/mnist.yaml, whose lines are
    `key: value` or `key:` followed by such lines, indented."""
    values: dict[str, str] = {}
    for key, value, below in ENTRY.findall(file.read_text()):
        if key == "defaults":
            for parent in value.strip("[]").split(", "):
                is_file = not parent.startswith("schema")
                values |= _values_of(file.with_name(f"{parent}.yaml")) if is_file else {}
        else:
            lines = ",".join(line.strip() for line in below.splitlines())
            values[key] = (value or f"{{{lines}}}").replace(" ", "")
    return values


def _choices_of(page: Path) -> list[str]:
    """Return the choices that a page describes and that are there, such as `data/mnist`."""
    found = MARK.search(page.read_text())
    named = found[1].split(", ") if found and found[1] else []
    return [choice for choice in named if (CONF / f"{choice}.yaml").exists()]


def _rows_of_all() -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the keys of all configurations, with the values of choices without a page
    of their own."""
    elsewhere = {choice for page in pages() for choice in _choices_of(page)}
    values: dict[str, dict[str, list[str]]] = {}
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            for key, value in (
                _values_of(file).items() if f"{group}/{file.stem}" not in elsewhere else ()
            ):
                if value != file.stem:  # the name itself
                    values.setdefault(f"{group}.{key}", {}).setdefault(value, []).append(file.stem)
    for key, default, text in documented_keys():
        shown = [f"`{default}`"] if default else []
        shown += [f"`{value}` ({', '.join(of)})" for value, of in values.get(key, {}).items()]
        yield key, "; ".join(shown), text


def _rows_of(choices: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the keys that only these choices have, and of those that their files set;
    of several choices of a group, each value with the names of those that have it."""
    shown: dict[str, dict[str, list[str]]] = {}
    texts: dict[str, str] = {}
    for choice in choices:
        group, _, name = choice.partition("/")
        values = _values_of(CONF / f"{choice}.yaml")
        common = {field.name for field in fields(GROUPS[group])}
        own = own_classes(group).get(name) if group in NAMED_BY else None
        for key, default, text in documented_keys(own or GROUPS[group]):
            if values.get(key, name) != name or key not in common:
                of_key = shown.setdefault(f"{group}.{key}", {})
                of_key.setdefault(values.get(key, default), []).append(name)
                texts[f"{group}.{key}"] = text
    groups = [choice.partition("/")[0] for choice in choices]
    for key, of_key in shown.items():
        is_one = groups.count(key.partition(".")[0]) == 1
        cells = [
            f"`{value}`" + f" ({', '.join(of)})" * (not is_one) for value, of in of_key.items()
        ]
        yield key, "; ".join(cells), texts[key]


def with_table(page: Path) -> str:
    """Return the text of a page with its table."""
    text, choices = page.read_text(), _choices_of(page)
    rows = _rows_of_all() if page == TABLE else _rows_of(choices)
    table = ["| key | default | meaning |", "| --- | --- | --- |"]
    table += [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in rows]
    start = text.index("\n", text.index("<!-- configuration keys"))
    return "\n".join([text[:start], *table, END + text.partition(END)[2]])


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_table(page))
