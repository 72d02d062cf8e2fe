"""Declaration of keys with their defaults and ranges."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Allowed:
    """Range of a key: a description for messages, and the test of a value."""

    description: str
    contains: Callable[[Any], bool]


def key(default: Any, allowed: Allowed | None = None, of: str = "") -> Any:
    """Declare a key with its default, its range (null is allowed if it is the default), and the
    choices that read it, such as `data=pairs or data=masks`; by default, all do."""
    metadata = {"allowed": allowed, "of": of}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*names: str) -> Allowed:
    return Allowed(f"{', '.join(names[:-1])} or {names[-1]}", names.__contains__)


def are_numbers(values: Any, count: int, low: float = -math.inf, high: float = math.inf) -> bool:
    """Return True for a list of `count` numbers in [low, high]."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(value) in (int, float) and low <= value <= high for value in values)
    )


def is_size(value: Any) -> bool:
    """Return True for a length in pixels, and for [height, width]."""
    sizes = value if isinstance(value, list) and len(value) == 2 else [value]
    return all(type(size) is int and size >= 1 for size in sizes)


FROM_0 = Allowed("0 or more", lambda x: x >= 0)
FROM_1 = Allowed("1 or more", lambda x: x >= 1)
FROM_2 = Allowed("2 or more", lambda x: x >= 2)
ABOVE_0 = Allowed("a number above 0", lambda x: x > 0)
SHARE = Allowed("a number in [0, 1]", lambda x: 0 <= x <= 1)
BELOW_1 = Allowed("a number in [0, 1)", lambda x: 0 <= x < 1)
BETWEEN_0_AND_1 = Allowed("a number in (0, 1)", lambda x: 0 < x < 1)
ALL_ABOVE_0 = Allowed("numbers above 0", lambda x: all(value > 0 for value in x))
UP_TO_1 = Allowed("a number in (0, 1]", lambda x: 0 < x <= 1)

SIZE = Allowed("an int or [height, width] in pixels", is_size)
SHARES = Allowed(
    "[low, high] with 0 < low <= high <= 1", lambda x: are_numbers(x, 2, 0, 1) and 0 < x[0] <= x[1]
)
SCALES = Allowed("[low, high] above 0", lambda x: are_numbers(x, 2, 0) and 0 < x[0] <= x[1])
LOW_HIGH = Allowed("[low, high] with low < high", lambda x: are_numbers(x, 2) and x[0] < x[1])
COLOUR = Allowed("three ints from 0 to 255", lambda x: are_numbers(x, 3, 0, 255))
STRENGTHS = Allowed("three numbers in [0, 1]", lambda x: are_numbers(x, 3, 0, 1))
RANDAUGMENT = Allowed("[operations, magnitude], such as [2, 9]", lambda x: are_numbers(x, 2, 0, 30))
DEVICE = Allowed(
    "auto, cpu, cuda or cuda:1", lambda x: re.fullmatch(r"auto|cpu|cuda(:\d+)?", x) is not None
)
MICRO_BATCHES = Allowed("1 or more, or auto", lambda x: x == "auto" or (type(x) is int and x >= 1))
SKIP_AND_RECORD = Allowed(
    "[skip, record], such as [10, 5]", lambda x: len(x) == 2 and x[0] >= 0 and x[1] > 0
)
