"""Generator of the tables of keys in docs/: `python -m conf.reference`.

docs/configuration.md has the keys of all configurations, a page in docs/configuration/ those that
only the choice in its mark has, such as `<!-- configuration keys of data/NAME -->`.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config, own_classes

TABLE = Path(__file__).parents[1] / "docs" / "configuration.md"
# a field, whose value may go on in indented lines, and the docstring below it
FIELD = re.compile(r'^    (\w+): .*\n(?: {8}.*\n|    \)\n)*    """([^"]*)"""', re.MULTILINE)
MARK = re.compile(r"<!-- configuration keys(?: of (\w+)/(\w+))? -->\n")
END = "<!-- end of configuration keys -->"
Row = tuple[str, str, str]
"""A key, its default and its meaning."""


def pages() -> list[Path]:
    """Return the pages that hold a table of keys."""
    return [TABLE, *sorted(TABLE.with_suffix("").glob("*.md"))]


def documented_keys(kind: Any, prefix: str = "") -> Iterator[Row]:
    """Yield the row of each key of a class; groups follow the top level."""
    source = "".join(inspect.getsource(each) for each in reversed(kind.__mro__[:-1]))
    meanings = dict(FIELD.findall(source))
    groups = []
    for field in fields(kind):
        if is_dataclass(field.type):
            groups.append(field)
            continue
        factory: Any = field.default_factory
        default = field.default if factory is NO_DEFAULT else factory()
        yield prefix + field.name, as_typed(default), " ".join(meanings[field.name].split())
    for field in groups:
        yield from documented_keys(field.type, f"{field.name}.")


def as_typed(value: Any) -> str:
    """Return a value as on the command line, in quotes of Markdown; empty if it is missing."""
    text = json.dumps(value).replace('"', "").replace(" ", "")
    return "" if text == "???" else f"`{text.replace('Infinity', 'inf')}`"


def with_table(page: Path) -> str:
    """Return the text of a page with its table."""
    text = page.read_text()
    mark = next(MARK.finditer(text))
    group, name = mark.groups()
    rows = [*documented_keys(Config)]
    if group:
        own = documented_keys(own_classes(group)[name], f"{group}.")
        rows = [row for row in own if row[0] not in {key for key, *_ in rows}]
    table = ["| key | default | meaning |", "| --- | --- | --- |"]
    table += [f"| `{key}` | {default} | {meaning} |" for key, default, meaning in rows]
    return text[: mark.end()] + "\n".join([*table, END + text.partition(END)[2]])


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_table(page))
