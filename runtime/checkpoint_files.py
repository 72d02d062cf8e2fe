"""Checkpoints and weights in files: which there are, and reading them.

A checkpoint is a folder `checkpoints/step-00000120` of a run. It holds `state.pt` and, of a run of
`train_fsdp.py`, one `shard-*.pt` of each rank. Both are files of `torch.save` with tensors and
plain values alone; `manifest.json` has their checksums. An empty file `best` says that no earlier
checkpoint of the run was better.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from conf.errors import UserError

log = logging.getLogger(__name__)

FORMAT = 4
"""Version of the folders; to be raised with each change that older ones do not fit."""

STATE, MANIFEST, BEST = "state.pt", "manifest.json", "best"

BEST_WEIGHTS = "model.safetensors"

NAME = re.compile(r"\.?step-(\d+)(\.old)?")
"""A folder that one of the same step is about to replace is hidden, and ends with `.old`."""

WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+")
"""Names that DDP and torch.compile leave in front of those of tensors."""


@dataclass(frozen=True)
class Shards:
    """A tensor in parts along its first dimension, which lie in files until they are used."""

    parts: list[Tensor]
    """That of each rank that wrote it, in the order of the ranks."""

    def whole(self) -> Tensor:
        return torch.cat(self.parts)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, that of the last step first."""
    steps = {path: NAME.fullmatch(path.name) for path in folder.glob("*") if path.is_dir()}
    found = [(int(match[1]), path.name, path) for path, match in steps.items() if match]
    return [path for *_, path in sorted(found, reverse=True)]


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or else those in it, which may be the folder of a run."""
    if (path / MANIFEST).exists():
        return [path]
    return newest_first(path / "checkpoints") or newest_first(path)


def best_of(paths: list[Path]) -> Path | None:
    """Return the best of a run's checkpoints, the newest first; None if no one is."""
    return next((path for path in paths if (path / BEST).exists()), None)


def fingerprint(path: Path) -> str:
    """Return the checksum of a file, as it stands in a manifest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint to the host; where it holds a tensor in shards, there is None. An error of
    any type if it is no checkpoint, damaged, or of another version."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, that of this version {FORMAT}")
    files = manifest["files"]
    with ThreadPoolExecutor() as pool:
        found = pool.map(fingerprint, [folder / Path(name).name for name in files])
        for name, actual in zip(files, found, strict=True):
            if actual != files[name]:
                raise ValueError(f"{name} is not as it was written")
    state = load_tensors(folder / STATE)
    if missing := {STATE, *state["shards"]} - files.keys():
        raise ValueError(f"its manifest lacks {', '.join(sorted(missing))}")
    with_shards(state, folder)  # they can be read
    return state


def with_shards(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint with `Shards` of each tensor that it holds in shards."""
    # Each rank's tensors by name, such as `/model/conv.weight`
    ranks = [load_tensors(folder / name, mmap=True) for name in state["shards"]]
    names = ranks[0].keys() if ranks else ()

    def filled(name: str, value: Any) -> Any:
        return Shards([rank[name] for rank in ranks]) if name in names else value

    return map_named(filled, state)


def map_named(function: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """Return nested dicts and lists with `function(name, value)` in place of each other value;
    names are such as `/model/conv.bias`."""
    if isinstance(tree, dict):
        return {key: map_named(function, value, f"{name}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_named(function, x, f"{name}/{n}") for n, x in enumerate(tree))
    return function(name, tree)


def load_tensors(path: Path, mmap: bool = False) -> Any:
    """Read a file of `torch.save` to the host, or with `mmap` each tensor when it is used. An error
    of any type if it is damaged, or holds more than tensors and plain values, which may be code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if "weights_only" not in str(error):
            raise
        # PyTorch advises to run whatever is in the file.
        raise ValueError("damaged, or more than tensors and plain values") from error


def read_weights(source: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors by name from a `.safetensors` or `.pt` file, a checkpoint, or the folder of a
    run, and the facts about its data that a run wrote with them; {} for any other file. A UserError
    if there is no such file, or it holds no weights."""
    path = weights_in(Path(source)) if Path(source).is_dir() else Path(source)
    facts: dict[str, Any] = {}
    try:
        if path.is_dir():
            state = with_shards(read_state(path), path)
            saved, facts = state.get("weights", state["model"]), state["facts"]
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        else:
            saved = dict(load_tensors(path))
    except Exception as error:  # damaged bytes and foreign classes raise errors of any type
        reason = str(error).partition("\n")[0] or repr(error)
        raise UserError(
            f"model.weights={source}: {path} cannot be read ({reason}); give imagenet, a "
            ".safetensors or .pt file that holds tensors by name, or the folder of a run"
        ) from error
    for key in ("model", "state_dict", "model_state_dict", "net"):  # of any library
        if isinstance(saved.get(key), dict):
            saved = saved[key]
    weights = {}
    for name, value in saved.items():
        tensor = value.whole() if isinstance(value, Shards) else value
        if isinstance(tensor, Tensor):
            weights[WRAPPERS.sub("", name)] = tensor
    return weights, facts


def weights_in(run: Path) -> Path:
    """Return the best weights in the folder of a run, or else its newest checkpoint, which it may
    be; a UserError if there are none."""
    for folder in (run / "checkpoints", run):
        if (folder / BEST_WEIGHTS).is_file():
            return folder / BEST_WEIGHTS
    found = checkpoints_in(run)
    if not found:
        raise UserError(
            f"{run} has no weights; expected {run}/checkpoints/{BEST_WEIGHTS}, which a run writes "
            "at the end of its first epoch"
        )
    return best_of(found) or found[0]


def read_checkpoint(resume: str | None, folder: Path) -> dict[str, Any] | None:
    """Read the newest undamaged checkpoint that `resume` names, with its `path`; `folder` has the
    run's own. None: there is nothing to resume. A UserError: there are only damaged ones, or none.

    Another run's checkpoint comes without its best metrics: the weights that reached them are in
    that run's folder.
    """
    if resume is None:
        return None
    found = newest_first(folder)  # a restart repeats the command
    if found and resume != "auto":
        log.info("resuming in %s, not from resume=%s: this run was started before", folder, resume)
    elif not found and resume == "auto":
        log.info("resume=auto: no checkpoint in %s, starting a fresh run", folder)
        return None
    elif not found:
        found = checkpoints_in(Path(resume))
    for path in found:
        try:
            state = read_state(path)
        except Exception as error:  # damaged bytes raise errors of any type
            reason = str(error).partition("\n")[0][:200] or repr(error)
            log.warning("%s is damaged or not a checkpoint (%s)", path, reason)
            continue
        if path.parent.resolve() != folder.resolve():
            state["progress"] |= {"best_metrics": {}, "best_by_class": {}}
        return state | {"path": str(path)}
    raise UserError(
        f"resume={resume}: there is no checkpoint that can be read ({len(found)} found); "
        "give the folder of a run, one of its checkpoints/step-*, or auto"
    )
