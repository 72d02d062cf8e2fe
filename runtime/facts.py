"""Facts about the data that a model is trained on, written with its weights and compared."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError, first_few
from conf.facts import CHANNELS, check_kind
from loaders import Loader
from loaders.targets import describe_target, target_of

PRECISIONS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
}


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
    kinds = {
        "in_channels": CHANNELS,
        "dtype": str,
        "target": {},
        "precision": tuple(PRECISIONS),
    }
    check_kind(facts, kinds, str(file), "take it from a copy of the run, or train again")
    if facts["target"]:  # else nothing was known of them
        target_of(facts["target"], f"{file}: target")


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Describe the differences of two data sets by name, such as `output 0: cat then, cow now`.

    Args:
        then: facts of the run whose weights are used.
        now: facts of the data that they are used on.
    """
    pairs = {"in_channels": (then["in_channels"], now["in_channels"])}
    for key in ("kind", "num_channels", "size_factor"):
        pairs[f"targets' {key}"] = then["target"].get(key), now["target"].get(key)
    names = [
        facts["target"].get("classes") or facts["target"].get("names") or ()
        for facts in (then, now)
    ]
    for number, pair in enumerate(zip_longest(*names, fillvalue="none")):
        pairs[f"output {number}"] = pair
    return {key: f"{key}: {a} then, {b} now" for key, (a, b) in pairs.items() if a != b}


def refuse_differences(then: dict[str, Any], now: dict[str, Any], weights: str, fix: str) -> None:
    """Raise UserError if the facts differ: these weights are for other data."""
    if found := differences(then, now).values():
        raise UserError(f"{weights} was trained on other data ({first_few(found, 3)}); {fix}")
