"""Each part alone is left out of a project: `make test-parts`, up to half an hour on two cores."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import rendezvous
from template.parts import with_needs
from tests.helpers import FORKSERVER, LIMIT_S, free_port, run_all
from tests.test_parts import PARTS, problems
from tests.test_project import clone_template, made
from tests.torchrun import TWO_RANKS, torchrun


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.mark.parametrize("part", PARTS)
def test_a_project_without_a_part_is_whole_and_trains(
    part: str, template: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two steps, by each launcher that is left."""
    names = " ".join(x for x in PARTS if part not in with_needs(["core", x])) or "core"
    names = "own" if part == "images" else names
    project = tmp_path / "project"
    made(template, project, names)
    found = problems(project, template, names)
    cache = tmp_path_factory.getbasetemp() / "mypy"  # most files are equal in all projects
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(cache)]
    found += [subprocess.run(mypy, cwd=project, capture_output=True, text=True).stdout]
    assert re.fullmatch(r"Success: no issues .*\n", "\n".join(found)), "\n".join(found)

    steps = ["max_steps=2", "log.images=0"]
    run_all([["train.py", *steps, f"output_dir={tmp_path / 'alone'}"]], tmp_path, 1, project)
    if not (project / "train_ddp.py").exists():
        return
    launchers = {"torchrun": TWO_RANKS}
    if (project / "launch" / "elastic_torchrun.py").exists():
        port = str(free_port())
        place = FORKSERVER.Process(target=rendezvous.main, args=([port],), daemon=True)
        place.start()
        elastic = ["--nnodes=1:1", "--nproc_per_node=2", f"--rdzv_endpoint=127.0.0.1:{port}"]
        launchers["elastic"] = [*elastic, "--rdzv_id=test", "--local_addr=127.0.0.1"]
    for name, launcher in launchers.items():
        prints, run = tmp_path / f"{name}.txt", tmp_path / name
        command = [*launcher, "train_ddp.py", *steps, f"output_dir={run}"]
        process = torchrun(command, project, prints, is_elastic=name == "elastic")
        process.join(LIMIT_S)
        assert process.exitcode == 0, prints.read_text()
        assert (run / "checkpoints" / "last.pt").exists()
