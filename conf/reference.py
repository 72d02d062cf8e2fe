"""Generator of the table in docs/configuration.md from `schema.py`: `python -m conf.reference`."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

SCHEMA = Path(__file__).with_name("schema.py")
TABLE = SCHEMA.parents[1] / "docs" / "configuration.md"
START, END = "<!-- configuration keys -->", "<!-- end of configuration keys -->"


def documented_keys(schema: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning) of each key in a schema's text; groups follow the top level."""
    classes = {
        node.name: node.body for node in ast.parse(schema).body if isinstance(node, ast.ClassDef)
    }
    groups = [("", "Config")]
    for prefix, name in groups:  # grows while it is read
        for field, docstring in pairwise([*classes[name], None]):
            if not isinstance(field, ast.AnnAssign):
                continue
            key, kind = prefix + ast.unparse(field.target), ast.unparse(field.annotation)
            if kind in classes:
                groups.append((f"{key}.", kind))
            else:
                yield key, _default(field.value), _meaning(key, docstring)


def _default(value: ast.expr | None) -> str:
    """Return a default as on the command line; empty if there is none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "key":
        value = value.args[0]
    text = ast.unparse(value).strip("'") if value else "MISSING"
    shown = {"MISSING": "", "None": "null", "float('inf')": "inf", "True": "true", "False": "false"}
    return shown.get(text, text)


def _meaning(key: str, docstring: ast.stmt | None) -> str:
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        raise ValueError(f"{SCHEMA.name}: {key} has no docstring; add one under the field")
    return " ".join(str(docstring.value.value).split())


def table(schema: str) -> str:
    rows = [
        f"| `{key}` | {f'`{default}`' if default else ''} | {text} |"
        for key, default, text in documented_keys(schema)
    ]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def with_table(text: str, schema: str) -> str:
    """Return the text with the table of the keys of a schema."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(schema)}\n{END}{after}"


if __name__ == "__main__":
    TABLE.write_text(with_table(TABLE.read_text(), SCHEMA.read_text()))
