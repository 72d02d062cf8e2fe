"""Projects of some parts, tested as their owners do.

`make test-projects`: their own tests. `make test-parts`, up to half an hour on two cores: each part
alone is left out.
"""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from launch import rendezvous
from template.parts import with_needs
from template.tests.test_parts import PARTS, SETS, problems
from template.tests.test_project import clone_template, made
from tests.helpers import free_port, run_all, start_process
from tests.torchrun import TWO_RANKS, Torchrun

OF_THE_DAY = SETS[1 + date.today().toordinal() % (len(SETS) - 1)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["core", OF_THE_DAY])
def test_the_tests_of_a_project_pass(names: str, template: Path, tmp_path: Path) -> None:
    print(made(template, tmp_path / "project", names), names, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "8"]
    command += ["--dist", "loadfile", "-m", "not slow"]
    subprocess.run(command, cwd=tmp_path / "project", check=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_project_without_a_part_is_whole_and_trains(
    part: str, template: Path, tmp_path: Path
) -> None:
    """Two steps, by each launcher that is left."""
    names = " ".join(x for x in PARTS if part not in with_needs(["core", x])) or "core"
    names = "own" if part == "images" else names
    project = tmp_path / "project"
    made(template, project, names)
    assert not problems(project, template, with_packages=True)

    steps = ["max_steps=2", "log.images=0"]
    run_all([["train.py", *steps, f"output_dir={tmp_path / 'alone'}"]], tmp_path, 1, project)
    if not (project / "train_ddp.py").exists():
        return
    launchers = {"torchrun": TWO_RANKS}
    if (project / "launch" / "elastic_torchrun.py").exists():
        port = str(free_port())
        start_process(rendezvous.main, [port])
        elastic = ["--nnodes=1:1", "--nproc_per_node=2", f"--rdzv_endpoint=127.0.0.1:{port}"]
        launchers["elastic"] = [*elastic, "--rdzv_id=test", "--local_addr=127.0.0.1"]
    for name, launcher in launchers.items():
        prints, run = tmp_path / f"{name}.txt", tmp_path / name
        command = [*launcher, "train_ddp.py", *steps, f"output_dir={run}"]
        with Torchrun(command, project, prints, is_elastic=name == "elastic") as torchrun:
            assert torchrun.wait() == 0, torchrun.text()
        assert (run / "checkpoints" / "last.pt").exists()
