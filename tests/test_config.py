"""The configuration is typed, documented and complete; a value out of its range is named."""

import errno
import os
import re
import signal
import time
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import reference
from conf.check import check_batch_size, check_ranges, keys_of, owners_of_keys
from conf.cli import explain
from conf.files import write_atomically
from conf.schema import NAMED_BY, Config, own_classes
from tests.helpers import REPOSITORY, join, make_config, refused, start_process, wait_for
from tests.parts import rows_of

FILLED = ["data.root=somewhere", "model.name=small_cnn"]
CHOICES = [
    f"{group}={name}"
    for group in NAMED_BY
    for name in own_classes(group)
    if (REPOSITORY / "conf" / group / f"{name}.yaml").exists()
]
"""Layouts and loaders with keys of their own."""
KEYS = owners_of_keys()

RANGES = """
0 or more | -1 | 0
1 or more | 0 | 1
2 or more | 1 | 2
a number above 0 | 0.0, -0.1, .nan, .inf | 1.0e-9
a number above 0, or inf | 0.0, -1.0, .nan | 0.1, .inf
a number in [0, 1] | -0.1, 1.1, .nan | 0, 1
a number in [0, 1) | -0.1, 1.0 | 0, 0.9
a number in (0, 1) | 0, 1.0 | 0.1
a number in (0, 1] | 0, 1.01 | 0.01, 1
an int or [height, width] in pixels | 0, abc, true, [24], [24, 0] | 1, [24, 32]
one name or more, as [label] | [] | [a]
one number for each channel | [], [.nan] | [0.5]
one number above 0 for each channel | [], [0.0] | [0.5]
[0, 1] or [-1, 1], for example | [1, 0], [1], [0, .inf] | [-1, 1]
[low, high] with 0 < low <= high | [2, 1], [0, 1] | [1, 1]
[low, high] with 0 < low <= high <= 1 | 0.5, [0.5], [0, 1], [0.5, 1.1] | [0.1, 1]
[probability, low, high] with 0 < low <= high pixels | [0.5], [1.1, 1, 2], [1, 0, 2] | [1, 1, 1]
three ints from 0 to 255 | [1, 2], [0, 0, 256], [0, -1, 0], [0.5, 0, 0] | [0, 255, 1]
an int from -32768 to 65535 | -32769, 65536 | -32768, 65535
three numbers in [0, 1] | [1, 2], [0, 0, 1.1] | [0, 0, 1]
[operations, magnitude] with 1 to 4 and 0 to 30 | [5, 9], [0, 9], [2, 31] | [1, 30], [4, 0]
0 to 180 degrees | -1, 181 | 0, 180
0 or more, or auto | -1, two | 0, auto
1 or more, or auto | 0, 1.5, true, two | 1, auto
[skip, record] with 0 or more and 1 or more | [5], [0, 0], [-1, 2], [1, 2, 3], [] | [0, 1]
a folder below data.root, without .. | /a, ../a, a/.. | a, a/b, .
auto, cpu, cuda or cuda:1 | tpu, cuda:x | auto, cpu, cuda, cuda:1
0 to 2**63 - 1 | -1, 9223372036854775808 | 0, 9223372036854775807
"""
"""Of each kind of range: values that are refused, and those at the edges that are not."""
ROWS = [line.split(" | ") for line in RANGES.strip().splitlines()]
VALUES = {kind: [yaml.safe_load(f"[{cell}]") for cell in cells] for kind, *cells in ROWS}


def filled(*choices: str) -> Config:
    return make_config(*choices, *FILLED)


@pytest.mark.parametrize("choice", ["data=imagefolder", *CHOICES])
def test_a_value_out_of_its_range_is_named(choice: str) -> None:
    cfg = filled(choice)
    fields = {key: field for key, field in keys_of(cfg) if field.metadata.get("allowed")}
    ranges = fields if choice not in CHOICES else {k: fields[k] for k in fields if KEYS[k]}
    for key, field in ranges.items():
        description = field.metadata["allowed"].description
        names = re.split(", | or ", description)
        wrong, accepted = VALUES.get(description, (["".join(names)], names))  # else one of these
        group, _, name = key.rpartition(".")
        place = attrgetter(group)(cfg) if group else cfg
        before = getattr(place, name)
        for value in accepted + [None] * (field.default is None):
            setattr(place, name, value)
            check_ranges(cfg)
        for value in wrong:
            setattr(place, name, value)
            with refused(f"{key}={value} "):
                check_ranges(cfg)
        setattr(place, name, before)


def test_a_home_folder_that_no_command_line_gave_is_refused() -> None:
    with refused("resume=~/run:", str(Path.home())):
        make_config("resume='~/run'")


