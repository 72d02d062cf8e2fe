"""The page that compares lines of plain/ with the template's names lines of the script."""

import re

from tests.helpers import REPOSITORY
from tests.test_architecture import rows_of


def test_the_page_names_lines_of_the_script() -> None:
    page = (REPOSITORY / "docs" / "plain_and_template.md").read_text()
    rows = rows_of(page, "What the template puts in place of plain lines")
    text = (REPOSITORY / "plain" / "train_ddp_amp.py").read_text()
    assert len(rows) >= 5
    for line, *_ in rows:
        for quoted in re.findall("`([^`]+)`", line):
            assert quoted in text, quoted
