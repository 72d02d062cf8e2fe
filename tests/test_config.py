"""The configuration is typed, documented and complete; a wrong key or value is named with a fix."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from math import inf, nan
from operator import attrgetter
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import reference
from conf.check import check_batch_size, check_micro_batches, check_ranges
from conf.cli import explain, known_keys
from conf.errors import UserError
from conf.schema import Config
from tests.helpers import REPOSITORY, make_config

FILLED = ["data.root=somewhere", "model.name=small_cnn"]
FILLED += ["loader.pack=a_pack"]  # part: packed
GROUPS = sorted({path.parent.name for path in (REPOSITORY / "conf").glob("*/*.yaml")} - {"hydra"})

# Of each key that has a range: values that are refused, and those at the edges that are not.
FROM_0 = [-1], [0]
FROM_1 = [0], [1]
ABOVE_0 = [0.0, -0.1, nan, inf], [1e-9]
SHARE = [-0.1, 1.1, nan], [0, 1]
BELOW_1 = [-0.1, 1.0], [0, 0.9]
SIZE = [0, "abc", True, [24], [24, 0]], [1, [24, 32], None]
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("data.cache_gb", [-1], [0, None]),
    ("data.retry_s", *FROM_0),
    ("data.val_fraction", [0, 1.0], [0.1]),
    ("data.val_count", [0], [1, None]),
    ("data.split_seed", *FROM_0),
    ("data.label_columns", [[]], [["a"]]),
    ("data.label_kind", ["words"], ["auto", "classes", "several", "numbers"]),
    ("data.num_classes", [1], [2, None]),
    ("data.shuffle", ["windows"], ["full", "window"]),
    ("data.shuffle_window", *FROM_1),
    ("data.max_pixels", *FROM_1),
    ("data.on_error", ["ignore"], ["raise", "skip"]),
    ("data.max_bad_samples", *FROM_0),
    ("data.resize", *SIZE),
    ("data.crop", *SIZE),
    ("data.random_resized_crop", [0.5, [0.5], [0, 1], [0.5, 1.1], [0.8, 0.2]], [[0.1, 1], None]),
    ("data.hflip", *SHARE),
    ("data.vflip", *SHARE),
    ("data.colour_jitter", [[1, 2], [0, 0, 1.1]], [[0, 0, 1]]),
    ("data.randaugment", [[5, 9], [0, 9], [2, 31]], [[1, 30], [4, 0], None]),
    ("data.gaussian_blur", [[0.5], [1.1, 1, 2], [1, 0, 2]], [[1, 1, 1]]),
    ("data.rotation", [-1, 181], [0, 180]),
    ("data.random_scale", [[2, 1], [0, 1]], [[1, 1], None]),
    ("data.random_erasing", *SHARE),
    ("data.mixup", *FROM_0),
    ("data.cutmix", *FROM_0),
    ("data.value_range", [[1, 0], [1], [0, inf]], [[-1, 1]]),
    ("data.mean", [[], [nan]], [[0.5], None]),
    ("data.std", [[], [0.0]], [[0.5], None]),
    ("loader.num_workers", [-1, "two"], [0, "auto"]),
    ("loader.prefetch_factor", *FROM_1),
    ("loader.num_threads", *FROM_0),
    ("loader.prefetch_queue_depth", *FROM_1),
    ("loader.hw_decoder_load", *SHARE),
    ("optimizer.lr", *ABOVE_0),
    ("optimizer.weight_decay", *FROM_0),
    ("optimizer.warmup_epochs", *FROM_0),
    ("optimizer.warmup_steps", [-1], [0, None]),
    ("optimizer.schedule", ["cosin"], ["cosine", "linear", "constant", "step"]),
    ("optimizer.step_epochs", *FROM_1),
    ("optimizer.step_factor", *ABOVE_0),
    ("optimizer.backbone_lr_scale", *ABOVE_0),
    ("task.label_smoothing", *BELOW_1),
    ("checkpoint.every_steps", [0], [1, None]),
    ("checkpoint.every_minutes", [0.0], [0.1, None]),
    ("checkpoint.keep", *FROM_1),
    ("checkpoint.on_error", ["rise"], ["raise", "warn"]),
    ("amp.dtype", ["int8"], ["auto", "float16", "bfloat16"]),
    ("amp.init_scale", *ABOVE_0),
    ("ema.decay", *BELOW_1),
    ("distributed.backend", ["mpi"], ["auto", "nccl", "gloo"]),
    ("distributed.timeout_s", *ABOVE_0),
    ("early_stopping.patience", [0], [1, None]),
    ("log.every_steps", *FROM_1),
    ("log.images", *FROM_0),
    ("profile.steps", [[5], [0, 0], [-1, 2], [1, 2, 3], []], [[0, 1], None]),
    ("epochs", *FROM_1),
    ("max_steps", [0], [1, None]),
    ("global_batch_size", *FROM_1),
    ("accumulate_steps", *FROM_1),
    ("max_bad_steps", *FROM_1),
    ("clip_grad_norm", [0.0, -1.0, nan], [0.1, inf]),
    ("device", ["tpu", "cuda:x"], ["auto", "cpu", "cuda", "cuda:1"]),
    ("fp32_precision", ["fp8"], ["ieee", "tf32", None]),
    ("seed", [-1, 2**63], [0, 2**63 - 1]),
]


def keys_with_range(group: Any = Config, prefix: str = "") -> Iterator[str]:
    for field in fields(group):
        if is_dataclass(field.type):
            yield from keys_with_range(field.type, f"{prefix}{field.name}.")
        elif field.metadata.get("allowed"):
            yield prefix + field.name


@pytest.fixture(scope="module")
def default() -> Config:
    return make_config()


def test_every_range_is_tested() -> None:
    assert {key for key, *_ in RANGES} == set(keys_with_range())


@pytest.mark.parametrize(("key", "refused", "accepted"), RANGES, ids=[key for key, *_ in RANGES])
def test_a_value_out_of_its_range_is_named(
    key: str, refused: list[Any], accepted: list[Any], default: Config
) -> None:
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
        shown = str(value).replace(", ", ",").replace("True", "true")
        assert str(raised.value).startswith(f"{key}={shown} ")


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
        ("data.mean=[0.1,0.2] data.std=[1,1,1]", "data.std=[1.0,1.0,1.0]"),
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
    check_batch_size(64, 2)
    with pytest.raises(UserError, match="global_batch_size=63 .*world_size=2; use 62 or 64"):
        check_batch_size(63, 2)


def test_the_micro_batches_of_a_rank_are_of_its_own_share() -> None:  # part: accumulate
    cfg = make_config("global_batch_size=8", "accumulate_steps=8")
    check_micro_batches(cfg, 1)
    with pytest.raises(UserError, match="accumulate_steps=8 .* 4 samples"):
        check_micro_batches(cfg, 2)


def test_every_key_is_documented_and_in_the_table() -> None:
    documented = {key for key, _, _ in reference.documented_keys(reference.SCHEMA.read_text())}
    assert set(known_keys()) <= documented
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
