"""Facts about the data that a model is trained on, written with its weights and compared."""

from itertools import zip_longest
from typing import Any

from conf.errors import first_few
from loaders import Loader
from loaders.targets import describe_target


def facts_of(loader: Loader) -> dict[str, Any]:
    """Describe the data that a model is trained on; written with its weights."""
    return {
        "classes": list(loader.info.classes),
        "target": describe_target(loader.info.target) if loader.info.target else {},
        "in_channels": loader.in_channels,
        "dtype": loader.info.dtype,
    }


Differences = dict[str, tuple[Any, Any]]
"""What was and what is, by name, such as `{"output 0": ("cat", "cow")}`."""


def differences(then: dict[str, Any], now: dict[str, Any]) -> Differences:
    """Return how the data differs from that of the run whose weights are used on it."""
    pairs = {"in_channels": (then["in_channels"], now["in_channels"])}
    targets = then["target"], now["target"]
    for key in ("kind", "num_channels", "size_factor"):
        pairs[f"targets' {key}"] = targets[0].get(key), targets[1].get(key)
    names = [target.get("classes") or target.get("names") or () for target in targets]
    for number, pair in enumerate(zip_longest(*names, fillvalue="none")):
        pairs[f"output {number}"] = pair
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def listed(differing: Differences, most: int = 6) -> str:
    """Return the first ones as text, such as `output 0: cat then, cow now`."""
    return first_few((f"{key}: {a} then, {b} now" for key, (a, b) in differing.items()), most)
