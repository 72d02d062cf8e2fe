"""AGENTS.md names paths that exist and commands that pass."""

import os
import re
import shlex
import subprocess
import sys
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
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", BLOCK.splitlines())
def test_every_command_passes(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "python":
        run_all([[*arguments, f"output_dir={tmp_path / 'run'}"]], tmp_path)
        return
    env = dict(os.environ)
    if arguments == ["test"]:  # all tests would run this one
        env["PYTEST_ADDOPTS"] = "--collect-only --quiet"
    installed = [f"BIN={Path(sys.executable).parent}", "--old-file=.venv/ready"]
    subprocess.run(["make", *installed, *arguments], cwd=REPOSITORY, env=env, check=True)
