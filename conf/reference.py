"""Generator of the table in docs/configuration.md from the files of this folder: `python -m
conf.reference`."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

CONF = Path(__file__).parent
TABLE = CONF.parent / "docs" / "configuration.md"
ENTRY = re.compile(r"^(\w+): ?(.*)\n((?:  .*\n)*)", re.MULTILINE)
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
        raise ValueError(f"schema.py: {key} has no docstring; add one under the field")
    return " ".join(str(docstring.value.value).split())


def _values_of(file: Path) -> dict[str, str]:
    """Return the values that a file of a group sets, such as conf/data/pairs.yaml, whose lines are
    `key: value` or `key:` followed by such lines, indented."""
    values: dict[str, str] = {}
    for key, value, below in ENTRY.findall(file.read_text()):
        if key == "defaults":
            for parent in value.strip("[]").split(", "):
                values |= _values_of(file.with_name(f"{parent}.yaml")) if parent != "schema" else {}
        else:
            lines = ",".join(line.strip() for line in below.splitlines())
            values[key] = (value or f"{{{lines}}}").replace(" ", "")
    return values


@cache
def _defaults_of_group(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return, by key, the values that the files of a group set, and the names of these files."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob("*.yaml")):
        for key, value in _values_of(file).items():
            if value != file.stem:  # the name itself
                found.setdefault(key, {}).setdefault(value, []).append(file.stem)
    return found


def table(conf: Path) -> str:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, default, text in documented_keys((conf / "schema.py").read_text()):
        group, _, name = key.rpartition(".")
        of_group = _defaults_of_group(conf / group).get(name, {}) if group else {}
        values = [f"`{default}`"] if default else []
        values += [f"`{value}` ({', '.join(files)})" for value, files in of_group.items()]
        rows.append(f"| `{key}` | {'; '.join(values)} | {text} |")
    return "\n".join(rows)


def with_table(text: str, conf: Path) -> str:
    """Return the text with the table of the keys of a folder like this one."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table(conf)}\n{END}{after}"


if __name__ == "__main__":
    TABLE.write_text(with_table(TABLE.read_text(), CONF))
