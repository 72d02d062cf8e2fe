"""AGENTS.md names paths and commands that exist."""

import re
import shlex
import subprocess

import pytest

from tests.helpers import REPOSITORY

PAGE = (REPOSITORY / "AGENTS.md").read_text()
[BLOCK] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = BLOCK.splitlines() + re.findall(r"`(python -m .*?)`", PAGE)


def test_every_path_exists() -> None:
    names = re.findall(r"`([\w./*]*[./][\w./*]*)`", PAGE)
    assert len(names) > 15
    for name in names:
        assert [*REPOSITORY.glob(name), *REPOSITORY.glob(f"*/{name}")], name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":  # what it runs is tested by itself
        subprocess.run(["make", "--dry-run", *arguments], cwd=REPOSITORY, check=True)
    else:
        assert (REPOSITORY / arguments[1].replace(".", "/")).with_suffix(".py").exists()
