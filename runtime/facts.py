"""Facts about the data that a model is trained on, written with its weights and compared."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from conf.errors import UserError, first_few
from conf.facts import CHANNELS, check_kind
from loaders import Loader
from loaders.targets import describe_target, target_of

PRECISIONS = ("float32", "float16", "bfloat16")


def facts_of(loader: Loader) -> dict[str, Any]:
    """Describe the data that a model is trained on; written with its weights."""
    return {
        "classes": list(loader.info.classes),
        "target": describe_target(loader.info.target) if loader.info.target else {},
        "in_channels": loader.in_channels,
        "dtype": loader.info.dtype,
    }


def check_facts(facts: Any, file: str | Path) -> None:
    """Raise UserError if facts from a file are not those of `facts_of()` with a precision."""
    kinds = {"in_channels": CHANNELS, "dtype": str, "target": {}, "precision": PRECISIONS}
    check_kind(facts, kinds, str(file), "take it from a copy of the run, or train again")
    if facts["target"]:  # else nothing was known of them
        target_of(facts["target"], f"{file}: target")


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Describe, by name, how the data differs from that of the run whose weights are used on it,
    such as `output 0: cat then, cow now`."""
    pairs = {"in_channels": (then["in_channels"], now["in_channels"])}
    targets = then["target"], now["target"]
    for key in ("kind", "num_channels", "size_factor"):
        pairs[f"targets' {key}"] = targets[0].get(key), targets[1].get(key)
    names = [target.get("classes") or target.get("names") or () for target in targets]
    for number, pair in enumerate(zip_longest(*names, fillvalue="none")):
        pairs[f"output {number}"] = pair
    return {key: f"{key}: {a} then, {b} now" for key, (a, b) in pairs.items() if a != b}


def refuse_differences(then: dict[str, Any], now: dict[str, Any], weights: str, fix: str) -> None:
    """Raise UserError if the facts differ: these weights are for other data."""
    if found := differences(then, now).values():
        raise UserError(f"{weights} was trained on other data ({first_few(found, 3)}); {fix}")
