"""Generator of the table in docs/configuration.md from the files of this folder: `python -m
conf.reference`."""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONF = Path(__file__).parent
TABLE = CONF.parent / "docs" / "configuration.md"
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


def _values_of(file: Path) -> dict[str, Any]:
    """Return the values that a file of a group sets, such as conf/data/pairs.yaml."""
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    parents = [file.with_name(f"{name}.yaml") for name in values.pop("defaults")]
    inherited = [_values_of(parent) for parent in parents if parent.stem != "schema"]
    return {key: value for one in (*inherited, values) for key, value in one.items()}


@cache
def _defaults_of_group(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return, by key, the values that the files of a group set, and the names of these files."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.glob("*.yaml")):
        for key, value in _values_of(file).items():
            text = str(value).replace("'", "").replace(" ", "")
            text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
            if text != file.stem:  # the name itself
                found.setdefault(key, {}).setdefault(text, []).append(file.stem)
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
