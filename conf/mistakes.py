"""A mistake of the user ends in a few lines: what, the value seen, the fix. A traceback is for bugs.

A mistake is what the template itself raises, with a message, a path that cannot be used, and what Hydra
says of the configuration. Everything else is a bug. A process that ends by a mistake has exit code 2. Of the
ranks of a run, the first one to meet it tells it, and ends torchrun too, which would start the run again or
add a page of its own.
"""

import difflib
import linecache
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import reference

EXIT_CODE = 2
MOST_LINES = 3
OWN_PACKAGES = ("conf", "loaders", "models", "runtime", "tasks")
OF_PATHS = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
OF_HYDRA = (
    *("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "info"),
    *("shell-completion", "config-path", "config-name", "config-dir", "experimental-rerun"),
    *("h", "c", "p", "r", "m", "i", "sc", "cp", "cn", "cd"),
)
SECONDS_TO_BE_TOLD = 10.0

board: Any = None
"""The store that the ranks of a run have in common, once they have joined."""


class Mistake(ValueError):
    """A mistake of the user; the message says what, the value seen and the fix."""


def is_mistake(error: BaseException) -> bool:
    """Whether an error is the user's to mend, and its message says how."""
    if getattr(error, "is_bug", False):  # on the rank where it was raised first
        return False
    if isinstance(error, Mistake | HydraException | OmegaConfBaseException):
        return True
    if isinstance(error, OF_PATHS) and error.filename:  # which the user has given
        return True
    if isinstance(error, ModuleNotFoundError) and error.name:  # a package that is not installed
        return error.name.partition(".")[0] not in OWN_PACKAGES
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not isinstance(error, Exception) or isinstance(error, AssertionError):
        return False
    frame, line = frames[-1]
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    code = linecache.getline(frame.f_code.co_filename, line).lstrip()
    return module in OWN_PACKAGES and code.startswith("raise ")


def end(error: BaseException) -> None:
    """End the process because of a mistake, telling it unless another rank does."""
    # A machine that is short of something may have it at the next attempt.
    may_pass = getattr(error, "may_pass", type(error) is OSError)
    if "RANK" not in os.environ:
        _tell(error)
        sys.exit(1 if may_pass else EXIT_CODE)
    if may_pass:
        _tell(error, f"[rank {os.environ['RANK']}] ")
        os._exit(1)
    # It is set aside where the run listens to it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _is_first_to_tell():
        _tell(error)
        _end_launcher()
        _wait_for_questions()
    else:
        time.sleep(SECONDS_TO_BE_TOLD)  # torchrun would end the one that tells
        _end_launcher()  # on another machine
    # Without the usual way out, which would wait for the other ranks.
    os._exit(EXIT_CODE)


def _is_first_to_tell() -> bool:
    """Whether no other rank has told a mistake, as far as the ranks can ask each other."""
    store = board
    with suppress(RuntimeError, ValueError):
        if store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from runtime.distributed import open_store

            store = open_store()
        return store is None or store.add("mistake", 1) == 1
    return True


def _wait_for_questions() -> None:
    """Until all ranks have asked: without torchrun, the store that they ask ends with rank 0."""
    end = time.monotonic() + SECONDS_TO_BE_TOLD
    with suppress(RuntimeError, ValueError):
        while board is not None and time.monotonic() < end:
            if board.add("mistake", 0) >= int(os.environ["WORLD_SIZE"]):
                return
            time.sleep(0.1)


def _tell(error: BaseException, prefix: str = "") -> None:
    print("\n".join(f"{prefix}{line}" for line in lines_of(error)), file=sys.stderr, flush=True)
    sys.stdout.flush()


def lines_of(error: BaseException) -> list[str]:
    """What is told of a mistake: at most three lines."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = what_is_unknown(sys.argv[1:]) or _of_hydra(error)
    elif isinstance(error, ModuleNotFoundError) and error.name:
        text = f"the package {error.name} is not installed; make setup installs all that is needed"
    else:
        text = str(error)
    return [line for line in text.splitlines() if line.strip()][:MOST_LINES]


def _end_launcher() -> None:
    """End torchrun and its other ranks at once, if torchrun has started this process."""
    import psutil

    with suppress(psutil.Error):
        launcher = psutil.Process(os.getppid())
        if is_torchrun(launcher):
            ranks = [process for process in launcher.children() if process.pid != os.getpid()]
            for process in [launcher, *ranks]:
                process.kill()


def is_torchrun(process: Any) -> bool:
    """Whether a `psutil.Process` is torchrun."""
    command = " ".join(process.cmdline()[:4])
    return (
        "torchrun" in command
        or re.search(r"torch[./]distributed[./](run|launch)\b", command) is not None
    )


def end_in_a_few_lines() -> None:
    """From now on, mistakes that nobody catches are told as such; the command line is looked at first."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves errors alone
    sys.excepthook = _excepthook
    message = _of_dashes(sys.argv[1:])
    if message:
        end(Mistake(message))


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if is_mistake(error):
        end(error)
    sys.__excepthook__(kind, error, trace)


# What is wrong with a command line


@cache
def known_keys() -> dict[str, str]:
    """All keys of the configuration, with their default values as text."""
    return {key: default for key, default, _ in reference.documented_keys()}


def options_of(group: str) -> list[str]:
    """Names of the files of a group, such as `data`."""
    folder = reference.SCHEMA.parent / group
    return sorted(path.stem for path in folder.glob("*.yaml"))


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean NAME?`, or the few names that there are."""
    names = list(names)
    close = difflib.get_close_matches(name, names, 1, 0.6)
    if not close:  # `lr` for `optimizer.lr`
        ends = {known.rpartition(".")[2]: known for known in reversed(names)}
        close = [ends[n] for n in difflib.get_close_matches(name.rpartition(".")[2], ends, 1, 0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def _of_dashes(arguments: list[str]) -> str:
    """What is wrong with `--epochs=3`, or with brackets that the shell has split; else empty."""
    kinds = "".join("-" if a.startswith("-") else "=" if "=" in a else "" for a in arguments)
    if "=-=" in kinds:  # which argparse would not understand
        return "options such as -m stand before the first KEY=VALUE or behind the last one"
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        key, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and key not in OF_HYDRA:
            if not equals and following and "=" not in following and following[0] != "-":
                equals, value = "=", following
            name = re.sub("[-]", "_", key)
            if name in known_keys():
                return f"{argument}: keys are written without dashes: {name}={value or 'VALUE'}"
            return (
                f"{argument}: there is no such option, and keys are written without dashes, as KEY=VALUE"
                f"{nearest(name, known_keys())}"
            )
        if equals and value.count("[") > value.count("]"):
            rest = arguments[arguments.index(argument) + 1 :]
            whole = value
            while rest and whole.count("[") > whole.count("]"):
                whole += rest.pop(0)
            if whole.count("[") == whole.count("]"):
                return f"{argument}: the shell has split this at a space; write {key}={whole}"
            return f"{argument}: a bracket is not closed; write {key}=[24,24], for example"
    return ""


def what_is_unknown(arguments: Iterable[str]) -> str:
    """Which override has an unknown key or an unknown name of a group; empty if all are known."""
    groups = {path.name for path in reference.SCHEMA.parent.iterdir() if path.is_dir()} - {"hydra"}
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        root = key.partition(".")[0].partition("/")[0]
        if argument.startswith("-") or root == "hydra" or argument.startswith("~"):
            continue
        if not equals:
            return f"{argument}: a key needs a value: {key}=VALUE{nearest(key, known_keys())}"
        if key in groups:
            options = options_of(key)
            if value not in (*options, "null") and "," not in value:
                return f"{argument} is unknown{nearest(value, options)}; use one of {', '.join(options)}"
        elif key not in known_keys() and not key.startswith("model.kwargs."):
            if any(known.startswith(f"{key}.") for known in known_keys()):
                return f"{argument}: {key} has keys of its own, such as " + ", ".join(
                    known for known in known_keys() if known.startswith(f"{key}.")
                )
            return f"{key} is no key of the configuration{nearest(key, known_keys())} (seen: {argument})"
    return ""


def _of_hydra(error: BaseException) -> str:
    """What Hydra says, without what it says of itself."""
    added = re.search(r"Could not override '(.*)'", str(error))
    if added:
        return (
            f"{added[1]} is not set by the group's file; +{added[1]}=VALUE adds it if it is meant"
        )
    cause = error.__cause__ or error
    said = str(cause).splitlines()[0].rstrip(".")
    found = re.search(r"merging override (.*)", str(error))
    argument = found[1] if found else ""
    key = argument.lstrip("+").partition("=")[0]
    default = known_keys().get(key)
    example = (
        f"; use {key}={default}, for example"
        if default
        else "; docs/configuration.md lists all keys"
    )
    return f"{argument}: {said}{example}" if argument else said
