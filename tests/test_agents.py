"""AGENTS.md names paths that exist and commands that pass; `make ci` runs what make's do."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, run_all

PAGE = (REPOSITORY / "AGENTS.md").read_text()
[BLOCK] = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def test_every_path_exists() -> None:
    names = re.findall(r"`([\w.]+/[\w./]*)`", PAGE)
    assert len(names) > 4
    for name in names:
        assert (REPOSITORY / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("command", BLOCK.splitlines())
def test_every_command_passes(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "python":
        run_all([[*arguments, f"output_dir={tmp_path / 'run'}"]], tmp_path)
        return
    subprocess.run(["make", "--dry-run", *arguments], cwd=REPOSITORY, check=True)
