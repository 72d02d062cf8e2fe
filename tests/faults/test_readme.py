"""The README's table of what happens when."""

import ast
import re

from tests.helpers import REPOSITORY


def test_every_row_names_a_test_that_exists() -> None:
    text = (REPOSITORY / "README.md").read_text()
    section = text.split("### What happens when ...")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for row in rows:
        [(path, name)] = re.findall(r"`([\w/]+\.py)::(\w+)` \|$", row)
        tree = ast.parse((REPOSITORY / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
