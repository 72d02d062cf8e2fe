"""Targets from their descriptions, which are in files of runs and of indexes."""

from dataclasses import fields
from typing import Any

import numpy as np

from conf.errors import UserError
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


def target_of(
    facts: dict[str, Any], where: str = "the target", kinds: dict[str, type[Target]] = TARGETS
) -> Target:
    """Return the target that `describe_target` described, without values.

    Args:
        facts: description of the target.
        where: name of the file in messages.
        kinds: allowed kinds.

    Raises:
        UserError: the facts describe none of them.
    """
    fix = "write the folder that it belongs to again"
    check_kind(facts, {"kind": tuple(kinds)}, where, fix)
    target_class = kinds[facts["kind"]]
    attributes = {field.name for field in fields(target_class)}
    names = attributes - {"values"}
    if names != set(facts) - {"kind"}:
        raise UserError(
            f"{where}: a target of kind {facts['kind']} has {', '.join(sorted(names))}; {fix}"
        )
    check_kind(facts, {name: FACTS[name] for name in names}, where, fix)
    values = {name: tuple(facts[name]) if FACTS[name] == [str] else facts[name] for name in names}
    if "values" in attributes:
        values["values"] = np.zeros(0)
    if "predicted" in names:  # by a model that was trained on another kind
        others = {kind: other for kind, other in kinds.items() if other is not target_class}
        values["predicted"] = target_of(facts["predicted"], where, others)
    return target_class(**values)
