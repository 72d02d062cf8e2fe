"""Values in JSON files, which may come from somebody else: checked before they are used."""

import json
from typing import Any

from conf.errors import UserError, shown

CHANNELS = range(1, 1 << 16)
"""Possible numbers of channels of an image: those of a TIFF."""


def parse_json(content: bytes, kind: Any, where: str, fix: str) -> dict[str, Any]:
    """Parse the JSON object in a file.

    Args:
        content: content of the file.
        kind: kind of each value by key, see `check_kind`.
        where: name of the file in messages.
        fix: advice in messages.

    Raises:
        UserError: it is not a JSON object with such values.
    """
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON but begins with {content[:40]!r}; {fix}") from None
    check_kind(facts, kind, where, fix)
    return dict(facts)


def check_kind(facts: Any, kind: dict[str, Any], where: str, fix: str) -> None:
    """Raise UserError unless `facts` is a dict whose values fit `kind`; ignore other keys."""
    if not isinstance(facts, dict):
        raise UserError(f"{where} holds no JSON object but {shown(facts)}; {fix}")
    for key, wanted in kind.items():
        if key not in facts:
            raise UserError(f"{where} has no {key!r}; {fix}")
        if isinstance(wanted, dict):
            check_kind(facts[key], wanted, f"{where}: {key}", fix)
        elif not fits(facts[key], wanted):
            raise UserError(f"{where}: {key}={shown(facts[key])} is not possible; {fix}")


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of a kind: a type, a range, a tuple of possible values, or a list
    with the kind of each item."""
    if isinstance(kind, list):
        return isinstance(value, list | tuple) and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if isinstance(kind, tuple):
        return value in kind
    return type(value) is kind
