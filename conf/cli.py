"""Command lines: the configuration from overrides, options of the tools, and display of errors."""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from conf.check import check_combinations, check_effects, check_ranges, keys_of
from conf.errors import UserError, cause_of, missing_package, nearest, place_of, unknown_name
from conf.schema import Config

EXIT_CODE = 2
MAX_LINES = 3

KEYS_AND_GROUPS = [key for key, *_ in keys_of(Config())]
KEYS_AND_GROUPS += [*(field.name for field in fields(Config)), "experiment"]


def with_home(argument: str) -> str:
    """Return `key=~/path` with the home folder for `~`, which shells leave after most keys."""
    return argument.replace("=~/", f"={Path.home()}/", 1)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for a key with dashes, such as `--lr` or `--batch-size`, where Hydra would
    print its usage, and for one that is removed, such as `~epochs`, which would do nothing."""
    for argument in arguments:
        name = standard_name(argument.lstrip("-~").partition("=")[0])
        keys = [key for key in KEYS_AND_GROUPS if f".{key}".endswith((f".{name}", f"_{name}"))]
        if argument.startswith(("-", "~")) and keys:
            raise UserError(
                f"{argument}: keys have no dashes; leave it out, or write {keys[0]}=VALUE"
            )


def parse_options(
    usage: str | None, arguments: Sequence[str], **options: Any
) -> tuple[dict[str, str], list[str]]:
    """Return the values of a tool's own options, and all other arguments: overrides of the
    configuration. `--help` prints the usage.

    The `options` are defaults by key; one whose default is None is required.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit()
    overrides = []
    for argument in map(with_home, arguments):
        key, equals, value = argument.partition("=")
        if not equals or argument.startswith("-"):
            raise UserError(
                f"{' '.join(arguments)}: {argument} is not key=value, without dashes and spaces; "
                "--help shows examples"
            )
        if key in options:
            options[key] = value
        else:
            overrides.append(argument)
    if missing := [key for key, value in options.items() if value is None]:
        raise UserError(f"{missing[0]}= is missing from the command line; see --help")
    return options, overrides


def load_config(overrides: Sequence[str]) -> Config:
    """Compose conf/config.yaml with overrides, as the training scripts do, and check the result; of
    the errors that it raises, `explain()` knows what the user can do."""
    with initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
        cfg = to_config(compose("config", list(overrides)))
    check_effects(cfg)  # not of the configuration of an earlier run, which nobody types
    return cfg


def to_config(composed: Any) -> Config:
    """Turn a composed DictConfig into dataclasses, and check it."""
    # Refuses keys that Hydra's + has added
    typed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(composed))
    OmegaConf.copy_cache(composed, typed)  # `run_stamp` stays that of the folder
    cfg = cast(Config, OmegaConf.to_object(typed))
    check_ranges(cfg)
    check_combinations(cfg)
    return cfg


@contextmanager
def user_errors(
    before_end: Callable[[Exception, str | None], None] | None = None,
) -> Iterator[None]:
    """End the process on an error: with exit code 2 and at most three lines if the user can fix it,
    with exit code 1 and the traceback for a bug. `before_end` is called with the error and them.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    try:
        yield
    except Exception as error:
        text = explain(error)
        if before_end is not None:
            before_end(error, text)
        print(text or traceback.format_exc().rstrip(), file=sys.stderr)
        sys.exit(EXIT_CODE if text else 1)


def explain(error: Exception) -> str | None:
    """Return a message of at most three lines if the user can fix the error; None for a bug."""
    text = cause_of(error) or ""
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, HydraException | OmegaConfBaseException):
        text = _explain_config(error)
    elif isinstance(error, OSError) and error.filename and not text:
        text = f"{error.filename}: {error.strerror}{place_of(error)}; choose another path"
    elif isinstance(error, ModuleNotFoundError):
        text = missing_package(str(error.name)) or ""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:MAX_LINES]) or None


def _explain_config(error: Exception) -> str:
    """Return the message for an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0]
        return (
            f"{error.override}: not a KEY=VALUE that Hydra can read; write {key}=VALUE without "
            f"spaces, or text in quotes within quotes: '{key}=\"VALUE\"'"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return str(unknown_name(group, name, error.options))
    # Where a file sets a key, Hydra's error does not name it.
    cause = error.__cause__ or error
    key = str(getattr(cause, "full_key", "") or "")
    if not key or ".kwargs." in key:  # + adds an argument
        return str(error)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is not set; set {key}=VALUE"
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{key}: {str(cause).splitlines()[0]}; --cfg job prints all keys"
    hint = nearest(standard_name(key), KEYS_AND_GROUPS) or "; --cfg job prints all keys"
    group = key.partition(".")[0]
    if group in ("model", "optimizer"):
        hint += f"; arguments of its class are in {group}.kwargs"
    return f"{key} is not a key of the configuration{hint}"


def standard_name(name: str) -> str:
    return name.replace("-", "_").replace("learning_rate", "lr")
