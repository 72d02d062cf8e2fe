"""The table of keys in docs/configuration.md: `python -m conf.reference` updates it."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = "| key | default | meaning |\n| --- | --- | --- |\n"


def rows(group: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield the line of each key; its meaning is the docstring below it."""
    [tree] = ast.parse(inspect.getsource(group)).body
    assert isinstance(tree, ast.ClassDef)
    meanings = {
        ast.unparse(statement.target): ast.literal_eval(below.value)
        for statement, below in pairwise(tree.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
    for field in fields(group):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from rows(field.type, f"{field.name}.")
            continue
        default = getattr(group(), field.name)
        meaning = " ".join(meanings[field.name].split())
        if of := field.metadata.get("of"):
            meaning = f"{of}: {meaning}"
        yield f"| `{prefix}{field.name}` | {as_typed(default)} | {meaning} |\n"


def as_typed(value: Any) -> str:
    """Return a value as on the command line, in quotes of Markdown; empty if it is missing."""
    text = json.dumps(value).replace('"', "").replace(" ", "")
    return "" if text == "???" else f"`{text.replace('Infinity', 'inf')}`"


def page() -> str:
    return PAGE.read_text().partition(HEAD)[0] + HEAD + "".join(rows())


if __name__ == "__main__":
    PAGE.write_text(page())
