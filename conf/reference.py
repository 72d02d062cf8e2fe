"""Writes the table of configuration keys from `schema.py`: `python -m conf.reference`."""

import ast
from collections.abc import Iterator
from pathlib import Path

SCHEMA = Path(__file__).with_name("schema.py")
TABLE = SCHEMA.parents[1] / "docs" / "configuration.md"
START, END = "<!-- configuration keys -->", "<!-- end of configuration keys -->"


def documented_keys() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every key, in the order of the schema; groups after the top level."""
    classes = {
        node.name: node.body
        for node in ast.parse(SCHEMA.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    groups = []
    for field, docstring in zip(classes["Config"], [*classes["Config"][1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
        if kind in classes:
            groups.append((name, classes[kind]))
        else:
            yield _row(name, field, docstring)
    for group, body in groups:
        for field, docstring in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                yield _row(f"{group}.{ast.unparse(field.target)}", field, docstring)


def _row(key: str, field: ast.AnnAssign, docstring: ast.stmt | None) -> tuple[str, str, str]:
    if not (isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)):
        raise ValueError(f"{SCHEMA.name}: {key} has no docstring; add one under the field")
    default = ast.unparse(field.value) if field.value else ""
    default = default.removeprefix("field(default_factory=lambda: ").removesuffix(")")
    default = {
        "MISSING": "",
        "None": "null",
        "float('inf'": "inf",
        "field(default_factory=dict": "{}",
    }.get(default, default)
    return key, default.strip("'"), " ".join(str(docstring.value.value).split())


def table() -> str:
    rows = [
        f"| `{key}` | {f'`{default}`' if default else ''} | {text} |"
        for key, default, text in documented_keys()
    ]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def with_table(text: str) -> str:
    """The text with its table up to date."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    TABLE.write_text(with_table(TABLE.read_text()))
