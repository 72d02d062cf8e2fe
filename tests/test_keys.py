"""A key of the data or the loader changes what is read, or is refused: none does nothing."""

from importlib import import_module
from typing import Any

import pytest
import torch

from conf.check import keys_of
from conf.errors import UserError
from conf.schema import Config
from loaders import build_loaders
from loaders.layouts import open_index
from loaders.targets import describe_target
from tests.helpers import make_config
from tests.images import reading
from tests.kinds import COPIES, KINDS, OTHERS
from tests.rows import rows

LOADERS = {"pytorch": [], "synthetic": ["loader=synthetic"], **OTHERS}
SHARDS = rows("loaders.shards")
LAYOUTS = {"photos", "cells of 16 bits", "pairs", "masks", "several labels"} & KINDS.keys()
CASES = [(kind, "pytorch") for kind in sorted(LAYOUTS)]
CASES += [("photos that DALI reads", way) for way in LOADERS | COPIES if way != "pytorch"]
CASES += [("several labels", way) for way in SHARDS if "several labels" in KINDS]

# Another value of each key than its default and those of the presets.
VALUES = {
    **{"data.val_fraction": "0.4", "data.val_count": "5", "data.split_seed": "1"},
    **{"data.fold": "1", "data.num_folds": "3", "data.name": "nowhere"},
    **{"data.leave_out": "nowhere", "data.shuffle": "window", "data.shuffle_window": "2"},
    **{"data.resize": "36", "data.crop": "[18,16]", "data.random_crop": "true"},
    **{"data.random_resized_crop": "[0.2,0.4]", "data.hflip": "1", "data.vflip": "1"},
    **{"data.colour_jitter": "[0.5,0.5,0.5]", "data.randaugment": "[4,30]"},
    **{"data.rotation": "90", "data.random_scale": "[0.5,0.6]", "data.random_erasing": "1"},
    **{"data.mixup": "1", "data.cutmix": "1", "data.value_range": "[0,3]"},
    **{"data.mean": "[0.2]", "data.std": "[0.3]", "loader.channels_last": "true"},
    **{"data.input_dir": "nowhere", "data.target_dir": "nowhere"},
    **{"data.num_classes": "250", "data.ignore_index": "7"},
    **{"data.table": "nowhere", "data.path_column": "none", "data.label_columns": "[none]"},
    **{"data.label_kind": "classes", "loader.pack": "nowhere"},
    **{"loader.prefetch_queue_depth": "3", "loader.hw_decoder_load": "0.5"},
}
"""All keys but those of speed, of what is kept, and of files that are broken, huge or turned."""
WITHOUT_EFFECT = {
    "dali": {"loader.prefetch_queue_depth", "loader.hw_decoder_load"},  # but on speed
    "loaders.shards": {"data.table", "data.path_column"},  # the table is not read again
}


def facts_of(options: list[str]) -> list[Any]:
    """What is read: the samples of both splits, and the first batch of training."""
    train, val = build_loaders(make_config(*options), torch.device("cpu"))
    batch = [(x.dtype, x.shape, x.stride(), x.flatten().tolist()) for x in next(iter(train))]
    target = describe_target(train.info.target) if train.info.target else None
    names = [train.info.name_of(sample) for sample in range(train.info.num_samples)]
    return [val.info.num_samples, target, names, train.last_rows.tobytes(), batch]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_each_key_changes_what_is_read_or_is_refused(kind: str, way: str, tmp_path) -> None:
    root = tmp_path / "data"
    options = [*KINDS[kind](root).options, *reading(root), "data.crop=[20,24]"]
    options += ["global_batch_size=4"]
    if way in COPIES:
        import_module("loaders.pack").pack(make_config(*options).data, tmp_path / "pack")
        options += [*COPIES[way], f"loader.pack={tmp_path / 'pack'}"]
    elif way in SHARDS:
        data = make_config(*options).data
        import_module(way).pack_shards(data, open_index(data), str(tmp_path / "shards"), "0.02")
        options += [f"data.root={tmp_path / 'shards'}"]
    else:
        options += LOADERS[way]
    plain = facts_of(options)
    assert facts_of(options) == plain
    assert VALUES.keys() <= {key for key, *_ in keys_of(Config())}
    do_nothing = []
    for key, value in VALUES.items():
        if key == "data.random_crop":
            value = str(not make_config(*options).data.random_crop)
        try:
            facts = facts_of([*options, f"{key}={value}"])
        except UserError as error:
            facts = [str(error)] if key in str(error) else plain
        if facts == plain:
            do_nothing.append(key)
    assert set(do_nothing) <= WITHOUT_EFFECT.get(way, set())
