"""The command line: configuration from overrides, options of tools, and display of errors."""

import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from conf.check import check_combinations, check_effects, check_ranges, owners_of_keys
from conf.credentials import masked
from conf.errors import UserError, cause_of, nearest
from conf.schema import NAMED_BY, Config, own_classes, register_choices

EXIT_CODE = 2
MAX_LINES = 3
RENAMED = {
    "optimizer.momentum": "optimizer.kwargs.momentum",
}
HYDRA_OPTIONS = {"-h", "-c", "-r", "-p", "-m", "-sc", "-cp", "-cn", "-cd", "-i", "--", "--help"}
HYDRA_OPTIONS |= {"--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--info"}
HYDRA_OPTIONS |= {"--multirun", "--shell-completion", "--config-path", "--config-name"}
HYDRA_OPTIONS |= {"--config-dir", "--experimental-rerun"}
OWN_PACKAGES = ("conf", "loaders", "models", "runtime", "tasks")
OF_A_PATH = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
OF_A_PATH |= {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}


def with_home(argument: str) -> str:
    """Return `key=~/path` with the home folder for `~`, which shells leave after most keys."""
    home = str(Path.home())
    return re.sub("^([^=]+=[\"']?)~(?=/)", lambda found: found[1] + home, argument)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for an argument of a script that is neither an override nor Hydra's option.

    Hydra would print its usage without the fix, and ignore `~epochs`.
    """
    for place, argument in enumerate(arguments):
        key, equals, value = argument.lstrip("-~").partition("=")
        if argument.startswith("-") and argument.partition("=")[0] not in HYDRA_OPTIONS:
            value = value if equals else _value_after(arguments, place)
            near = "" if key in _keys_and_groups() else nearest(key, _keys_and_groups())
            raise UserError(f"{argument}: keys have no dashes; write {key}={value}{near}")
        if argument.startswith("~") and key in _keys_and_groups():
            raise UserError(
                f"{argument}: {key} cannot be removed; leave it out, or set {key}=VALUE"
            )


def load_config(overrides: Sequence[str]) -> Config:
    """Compose conf/config.yaml with overrides, as the training scripts do, and check the result.

    Args:
        overrides: `key=value`, such as `data=cells` or `optimizer.lr=0.1`.

    Raises:
        UserError, HydraException, OmegaConfBaseException: a key or value is wrong; see `explain()`.
    """
    register_choices()
    with initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
        cfg = to_config(compose("config", list(overrides)))
    check_effects(cfg)  # not of the configuration of an earlier run, which nobody types
    return cfg


def to_config(composed: Any) -> Config:
    """Turn a composed DictConfig into dataclasses, and check it.

    Raises:
        UserError: a value is out of its range, or values exclude each other.
        OmegaConfBaseException: a key is unknown or has no value.
    """
    plain = OmegaConf.to_container(composed)
    # Refuses keys that Hydra's + has added.
    typed = OmegaConf.merge(typed_defaults(composed), plain)
    cfg = cast(Config, OmegaConf.to_object(typed))
    check_ranges(cfg)
    check_combinations(cfg)
    return cfg


def typed_defaults(values: Any) -> DictConfig:
    """Return the defaults of all keys that a configuration has: those of its layout and its loader,
    and of the files of their groups, among them."""
    groups = {field.name: field.type for field in fields(Config)}
    typed = OmegaConf.structured(Config)
    for group, key in NAMED_BY.items():
        if OmegaConf.is_missing(values, group):
            continue
        name = OmegaConf.select(values, f"{group}.{key}", throw_on_missing=False)
        node = own_classes(group).get(name) or OmegaConf.get_type(values, group)
        typed[group] = OmegaConf.structured(node if is_dataclass(node) else groups[group])
    return typed


@contextmanager
def user_errors(
    before_end: Callable[[Exception, str | None], None] = lambda error, message: None,
) -> Iterator[None]:
    """End the process on an error: with exit code 2 and at most three lines if the user can fix it,
    with exit code 1 and the traceback for a bug.

    Args:
        before_end: is called with the error and, if the user can fix it, the lines.
    """
    try:
        yield
    except Exception as error:
        text = explain(error)
        before_end(error, text)
        print(masked(text or traceback.format_exc().rstrip()), file=sys.stderr)
        sys.exit(EXIT_CODE if text else 1)


def explain(error: Exception) -> str | None:
    """Return a message of at most three lines if the user can fix the error; None for a bug."""
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, HydraException | OmegaConfBaseException):
        text = _explain_config(error)
    elif isinstance(error, OSError) and error.filename and error.errno in OF_A_PATH:
        name = str(error.filename)
        given = [argument for argument in sys.argv[1:] if name in argument]
        text = f"{given[0] if given else name}: {error.strerror}; choose another path"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.partition(".")[0] in OWN_PACKAGES:
            return None
        text = f"the package {error.name} is not installed; make setup installs all that is needed"
    else:
        text = cause_of(error) or ""
    lines = [line for line in masked(text).splitlines() if line.strip()]
    return "\n".join(lines[:MAX_LINES]) or None


def _explain_config(error: Exception) -> str:
    """Return the message for an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0]
        if word := _in_one_word(error.override):
            return f"{error.override}: not a KEY=VALUE; write {word}, without spaces"
        return (
            f"{error.override}: not a KEY=VALUE that Hydra can read; write lists without spaces, "
            f"and other text in quotes within quotes: '{key}=\"VALUE\"'"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = [option for option in error.options if option != "schema"]
        return f"{group}={name} is unknown{nearest(name, options)}; use one of {', '.join(options)}"
    # Where a file sets a key, Hydra's error does not name it.
    inner = error.__context__ if isinstance(error, HydraException) else None
    cause = error.__cause__ or inner or error
    key = str(getattr(cause, "full_key", "") or "")
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is not set; set {key}=VALUE"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if ".kwargs." in key:
            near = nearest(key, [key.rpartition(".")[0] + f".{name}" for name in cause.parent_node])
            return f"{key} is not set by the file of its group{near}; +{key}=VALUE adds it"
        if key in RENAMED:
            return f"{key} is now {RENAMED[key]}"
        if owners := owners_of_keys().get(key):
            return f"{key} is a key of {' and '.join(owners)}; set that, or leave {key} out"
        near = nearest(key, _keys_and_groups()) or "; docs/configuration.md describes all keys"
        return f"{_argument_of(key)}: {key} is not a key of the configuration{near}"
    said = str(cause).splitlines()[0].rstrip(".")
    if found := re.match(r"Could not append to .* at '(.+)'|Multiple values for (.+)\. To", said):
        taken = found[1] or found[2]
        if (given := _argument_of(taken)).startswith("+"):
            return f"{given}: {taken} has a value already; leave out the +: {given.lstrip('+')}"
    return f"{key + ': ' if key else ''}{said}; docs/configuration.md describes all keys"


def _keys_and_groups() -> list[str]:
    return [*owners_of_keys(), *(field.name for field in fields(Config)), "experiment"]


def _argument_of(key: str) -> str:
    """Return the argument of the command line that sets a key, such as `+epochs=3`, or the key."""
    arguments = [x for x in sys.argv[1:] if x.lstrip("+").partition("=")[0] == key]
    return [*arguments, key][0]


def _value_after(arguments: Sequence[str], place: int) -> str:
    """Return the argument after a place if it may be the value of a key there, else `VALUE`."""
    following = [*arguments[place + 1 : place + 2], ""][0].lstrip("=")
    return following if following and "=" not in following else "VALUE"


def _in_one_word(argument: str) -> str | None:
    """Return `epochs=3` for one of the arguments `epochs 3` or `epochs= 3`; None for others."""
    words = sys.argv[1:] if argument in sys.argv[1:] else [argument]
    place = words.index(argument)
    if place and words[place - 1].endswith("="):
        return words[place - 1] + argument
    return f"{argument}={_value_after(words, place)}" if argument in _keys_and_groups() else None
