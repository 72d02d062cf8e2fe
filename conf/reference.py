"""The table of keys in docs/configuration.md: `python -m conf.reference` updates it."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = "| key | default | meaning |\n| --- | --- | --- |\n"


def rows(group: type = Config, prefix: str = "") -> Iterator[str]:
    """Yield the line of each key; each has its meaning below it, as a docstring."""
    tree = ast.parse(inspect.getsource(group))
    meanings = iter([node for node in ast.walk(tree) if isinstance(node, ast.Expr)])
    for field in fields(group):
        default = getattr(group(), field.name)
        if is_dataclass(default):
            yield from rows(type(default), f"{field.name}.")
            continue
        meaning = " ".join(ast.literal_eval(next(meanings).value).split())
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
