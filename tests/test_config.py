"""The configuration is typed, documented and complete; a value out of its range is named."""

import errno
import os
import signal
from itertools import zip_longest
from pathlib import Path

import pytest

from conf.check import check_batch_size
from conf.cli import explain
from conf.errors import UserError
from conf.files import write_atomically
from conf.schema import Config
from tests.helpers import REPOSITORY, make_config, refused
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
profile.steps | [5]; [0,0]; [1,2,3]; [] | [0,1]; null
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


@pytest.mark.parametrize("root", ["http://bobby:s3cret@host/p", "https://host/p?sig=s3cret"])
def test_an_address_with_a_password_is_refused_without_printing_it(root: str) -> None:
    with pytest.raises(UserError, match=r"data\.root .* environment") as error:
        make_config(f"data.root='{root}'")
    assert "s3cret" not in str(error.value)


def test_a_full_disk_is_told_with_the_file_and_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error, write_atomically(tmp_path / "run.json"):  # noqa: PT011
        raise OSError(errno.ENOSPC, "No space left on device")
    told = explain(error.value)
    assert told is not None
    assert str(tmp_path / "run.json") in told
    assert not list(tmp_path.iterdir())


def write_half(path: Path) -> None:
    """Begin to replace a file, and be killed."""
    with write_atomically(path) as temporary:
        temporary.write_text("ne")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_whose_writer_is_killed_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("old")
    assert join([start_process(write_half, path)]) == [-signal.SIGKILL]
    assert path.read_text() == "old"
    with write_atomically(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_batch_that_ranks_or_their_micro_batches_cannot_share_is_refused() -> None:
    with refused("global_batch_size=63 ", "world_size=2; use 62 or 64"):
        check_batch_size(63, world_size=2)
    with refused("world_size=2 times accumulate_steps=8; use 16"):
        check_batch_size(8, world_size=2, accumulate_steps=8)


def test_hydras_own_options_work_as_in_any_project(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "COMP_LINE", "python train.py loader=pyt")
    commands = {
        "--cfg job data=cells": "layout: cells",
        "--help": "experiment: ",
        "-sc query=bash": "loader=pytorch",
    }
    for options, shown in commands.items():
        assert shown in execute(["train.py", *options.split()], tmp_path / "prints")


@pytest.mark.parametrize(
    ("choices", "arch", "batch_size"),
    [
        ("data=mnist_mini", None, 64),
        ("data=imagefolder model=timm global_batch_size=8", "resnet50", 8),
        ("experiment=finetune model.arch=resnet34", "resnet34", 16),
        *rows(("data=table", "resnet18", 16), ("experiment=caltech256", "resnet50", 64)),
    ],
)
def test_photos_have_a_model_and_a_batch_size_of_their_own(
    choices: str, arch: str | None, batch_size: int
) -> None:
    cfg = filled(*choices.split())
    assert (cfg.model.arch, cfg.global_batch_size) == (arch, batch_size)


def test_every_file_of_every_group_fits_the_schema() -> None:
    files = list((REPOSITORY / "conf").glob("[a-z]*/*.yaml"))
    groups: dict[str, list[str]] = {file.parent.name: [] for file in files}
    for file in files:
        groups[file.parent.name].append(f"{file.parent.name}={file.stem}")
    # An experiment chooses from the other groups.
    for experiment in groups.pop("experiment", []):
        assert filled(experiment)
    for choices in zip_longest(*groups.values()):  # one of each at a time: it takes long
        assert filled(*filter(None, choices))
