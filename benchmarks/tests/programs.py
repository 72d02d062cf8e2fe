"""Workloads that are measured, in a module that processes import quickly."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

BIN_S = 0.005


def sleep(seconds: float, items: int, count: Callable[[int], None]) -> None:
    while True:
        time.sleep(seconds)
        count(items)


def note_when(path: Path, count: Callable[[int], None]) -> None:
    """Write down when this works, in bins of BIN_S, and have a worker process do so too."""
    worker = multiprocessing.Process(target=_note_when, args=(path / "worker", int), daemon=True)
    worker.start()
    _note_when(path / "main", count)


def _note_when(path: Path, count: Callable[[int], object]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        last = 0
        while True:
            now = int(time.perf_counter() / BIN_S)
            if now != last:
                print(now, file=file, flush=True)
                count(1)
                last = now


def refuse(count: Callable[[int], None]) -> NoReturn:
    raise ModuleNotFoundError("spdl is not installed")


def fail_later(count: Callable[[int], None]) -> NoReturn:
    count(1)
    raise ModuleNotFoundError("one.py")


def die(count: Callable[[int], None]) -> NoReturn:
    os._exit(3)


def note_start(path: Path, count: Callable[[int], None]) -> None:
    """Leave a line in a file, then work."""
    with path.open("a") as file:
        print("started", file=file)
    sleep(0.001, 1, count)


def interrupt(count: Callable[[int], None]) -> NoReturn:
    raise KeyboardInterrupt
