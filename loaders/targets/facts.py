"""Targets from their descriptions, which are in files of runs and of indexes."""

from dataclasses import fields
from typing import Any

import numpy as np

from conf.facts import CHANNELS, check_kind
from loaders.targets.base import Target
from loaders.targets.images import TargetImages
from loaders.targets.labels import Labels
from loaders.targets.masks import Masks
from loaders.targets.multilabels import MultiLabels
from loaders.targets.numbers import RegressionTargets
from loaders.targets.unlabelled import Unlabelled

TARGETS: dict[str, type[Target]] = {
    "labels": Labels,
    "several labels": MultiLabels,
    "numbers": RegressionTargets,
    "images": TargetImages,
    "masks": Masks,
    "unknown": Unlabelled,
}
"""The class of each kind."""

FACTS = {
    "classes": [str],
    "names": [str],
    "size_factor": CHANNELS,
    "num_channels": CHANNELS,
    "ignore_index": int,
    "stored_dtype": ("uint8", "uint16"),
    "predicted": {},
}
"""Kinds of the attributes of targets, see `conf.facts.check_kind`."""


def target_of(facts: dict[str, Any], where: str = "the target") -> Target:
    """Return the target that `describe_target` described, without values.

    Args:
        facts: description of the target.
        where: name of the file in messages.

    Raises:
        UserError: the facts describe none of them.
    """
    fix = "write the folder that it belongs to again"
    check_kind(facts, {"kind": tuple(TARGETS)}, where, fix)
    target_class = TARGETS[facts["kind"]]
    names = {field.name for field in fields(target_class)}
    kinds = {name: FACTS[name] for name in names - {"values"}}
    check_kind(facts, kinds, where, fix)
    values = {name: tuple(facts[name]) if kinds[name] == [str] else facts[name] for name in kinds}
    if "values" in names:
        values["values"] = np.zeros(0)
    if "predicted" in names:
        values["predicted"] = target_of(facts["predicted"], where)
    return target_class(**values)
