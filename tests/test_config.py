"""The configuration is typed, documented and complete; a wrong key or value is named with a fix."""

import re
from copy import deepcopy
from math import inf, nan
from operator import attrgetter
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import reference
from conf.check import check_batch_size, check_ranges, keys_of
from conf.cli import explain
from conf.errors import UserError
from conf.schema import Config
from tests.helpers import REPOSITORY, make_config

FILLED = ["data.root=somewhere", "model.name=small_cnn"]
FILLED += ["loader.pack=a_pack"]  # part: packed
GROUPS = sorted({path.parent.name for path in (REPOSITORY / "conf").glob("*/*.yaml")} - {"hydra"})

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


RANGES = [
    (key, field.metadata["allowed"].description, field.default is None)
    for key, field in keys_of()
    if field.metadata.get("allowed")
]


@pytest.fixture(scope="module")
def default() -> Config:
    return make_config()


@pytest.mark.parametrize(("key", "description", "is_optional"), RANGES)
def test_a_value_out_of_its_range_is_named(
    key: str, description: str, is_optional: bool, default: Config
) -> None:
    names = re.split(", | or ", description)
    refused, accepted = VALUES.get(description, (["".join(names)], names))  # else one of these
    accepted = accepted + [None] * is_optional
    cfg = deepcopy(default)
    group, _, name = key.rpartition(".")
    place = attrgetter(group)(cfg) if group else cfg
    for value in accepted:
        setattr(place, name, value)
        check_ranges(cfg)
    for value in refused:
        setattr(place, name, value)
        with pytest.raises(UserError) as raised:
            check_ranges(cfg)
        assert str(raised.value).startswith(f"{key}={value} ")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("data.hflop=1", "data.hflip"),
        ("lr=0.1", "optimizer.lr"),
        ("+epoch=3", "epochs"),
        ("optimizer.momentum=0.5", "optimizer.kwargs.momentum"),
        ("model.kwargs.widht=8", "+model.kwargs.widht="),
        ("optimizer=adam", "adamw"),
        ("model=vgg", "small_cnn"),
        ("checkpoint=5", "checkpoint"),
        ("data.crop=[24,24", "data.crop=[24,24"),
        ("epochs", "epochs="),
        ("output_dir=ä", "output_dir=ä"),
        ("data.root=http://host/data?key=a=b", "'data.root=\"VALUE\"'"),
        ("epochs=many", "epochs: Value 'many'"),
        ("data.mean=0.5", "data.mean"),
        ("profile.steps=[1,0.5]", "profile.steps"),
        ("data=imagefolder", "data.root"),
        ("loader.reader=native", "loader=dali_reader"),
        ("loader=packed", "loader.pack=DIR"),
        ("optimizer.warmup_epochs=4", "epochs=4"),
        ("resume=auto overwrite=true", "resume=auto"),
    ],
)
def test_a_mistake_in_the_configuration_is_named_with_the_fix(overrides: str, named: str) -> None:
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as raised:
        make_config(*overrides.split())
    told = explain(raised.value)
    assert told is not None
    assert named in told
    assert len(told.splitlines()) <= 3


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:  # part: ranks
    check_batch_size(64, world_size=2)
    with pytest.raises(UserError, match="global_batch_size=63 .*world_size=2; use 62 or 64"):
        check_batch_size(63, world_size=2)


def test_the_micro_batches_of_a_rank_are_of_its_own_share() -> None:  # part: accumulate
    check_batch_size(8, world_size=1, accumulate_steps=8)
    with pytest.raises(UserError, match="world_size=2 times accumulate_steps=8; use 16"):
        check_batch_size(8, world_size=2, accumulate_steps=8)


def test_every_key_is_documented_and_in_the_table() -> None:
    documented = {key for key, _, _ in reference.documented_keys(reference.SCHEMA.read_text())}
    assert dict(keys_of()).keys() <= documented
    text = reference.TABLE.read_text()
    assert text == reference.with_table(text, reference.SCHEMA.read_text()), (
        "run python -m conf.reference"
    )


def test_every_file_of_every_group_fits_the_schema() -> None:
    """Files of several groups are combined; experiments, which choose from others, stand alone."""
    folder = REPOSITORY / "conf"
    files = {
        group: sorted(path.stem for path in folder.glob(f"{group}/*.yaml")) for group in GROUPS
    }
    experiments = files.pop("experiment", [])
    assert all(files.values())
    for number in range(max(map(len, files.values()))):
        chosen = [f"{group}={names[number % len(names)]}" for group, names in files.items()]
        assert make_config(*chosen, *FILLED)
    for name in experiments:
        assert make_config(f"experiment={name}", *FILLED)
