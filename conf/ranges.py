"""Keys with their defaults and ranges."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """Range of a key: a description for messages, and the test of a value."""

    description: str
    contains: Callable[[Any], bool]


def key(default: Any, allowed: Allowed | None = None) -> Any:
    """Declare a key with its default and range; null is allowed if it is the default."""
    metadata = {"allowed": allowed}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*names: str) -> Allowed:
    return Allowed(f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__)


def are_numbers(values: Any, count: int | None = None) -> bool:
    """Return True for a list of `count` finite numbers; by default, of one or more."""
    return (
        isinstance(values, list)
        and len(values) == (count or max(1, len(values)))
        and all(type(value) in (int, float) and math.isfinite(value) for value in values)
    )


def is_pair(values: Any, high: float = math.inf) -> bool:
    """Return True for a list of two finite numbers with 0 < first <= second <= high."""
    return are_numbers(values, 2) and 0 < values[0] <= values[1] <= high


FROM_0 = Allowed("0 or more", lambda x: 0 <= x < math.inf)
FROM_1 = Allowed("1 or more", lambda x: 1 <= x < math.inf)
FROM_2 = Allowed("2 or more", lambda x: x >= 2)
ABOVE_0 = Allowed("a number above 0", lambda x: 0 < x < math.inf)
SHARE = Allowed("a number in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_1 = Allowed("a number in [0, 1)", lambda x: 0 <= x < 1)
BETWEEN_0_AND_1 = Allowed("a number in (0, 1)", lambda x: 0 < x < 1)
