"""The configuration is typed, documented and complete, and a name in it is a file."""

import errno
import os
import re
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

import models
from conf import errors
from conf.check import check_batch_size
from conf.cli import explain
from conf.errors import UserError
from conf.files import write_atomically
from conf.names import find
from conf.schema import Config
from tests.helpers import REPOSITORY, make_config, refused
from tests.images import FOLDERS, make_photos, reading
from tests.processes import ENVIRONMENT, execute, join, start_process
from tests.rows import rows

FILLED = ["data.root=somewhere", "model.name=small_cnn"]

RANGES = """
optimizer.weight_decay | -1; nan | 0
epochs | 0 | 1
data.num_folds | 1 |
optimizer.lr | 0.0; -0.1; nan | 1.0e-9; inf
data.hflip | -0.1; 1.1; nan | 0; 1
ema.decay | -0.1; 1.0 | 0; 0.9
data.val_fraction | 0; 1.0 | 0.1
optimizer.layer_decay | 0; 1.01 | 0.01; 1
data.crop | 0; abc; true; [24]; [24,0] | 1; [24,32]; null
data.value_range | [1,0]; [1] | [-1,1]
data.std | [0.0]; [0.5,-1]; [nan] | [0.5]; null
data.random_scale | [2,1]; [0,1] | [1,1]
data.random_resized_crop | 0.5; [0.5]; [0,1]; [0.5,1.1] | [0.1,1]
data.background | [1,2]; [0,0,256]; [0,-1,0] | [0,255,1]
data.colour_jitter | [1,2]; [0,0,1.1] | [0,0,1]
data.randaugment | 2; [2]; [2,31] | [1,30]
accumulate_steps | 0; 1.5; true; two | 1; auto
profile.steps | [5]; [0,0]; [-1,5]; [1,2,3]; [] | [0,1]; null
device | tpu; cuda:x | auto; cpu; cuda; cuda:1
optimizer.schedule | cosinus | step
"""
"""Of keys with each kind of range: values that are refused, and those that are not."""


def filled(*choices: str) -> Config:
    return make_config(*choices, *FILLED)


def test_a_value_out_of_its_range_is_named() -> None:
    for line in RANGES.strip().splitlines():
        key, wrong, right = line.split(" |")
        for value in filter(None, right.split(";")):
            make_config(f"{key}={value.strip()}")
        for value in wrong.split(";"):
            with refused(f"{key}="):
                make_config(f"{key}={value.strip()}")
    with refused("global_batch_size=63 ", "world_size=2; use 62 or 64"):
        check_batch_size(63, world_size=2)
    with refused("world_size=2 times accumulate_steps=8; use 16"):
        check_batch_size(8, world_size=2, accumulate_steps=8)
    with refused("divisible by accumulate_steps=3; use 6 or 9"):
        check_batch_size(8, world_size=1, accumulate_steps=3)


@pytest.mark.parametrize("root", ["http://bobby:s3cret@host/p", "https://host/p?sig=s3cret"])
def test_an_address_with_a_password_is_refused_without_printing_it(root: str) -> None:
    with pytest.raises(UserError, match=r"data\.root .* environment") as error:
        make_config(f"data.root='{root}'")
    assert "s3cret" not in str(error.value)


def replace_and_be_killed(path: Path) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text("ne")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_stays_as_it_was_on_a_full_disk_and_when_its_writer_is_killed(tmp_path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("old")
    with pytest.raises(OSError) as error, write_atomically(path):  # noqa: PT011
        raise OSError(errno.ENOSPC, "No space left on device")
    assert re.search(rf"{path}: No space .*\(\w+\.py:\d+\)", str(explain(error.value)))
    assert list(tmp_path.iterdir()) == [path]
    assert join([start_process(replace_and_be_killed, path)]) == [-signal.SIGKILL]
    assert path.read_text() == "old"
    # Of two that write at once, the last one writes it whole.
    with pytest.raises(OSError, match="No such file"), write_atomically(path) as temporary:
        temporary.write_text("one")
        with write_atomically(path) as other:
            other.write_text("two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_hydras_own_options_work_as_in_any_project(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "COMP_LINE", "python train.py loader=pyt")
    commands = {
        "--cfg job data=cells": "layout: cells",
        "--help": "experiment: ",
        "-sc query=bash": "loader=pytorch",
    }
    for options, shown in commands.items():
        assert shown in execute(["train.py", *options.split()], tmp_path / "prints")


def test_photos_have_a_model_and_a_batch_size_of_their_own() -> None:
    for choices, arch, batch_size in [
        ("data=mnist_mini", None, 64),
        ("data=imagefolder model=timm global_batch_size=8", "resnet50", 8),
        ("experiment=finetune model.arch=resnet34", "resnet34", 16),
        *rows(("data=table", "resnet18", 16), ("experiment=caltech256", "resnet50", 64)),
    ]:
        cfg = filled(*choices.split())
        assert (cfg.model.arch, cfg.global_batch_size) == (arch, batch_size), choices


def test_every_file_of_every_group_fits_the_schema() -> None:
    groups: dict[str, list[str]] = {}
    for file in (REPOSITORY / "conf").glob("[a-z]*/*.yaml"):
        groups.setdefault(file.parent.name, []).append(f"{file.parent.name}={file.stem}")
    # An experiment chooses from the other groups.
    for experiment in groups.pop("experiment", []):
        assert filled(experiment)
    for choices in zip_longest(*groups.values()):  # one of each at a time: it takes long
        assert filled(*filter(None, choices))


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
    ("text", "is_memory"),
    [
        ("DataLoader worker (pid(s) 7) exited unexpectedly", True),
        ("Caught ConnectionResetError in pin memory thread for device 0.\nOriginal", True),
        ("<urlopen error [Errno 104] Connection reset by peer>", False),
    ],
)
def test_a_worker_that_was_killed_had_no_memory_but_not_a_server(text, is_memory) -> None:
    said = errors.cause_of(RuntimeError(text)) or ""
    assert ("loader.num_workers" in said) == is_memory


def test_a_package_that_is_not_installed_is_told_with_the_command_that_installs_it(
    monkeypatch,
) -> None:
    monkeypatch.setattr(errors, "find_spec", {"models": "it is there"}.get)
    commands = {
        "pyarrow.csv": "make setup EXTRAS=table",
        "nvidia.dali": "make setup EXTRAS=dali",
        "far": "pip install far",
    }
    for package, command in commands.items():
        assert command in str(explain(ModuleNotFoundError(name=package)))
    assert explain(ModuleNotFoundError(name="models.no_such_file")) is None  # a bug


PROGRAM = """
import runpy, sys
sys.argv, sys.path[0] = sys.argv[1:], "."
runpy.run_path(sys.argv[0], run_name="__main__")
print(*sys.modules)
"""


def test_a_run_on_local_photos_imports_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    options = [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]
    options += ["data.resize=32", "data.crop=28", "global_batch_size=2", "max_steps=1"]
    command = [sys.executable, "-c", PROGRAM, "train.py", *options, f"output_dir={tmp_path}/run"]
    env = {**os.environ, **ENVIRONMENT}
    printed = subprocess.check_output(command, cwd=REPOSITORY, env=env, text=True)
    imported = set(printed.splitlines()[-1].split())
    assert "loaders.layouts.imagefolder" in imported
    assert not imported & {"timm", "torchvision", "nvidia.dali", "pyarrow", "obstore"}
