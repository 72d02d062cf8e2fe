"""A key of the data or the loader changes what is read, or is refused: none does nothing.

Keys are tried one at a time, for each layout and loader.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.check import keys_of
from conf.errors import UserError
from loaders import build_loaders
from loaders.targets import describe_target
from tests import images
from tests.helpers import make_config, refused
from tests.images import reading
from tests.parts import rows_of

KINDS = {**images.KINDS, **dict(rows_of("KINDS"))}
# One kind of each layout.
KINDS = {
    kind: KINDS[kind]
    for kind in (
        "photos",
        "photos that DALI reads",
        "cells of 16 bits",
        "pairs",
        "masks",
        "several labels",
    )
    if kind in KINDS
}
OWN = ["own data"] if find_spec("loaders.own") else []
LOADERS: dict[str, list[str]] = {"threads": [], "synthetic": ["loader=synthetic"]}
LOADERS |= dict(rows_of("WAYS"))
COPIES = dict(rows_of("COPIES"))
WAYS = LOADERS | COPIES
CASES = [(kind, "threads") for kind in (*KINDS, "digits", *OWN)]
CASES += [
    ("photos that DALI reads" if way == "dali" else "photos", way)
    for way in WAYS
    if way != "threads"
]
CUT = ["data.crop=[20,24]", "global_batch_size=4"]

# Another value of each key than its default and those of the presets.
VALUES = {
    **{"data.val_fraction": "0.4", "data.val_count": "5", "data.split_seed": "1"},
    **{"data.fold": "1", "data.num_folds": "3", "data.name": "nowhere"},
    **{"data.leave_out": "nowhere"},
    **{"data.shuffle": "window", "data.shuffle_window": "2"},
    **{"data.retry_s": "1", "data.resize": "36", "data.crop": "[18,16]"},
    **{"data.random_resized_crop": "[0.2,0.4]", "data.hflip": "1", "data.vflip": "1"},
    **{"data.colour_jitter": "[0.5,0.5,0.5]", "data.randaugment": "[4,30]"},
    **{"data.rotation": "90", "data.random_scale": "[0.5,0.6]", "data.random_erasing": "1"},
    **{"data.mixup": "1", "data.cutmix": "1", "data.value_range": "[0,3]"},
    **{"data.mean": "[0.2]", "data.std": "[0.3]", "loader.channels_last": "true"},
    **{"data.input_dir": "nowhere", "data.target_dir": "nowhere"},
    **{"data.num_classes": "250", "data.ignore_index": "7"},
    **{"data.table": "nowhere", "data.path_column": "none", "data.label_columns": "[none]"},
    **{"data.label_kind": "classes", "loader.pack": "nowhere"},
}
# What changes no batch, and why.
UNCHANGED = {
    "where the data lie, and what reads them": {"data.layout", "data.root", "loader.name"},
    "what is kept of headers": {"data.cache_dir"},
    "bad files and large JPEGs alone": {
        *("data.max_pixels", "data.on_error", "data.reduced_decoding"),
    },
    "images that are transparent or turned alone": {"data.background", "data.exif"},
    "speed alone": {
        *("loader.num_workers", "loader.num_threads", "loader.prefetch_factor"),
        *("loader.prefetch_queue_depth", "loader.hw_decoder_load"),
    },
}
READ_BY_OWN_DATA = {
    *("data.resize", "data.crop", "data.mean", "data.std"),
    *("data.val_fraction", "data.val_count", "data.split_seed", "data.fold"),
}


@pytest.fixture(scope="module")
def options_of(tmp_path_factory) -> Any:
    """Function that writes a kind of data once, and returns the overrides that read it."""

    @cache
    def options(kind: str) -> list[str]:
        if kind == "digits":
            return CUT
        if kind == "own data":
            return ["data=own", "data.name=digits", "global_batch_size=4"]
        root = tmp_path_factory.mktemp("data") / "data"
        return [*KINDS[kind](root).options, *reading(root), *CUT]

    return options


def facts_of(options: list[str]) -> list[Any]:
    """What is read: the samples of both splits, and the first batch of training."""
    train, val = build_loaders(make_config(*options), torch.device("cpu"))
    target = describe_target(train.info.target) if train.info.target else None
    batch = [shown(tensor) for tensor in next(iter(train))]
    names = [train.info.name_of(sample) for sample in range(train.info.num_samples)]
    return [val.info.num_samples, target, names, train.last_rows.tobytes(), batch]


def shown(values: Tensor) -> tuple[Any, ...]:
    return values.dtype, values.shape, values.stride(), values.flatten().tolist()


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_each_key_changes_what_is_read_or_is_refused(kind, way, options_of, tmp_path) -> None:
    options = [*options_of(kind), *WAYS[way]]
    if way in COPIES:
        pack = import_module("loaders.pack").pack
        pack(make_config(*options).data, tmp_path / "pack")
        options += [f"loader.pack={tmp_path / 'pack'}"]
    cfg, plain = make_config(*options), facts_of(options)
    assert facts_of(options) == plain
    unchanged = set().union(*UNCHANGED.values(), READ_BY_OWN_DATA if kind == "own data" else ())
    keys = {key for key, _ in keys_of(cfg) if key.startswith(("data.", "loader."))} - unchanged
    values = VALUES | {"data.random_crop": str(not cfg.data.random_crop)}
    do_nothing = []
    for key in keys:
        try:
            facts = facts_of([*options, f"{key}={values[key]}"])
        except UserError as error:
            facts = [str(error)] if key in str(error) else plain
        if facts == plain:
            do_nothing.append(key)
    assert not do_nothing


@pytest.mark.parametrize("way", sorted(LOADERS.keys() - {"threads"}))
def test_a_loader_without_workers_refuses_them(way: str) -> None:
    with refused("loader.num_workers=2"):
        make_config(*WAYS[way], "loader.num_workers=2")


def test_keys_that_need_others_are_taken_with_them() -> None:
    make_config("data.fold=1", "data.num_folds=3")
    make_config("data.root=s3://photos", "data.retry_s=1")
    make_config("data.shuffle=window", "data.shuffle_window=2")
