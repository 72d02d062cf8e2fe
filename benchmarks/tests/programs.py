"""Workloads that are measured, in a module that processes import quickly."""

import os
import time
from collections.abc import Callable
from typing import NoReturn


def sleep(seconds: float, items: int, count: Callable[[int], None]) -> None:
    while True:
        time.sleep(seconds)
        count(items)


def refuse(count: Callable[[int], None]) -> NoReturn:
    raise ModuleNotFoundError("litdata is not installed")


def fail_later(count: Callable[[int], None]) -> NoReturn:
    count(1)
    raise ModuleNotFoundError("one.py")


def die(count: Callable[[int], None]) -> NoReturn:
    os._exit(3)