def test_a_full_disk_is_told_with_the_file_and_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error, write_atomically(tmp_path / "run.json"):  # noqa: PT011
        raise OSError(errno.ENOSPC, "No space left on device")
    told = explain(error.value)
    assert told is not None
    assert str(tmp_path / "run.json") in told
    assert not list(tmp_path.iterdir())


def write_and_wait(path: Path, text: str, goes_on: Path | None) -> None:
    """Write a file until there is another one; without it, until this process is killed."""
    with write_atomically(path) as temporary:
        temporary.write_text(text)
        path.with_name(text).touch()
        if goes_on is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            wait_for(goes_on.exists, str(goes_on))


def test_a_file_of_a_writer_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """One that another process is writing stays, unless it has not written for more than a day."""
    path, goes_on, folder = tmp_path / "p" / "p.csv", tmp_path / "goes on", tmp_path / "p"
    folder.mkdir()
    writing = start_process(write_and_wait, path, "mine", goes_on)
    wait_for((folder / "mine").exists, "the writer")
    [unfinished] = [file for file in folder.iterdir() if file.name != "mine"]
    assert join([start_process(write_and_wait, path, "dead", None)]) == [-signal.SIGKILL]
    assert len(list(folder.iterdir())) == 4  # two names of texts, two parts of files
    with write_atomically(path) as own:
        own.write_text("new")
    assert {file.name for file in folder.iterdir()} == {"mine", "dead", "p.csv", unfinished.name}
    goes_on.touch()
    assert join([writing]) == [0]
    assert path.read_text() == "mine"

    old = tmp_path / "q" / own.name  # of a process that lives
    old.parent.mkdir()
    old.touch()
    os.utime(old, (0, time.time() - 90000))
    with write_atomically(old.with_name("q.csv")) as temporary:
        temporary.write_text("new")
    assert [file.name for file in old.parent.iterdir()] == ["q.csv"]


def test_a_batch_that_ranks_or_their_micro_batches_cannot_share_is_refused() -> None:
    with refused("global_batch_size=63 ", "world_size=2; use 62 or 64"):
        check_batch_size(63, world_size=2)
    with refused("world_size=2 times accumulate_steps=8; use 16"):
        check_batch_size(8, world_size=2, accumulate_steps=8)


def test_every_key_is_on_a_page_of_those_that_have_it() -> None:
    texts = {page: page.read_text() for page in reference.pages()}
    for page, text in texts.items():
        assert text == reference.with_table(page), f"{page}: run python -m conf.reference"
    of_all = texts.pop(reference.TABLE)
    assert "| `optimizer.weight_decay` | `0.0` |" in of_all
    for key, owners in KEYS.items():
        assert (f"| `{key}` |" in of_all) == (not owners), key
        assert not owners or any(f"| `{key}` |" in text for text in texts.values()), key


def test_a_key_of_another_layout_or_loader_is_refused_with_those_that_have_it() -> None:
    owned = {key: owners for key, owners in KEYS.items() if owners}
    for override in [*owned, *(f"+{key}" for key in list(owned)[:1])]:
        with pytest.raises((HydraException, OmegaConfBaseException)) as error:
            make_config("data=imagefolder", f"{override}=1")
        key, told = override.lstrip("+"), explain(error.value)
        assert told is not None
        assert f"{key} is a key of {KEYS[key][0]}" in told


@pytest.mark.parametrize("name", own_classes("data"))
def test_a_layout_that_is_chosen_by_its_name_alone_has_its_keys(name: str) -> None:
    cfg = make_config("data=mnist_mini", f"data.layout={name}")
    assert type(cfg.data) is own_classes("data")[name]


@pytest.mark.parametrize(
    ("choices", "arch", "batch_size", "shares"),
    [
        ("data=imagefolder", "resnet18", 16, [0.35, 1]),
        ("data=imagefolder model=timm global_batch_size=8", "resnet50", 8, [0.35, 1]),
        ("data=imagefolder model=small_cnn data.random_resized_crop=null", None, 16, None),
        ("experiment=finetune", "resnet50", 16, [0.35, 1]),
        ("experiment=finetune model.arch=resnet34", "resnet34", 16, [0.35, 1]),
        ("data=mnist_mini", None, 64, None),
        *rows_of("PHOTOS"),
    ],
)
def test_photos_have_a_model_and_a_batch_size_of_their_own(
    choices: str, arch: str | None, batch_size: int, shares: list[float] | None
) -> None:
    cfg = filled(*choices.split())
    assert (cfg.model.arch, cfg.global_batch_size) == (arch, batch_size)
    assert cfg.data.random_resized_crop == shares


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
