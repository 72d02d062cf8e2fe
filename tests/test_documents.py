"""The table of what happens when."""

import ast
import re

from tests.helpers import REPOSITORY


def test_every_row_names_a_test_that_exists() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for row in rows:
        [(path, name)] = re.findall(r"`([\w/]+\.py)::(\w+)` \|$", row)
        tree = ast.parse((REPOSITORY / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    for document in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]:
        links = re.findall(r"\]\(([^)#:]+)[^):]*\)", document.read_text())
        for link in links:
            assert (document.parent / link).exists(), f"{document.name}: {link}"
