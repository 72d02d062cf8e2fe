"""Facts about targets, in words and as stored with an index or a checkpoint."""

from dataclasses import fields
from typing import Any

import numpy as np

from conf.errors import first_few
from conf.facts import CHANNELS, check_kind
from loaders.targets.kinds import TARGETS, Target


def describe_missing(target: Any) -> tuple[str, ...]:
    """Return a line that names the classes without a training sample, from the training split's
    targets; none if there are none."""
    if target.kind == "labels":
        has_sample = np.isin(np.arange(len(target.classes)), target.values)
    elif target.kind == "several labels":
        has_sample = target.values.any(axis=0)
    else:
        return ()
    missing = [name for name, has in zip(target.classes, has_sample, strict=True) if not has]
    if not missing:
        return ()
    return (f"{len(missing)} classes have no training sample: {first_few(missing)}",)


def describe_target(target: Target) -> dict[str, Any]:
    """Return facts about a target without its values, which are a column."""
    facts = {name: value for name, value in vars(target).items() if name != "values"}
    return {"kind": target.kind} | facts


FACTS = {
    "classes": [str],
    "names": [str],
    "size_factor": CHANNELS,
    "num_channels": CHANNELS,
    "ignore_index": int,
    "stored_dtype": ("uint8", "uint16"),
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
    return target_class(**values)
