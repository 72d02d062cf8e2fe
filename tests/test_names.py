"""A name in the configuration is a file, which is imported when it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import models
from conf import errors
from conf.cli import explain
from conf.names import find
from tests.helpers import REPOSITORY, refused
from tests.images import FOLDERS, make_photos, reading
from tests.processes import ENVIRONMENT

PROGRAM = """
import runpy, sys
sys.argv, sys.path[0] = sys.argv[1:], "."
runpy.run_path(sys.argv[0], run_name="__main__")
print(*sys.modules)
"""


def test_an_own_file_is_found_and_told_what_it_lacks(tmp_path, monkeypatch) -> None:
    texts = {"my_net": "class MyNet: ...", "two": "class Two: ...\ndef two(): ...", "none": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    found = [find("models", name, "model.name") for name in ("my_net", "two")]
    assert [each.__name__ for each in found] == ["MyNet", "two"]
    wrong = {"none": "class None", "mine": "two", "../tasks": "small_cnn"}
    for name, shown in (wrong | {"pretrained": "small_cnn"}).items():
        with refused(f"model.name={name}", shown):
            find("models", name, "model.name")


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("pyarrow.csv", "make setup EXTRAS=table"),
        ("nvidia.dali", "make setup EXTRAS=dali"),
        ("far", "pip install far"),
    ],
)
def test_a_package_that_is_not_installed_is_told_with_the_command_that_installs_it(
    package: str, fix: str, monkeypatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", {"models": "it is there"}.get)
    assert fix in str(explain(ModuleNotFoundError(name=package)))
    assert explain(ModuleNotFoundError(name="models.no_such_file")) is None  # a bug


def test_a_run_on_local_photos_imports_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    options = [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]
    options += ["data.resize=32", "data.crop=28", "global_batch_size=2", "max_steps=1"]
    command = [sys.executable, "-c", PROGRAM, "train.py", *options, f"output_dir={tmp_path}/run"]
    env = {**os.environ, **ENVIRONMENT}
    printed = subprocess.check_output(command, cwd=REPOSITORY, env=env, text=True)
    imported = set(printed.splitlines()[-1].split())
    assert "loaders.layouts.imagefolder" in imported
    assert not imported & {"timm", "torchvision", "nvidia.dali", "pyarrow", "obstore"}
