"""Each script differs from `train.py` in marked places only."""

import shutil
from pathlib import Path

import pytest

from conf.errors import UserError
from tests.helpers import REPOSITORY, commit, replace
from tools.compose import compose, find_techniques


@pytest.mark.parametrize("technique", sorted(find_techniques()))
def test_a_scripts_differences_are_marked(technique: str, tmp_path: Path) -> None:
    compose([technique])
    for script in ("train.py", f"train_{technique}.py"):
        shutil.copy(REPOSITORY / script, tmp_path)
    commit(tmp_path)
    replace(tmp_path / f"train_{technique}.py", "    run.finish()\n", "    run.finish()\n    ...\n")
    with pytest.raises(UserError, match=f"train_{technique}.py has an unmarked difference"):
        compose([technique], folder=tmp_path)
