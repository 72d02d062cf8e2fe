"""Generator of the tables of keys in docs/: `python -m conf.reference`.

docs/configuration.md has the keys of all configurations. A page in docs/configuration/ has, of the
choices that its mark names, such as `<!-- configuration keys of data/NAME, model/NAME -->`, the
keys that only these have and those that their files set.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.schema import Config, own_classes

CONF = Path(__file__).parent
TABLE = CONF.parent / "docs" / "configuration.md"
# a field, whose value may go on in indented lines, and the docstring below it
FIELD = re.compile(r'^    (\w+): .*\n(?: {8}.*\n|    \)\n)*    """([^"]*)"""', re.MULTILINE)
MARK = re.compile(r"<!-- configuration keys(?: of (.*))? -->")
END = "<!-- end of configuration keys -->"
GROUPS = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}


def pages() -> list[Path]:
    """Return the pages that hold a table of keys."""
    return [TABLE, *sorted(TABLE.with_suffix("").glob("*.md"))]


def documented_keys(kind: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of each key of a class; groups follow the top level."""
    source = "".join(inspect.getsource(each) for each in reversed(kind.__mro__[:-1]))
    meanings = dict(FIELD.findall(source))
    groups = []
    for field in fields(kind):
        if is_dataclass(field.type):
            groups.append(field)
            continue
        factory: Any = field.default_factory
        default = field.default if factory is NO_DEFAULT else factory()
        yield prefix + field.name, _as_typed(default), " ".join(meanings[field.name].split())
    for field in groups:
        yield from documented_keys(field.type, f"{field.name}.")


def _as_typed(value: Any) -> str:
    """Return a value as on the command line; empty if it is missing."""
    text = json.dumps(value).replace('"', "").replace(" ", "")
    return {"???": "", "Infinity": "inf"}.get(text, text)


def _values_of(choice: str) -> dict[str, Any]:
    """Return the values that the file of a choice sets, such as conf/data/mnist.yaml."""
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{choice}.yaml"))
    parents = [name for name in values.pop("defaults") if not name.startswith("schema")]
    for parent in parents:
        values = _values_of(f"{Path(choice).parent}/{parent}") | values
    return values


def _choices_of(page: Path) -> list[str]:
    """Return the choices that a page describes and that are there, such as `data/mnist`."""
    if page == TABLE:
        elsewhere = {choice for other in pages()[1:] for choice in _choices_of(other)}
        files = [file for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]
        choices = [f"{file.parent.name}/{file.stem}" for file in files]
        return [choice for choice in choices if choice not in elsewhere]
    named = MARK.findall(page.read_text())[0].split(", ")
    return [choice for choice in named if (CONF / f"{choice}.yaml").exists()]


def _rows_of(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the default with the values of choices, and the meaning."""
    common = {key: row for key, *row in documented_keys(Config)}
    rows = dict(common) if page == TABLE else {}
    values: dict[str, dict[str, list[str]]] = {}
    for choice in _choices_of(page):
        group, _, name = choice.partition("/")
        its_values = _values_of(choice)
        for key, *row in documented_keys(own_classes(group).get(name, GROUPS[group]), f"{group}."):
            value = its_values.get(key.removeprefix(f"{group}."), name)
            if value != name:  # the name itself
                values.setdefault(key, {}).setdefault(_as_typed(value), []).append(name)
            if value != name or key not in common:
                rows[key] = row
    for key, (default, meaning) in rows.items():
        cells = [f"`{default}`"] * bool(default)
        cells += [f"`{value}` ({', '.join(of)})" for value, of in values.get(key, {}).items()]
        yield key, "; ".join(cells), meaning


def with_table(page: Path) -> str:
    """Return the text of a page with its table."""
    text = page.read_text()
    table = ["| key | default | meaning |", "| --- | --- | --- |"]
    table += [f"| `{key}` | {cell} | {meaning} |" for key, cell, meaning in _rows_of(page)]
    start = text.index("\n", text.index("<!-- configuration keys"))
    return "\n".join([text[:start], *table, END + text.partition(END)[2]])


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_table(page))
