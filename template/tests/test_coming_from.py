"""docs/coming_from.md names files, settings and lines of scripts that exist."""

import re

from conf.cli import load_config
from tests.helpers import REPOSITORY
from tests.test_architecture import rows_of

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text()
SHOWN = [*REPOSITORY.glob("train*.py"), *(REPOSITORY / "tasks").rglob("*.py")]
SHOWN += [REPOSITORY / "runtime/checkpoint.py"]


def test_what_the_page_for_users_of_other_frameworks_names_exists() -> None:
    rows = rows_of(PAGE, "Coming from Lightning, accelerate or timm")
    named = [code for *_, here in rows for code in re.findall("`(.*?)`", here)]
    assert len(named) > len(rows) > 20
    code = "".join(path.read_text() for path in SHOWN)
    for name in named:
        if re.match(r"[\w.]+=", name):
            load_config([name])
        else:
            path = REPOSITORY / name.removeprefix("python ").partition(" ")[0]
            assert path.exists() or name.removesuffix(")") in code, name
