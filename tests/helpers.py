"""Helpers of most tests: the configuration, refusals, and copies of scripts with edits."""

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra import compose as compose_config
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.check import check_effects
from conf.cli import load_config, to_config
from conf.errors import UserError
from conf.schema import Config

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("conf", "loaders", "models", "runtime", "tasks", "tools", "data")
SCRIPTS = sorted(path.name for path in REPOSITORY.glob("train*.py"))
LOOP = re.compile(r"(^ {8}for inputs, targets in .*run\.batches\(.*\n)", re.MULTILINE)

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only `pytest -m gpu` sees GPUs"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@contextmanager
def refused(*shown: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError whose message has all these texts."""
    with pytest.raises(UserError) as error:
        yield error
    assert all(text in str(error.value) for text in shown), error.value


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that a file has once."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@cache
def composed(*groups: str) -> DictConfig:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose_config("config", list(groups))


def make_config(*overrides: str) -> Config:
    """The configuration that these command-line overrides give.

    Hydra composes each set of groups, such as `data=cells`, once: this takes as long as many tests.
    """
    groups = [o for o in overrides if (REPOSITORY / "conf" / o.partition("=")[0]).is_dir()]
    values = [o for o in overrides if o not in groups]
    if any(value.startswith(("+", "~")) for value in values):
        return load_config(overrides)
    try:
        given = copy.deepcopy(composed(*groups))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(given, override.key_or_group, override.value())
    except (HydraException, OmegaConfBaseException):
        return load_config(overrides)
    cfg = to_config(given)
    check_effects(cfg)
    return cfg


def has_ranks(script: str) -> bool:
    """True if tests start the script, or `plain/`'s of its name, on two ranks."""
    return "ddp" in script or "fsdp" in script


def script_for(technique: str, folder: Path = REPOSITORY) -> str:
    """The script `train_<technique>.py`, or `train.py` where all techniques are merged into it."""
    is_merged = technique.startswith("train_") and not (folder / technique).exists()
    return "train.py" if is_merged else technique


def must_be_merged(script: str) -> bool:
    """True if the script's techniques are to be merged, as nobody has done it."""
    return not (REPOSITORY / script).exists() and (REPOSITORY / "tools" / "compose.py").exists()


def folder_with(
    folder: Path, script: str, *edits: tuple[str, str], loop: Sequence[str] = ()
) -> Path:
    """A folder like the repository's, with one script; its techniques are merged if nobody has.

    Each of the edits is a text that the script has once, and lines that are put before it. Those of
    `loop` begin each step: `step` counts from 1 there, and `rank` is the number of the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    path = folder / script
    if must_be_merged(script):
        techniques = script.removesuffix(".py").split("_")[1:]
        path.write_text(import_module("tools.compose").compose(techniques))
    else:
        shutil.copy(REPOSITORY / script_for(script), path)
    for place, lines in edits:
        replace(path, place, lines + place)
    if loop:
        before, begin, after = LOOP.split(path.read_text())
        counted = ["step, rank = run.step_number, run.group.rank", *loop]
        indented = "".join(f"            {line}\n" for line in counted)
        path.write_text(f"import os\nimport time\n\nimport torch\n{before}{begin}{indented}{after}")
    return folder


def commit(folder: Path) -> None:
    """Commit all files of a folder, which becomes a git repository if it is none."""
    name = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        [*name, "commit", "-q", "--allow-empty", "-m", "all"],
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
