"""A name in the configuration is a file, which is imported when it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import models
from conf.errors import UserError
from conf.names import find, names_in
from tests.helpers import ENVIRONMENT, REPOSITORY, refused
from tests.images import FOLDERS, make_photos, reading
from tests.test_architecture import FOLDERS_OF_PARTS, imports_of

FORMS = {"models": "{}", "tasks": "{}", "runtime.loggers": "{}Logger"}
FORMS |= {"loaders.backends": "{}Loader"}
PACKAGES = [*FORMS, "loaders.layouts"]
USED = {
    *("models.small_cnn", "tasks.classification", "runtime.loggers.tensorboard"),
    *("loaders.backends.pytorch", "loaders.layouts.imagefolder"),
}
NEVER = {"timm", "torchvision", *(folder.replace("/", ".") for folder in FOLDERS_OF_PARTS)}
"""Modules that training on local photos does not need."""
PROGRAM = """
import runpy, sys
sys.argv, sys.path[0] = sys.argv[1:], "."
runpy.run_path(sys.argv[0], run_name="__main__")
print(*sys.modules)
"""


@pytest.mark.parametrize("package", FORMS)
def test_every_name_that_is_listed_can_be_used(package: str) -> None:
    for name in names_in(package):
        try:
            assert callable(find(package, name, "key", FORMS[package]))
        except UserError as error:
            assert "pip install" in str(error)  # noqa: PT017


def test_an_own_file_is_found_and_told_what_it_lacks(tmp_path, monkeypatch) -> None:
    texts = {"my_net": "class MyNet: ...", "two": "class Two: ...\ndef two(): ...", "none": ""}
    texts |= {"far": "import no_such_package", "near": "import models.no_such_file"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    found = [find("models", name, "model.name") for name in ("my_net", "two")]
    assert [each.__name__ for each in found] == ["MyNet", "two"]
    wrong = {"none": "class None", "far": "pip install no_such_package", "mine": "two"}
    for name in ("__init__", "../tasks", "pretrained", "pretrained.weights", ""):
        wrong[name] = "small_cnn"
    for name, shown in wrong.items():
        with refused(f"model.name={name}", shown):
            find("models", name, "model.name")
    with pytest.raises(ModuleNotFoundError, match="no_such_file"):
        find("models", "near", "model.name")


def test_a_run_on_local_photos_imports_only_what_it_uses(tmp_path: Path) -> None:
    options = [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]
    options += ["data.resize=32", "data.crop=28", "global_batch_size=2", "max_steps=1"]
    command = [sys.executable, "-c", PROGRAM, "train.py", *options, f"output_dir={tmp_path}/run"]
    env = {**os.environ, **ENVIRONMENT}
    printed = subprocess.check_output(command, cwd=REPOSITORY, env=env, text=True)
    imported = set(printed.splitlines()[-1].split())
    named = {f"{package}.{name}" for package in PACKAGES for name in names_in(package)}
    assert imported & named == USED
    assert not imported & NEVER - imports_of("train")  # which techniques are merged into
