"""The configuration is typed, documented and complete; a value out of its range is named."""

import errno
import re
from itertools import zip_longest
from math import inf, nan
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from conf import reference
from conf.check import check_batch_size, check_ranges, keys_of
from conf.cli import explain
from conf.files import write_atomically
from tests.helpers import REPOSITORY, make_config, refused

FILLED = ["data.root=somewhere", "model.name=small_cnn"]
FILLED += ["loader.pack=a_pack"]  # part: packed

# Of each kind of range: values that are refused, and those at the edges that are not.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "0 or more": ([-1], [0]),
    "1 or more": ([0], [1]),
    "2 or more": ([1], [2]),
    "a number above 0": ([0.0, -0.1, nan, inf], [1e-9]),
    "a number above 0, or inf": ([0.0, -1.0, nan], [0.1, inf]),
    "a number in [0, 1]": ([-0.1, 1.1, nan], [0, 1]),
    "a number in [0, 1)": ([-0.1, 1.0], [0, 0.9]),
    "a number in (0, 1)": ([0, 1.0], [0.1]),
    "an int or [height, width] in pixels": ([0, "abc", True, [24], [24, 0]], [1, [24, 32]]),
    "one name or more, as [label]": ([[]], [["a"]]),
    "one number for each channel": ([[], [nan]], [[0.5]]),
    "one number above 0 for each channel": ([[], [0.0]], [[0.5]]),
    "[0, 1] or [-1, 1], for example": ([[1, 0], [1], [0, inf]], [[-1, 1]]),
    "[low, high] with 0 < low <= high": ([[2, 1], [0, 1]], [[1, 1]]),
    "[low, high] with 0 < low <= high <= 1": ([0.5, [0.5], [0, 1], [0.5, 1.1]], [[0.1, 1]]),
    "[probability, low, high] with 0 < low <= high pixels": (
        *([[0.5], [1.1, 1, 2], [1, 0, 2]], [[1, 1, 1]]),
    ),
    "three numbers in [0, 1]": ([[1, 2], [0, 0, 1.1]], [[0, 0, 1]]),
    "[operations, magnitude] with 1 to 4 and 0 to 30": (
        *([[5, 9], [0, 9], [2, 31]], [[1, 30], [4, 0]]),
    ),
    "0 to 180 degrees": ([-1, 181], [0, 180]),
    "0 or more, or auto": ([-1, "two"], [0, "auto"]),
    "[skip, record] with 0 or more and 1 or more": (
        *([[5], [0, 0], [-1, 2], [1, 2, 3], []], [[0, 1]]),
    ),
    "a folder below data.root, without ..": (["/a", "../a", "a/.."], ["a", "a/b", "."]),
    "auto, cpu, cuda or cuda:1": (["tpu", "cuda:x"], ["auto", "cpu", "cuda", "cuda:1"]),
    "0 to 2**63 - 1": ([-1, 2**63], [0, 2**63 - 1]),
}


def test_a_value_out_of_its_range_is_named() -> None:
    cfg = make_config()
    ranges = {key: field for key, field in keys_of() if field.metadata.get("allowed")}
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


def test_a_batch_that_ranks_or_their_micro_batches_cannot_share_is_refused() -> None:  # part: ranks
    with refused("global_batch_size=63 ", "world_size=2; use 62 or 64"):
        check_batch_size(63, world_size=2)
    with refused("world_size=2 times accumulate_steps=8; use 16"):  # part: accumulate
        check_batch_size(8, world_size=2, accumulate_steps=8)


def test_every_key_is_documented_and_in_the_table() -> None:
    schema = (reference.CONF / "schema.py").read_text()
    documented = {key for key, _, _ in reference.documented_keys(schema)}
    assert dict(keys_of()).keys() <= documented
    text = reference.TABLE.read_text()
    assert text == reference.with_table(text, reference.CONF), "run python -m conf.reference"
    assert "| `optimizer.weight_decay` | `0.0`; `0.01` (adamw)" in text


def test_every_file_of_every_group_fits_the_schema() -> None:
    groups = [list(folder.glob("*.yaml")) for folder in (REPOSITORY / "conf").iterdir()]
    for files in zip_longest(*groups):  # one of each group at a time: it takes long
        assert make_config(*(f"{path.parent.name}={path.stem}" for path in files if path), *FILLED)
