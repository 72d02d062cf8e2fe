"""Removal of user, password and query of addresses from everything that is written or printed."""

import logging
import re
from typing import Any

MASK = "***"
"""Text in place of what is removed."""

ADDRESS = re.compile(
    r"(\w\w:/+)"  # a path that was made of an address has one slash
    r"([^/?#\n]*@|[^/?#:\s]*:(?!\d*(?:[/?#\s]|$))\S*@)?"  # user; or user and password with /?#
    r"([^\s?#]*)"
    r"([?#](?:\S*[^\s:;,)'\"])?)?"  # not the punctuation of a sentence behind it
)


def without_credentials(text: str) -> str:
    """Remove user, password and query of the addresses in a text."""
    return ADDRESS.sub(r"\1\3", text)


def masked(value: Any) -> Any:
    """Replace user, password and query of addresses in nested values by `***`.

    Args:
        value: text, or lists and dictionaries of texts; other values are returned as they are.
    """
    if isinstance(value, dict):
        return {key: masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(each) for each in value)
    if not isinstance(value, str):
        return value
    return ADDRESS.sub(
        lambda found: (
            found[1]
            + (f"{MASK}@" if found[2] else "")
            + found[3]
            + (f"?{MASK}" if found[4] else "")
        ),
        value,
    )


class MaskingFormatter(logging.Formatter):
    """Formatter of log records that removes credentials; for the records of all libraries."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))
