"""Tensors of which each rank has a shard, by `train_fsdp.py`, and their files: a folder `shards-*`
per checkpoint. Without such tensors, nothing here needs other ranks."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.files import checksum
from runtime.group import SingleProcess

log = logging.getLogger(__name__)


def is_sharded(value: Any) -> bool:
    """Return True for a tensor of which each rank has a shard."""
    return hasattr(value, "to_local")


def shard_like(tensor: Tensor, example: Any) -> Tensor:
    """Return this rank's shard of a whole tensor if `example` is sharded, else the tensor."""
    if is_sharded(tensor) or not is_sharded(example):
        return tensor
    return fsdp().shard_like(tensor, example)


def group_for_writing(model: nn.Module, group: SingleProcess) -> SingleProcess:
    """Return the ranks of the thread that writes checkpoints: with a sharded model, its messages to
    other ranks must not mix with those of the training."""
    has_shards = any(map(is_sharded, model.parameters()))
    return fsdp().group_for_writing() if has_shards else group


def write_shards(state: dict[str, Any], folder: Path, group: SingleProcess) -> dict[str, Any]:
    """Write the sharded tensors to a new folder in `folder`; return the rest of the state and, if
    there are any, facts about them as `shards`. Raises OSError on all ranks."""
    has_shards = any(map(is_sharded, state.get("model", {}).values()))
    return fsdp().write_shards(state, folder, group) if has_shards else state


def read_shards(saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a checkpoint, with its `path`, with this rank's shards of its sharded tensors.

    Raises:
        UserError: a rank cannot read them, or the model is not sharded.
    """
    if "shards" not in saved:
        return saved
    parameter: Any = next(model.parameters())
    if not is_sharded(parameter):
        raise UserError(
            f"{saved['path']} is in shards, which train_fsdp.py alone resumes from; make whole "
            "files of the checkpoints of its run: python -m runtime.whole run=DIR"
        )
    return fsdp().read_shards(saved, parameter.device_mesh)


def fsdp() -> Any:
    """Return `runtime.fsdp`, which no other models need."""
    return import_module("runtime.fsdp")


def check_shards(state: dict[str, Any], folder: Path) -> None:
    """Compare the files of the sharded tensors, if any, of a checkpoint in a folder with their
    checksums.

    Raises:
        ValueError: a file has other content, or is elsewhere.
        OSError: a file cannot be read.
    """
    if "shards" not in state:
        return
    place, files = state["shards"]["folder"], state["shards"]["files"]
    for name in (place, *files):
        if name != Path(name).name:
            raise ValueError(f"{name} is not in the folder of the checkpoint")
    expected = {folder / place / name: value for name, value in files.items()}
    with ThreadPoolExecutor() as pool:
        for path, value in zip(expected, pool.map(checksum, expected), strict=True):
            if value != expected[path]:
                raise ValueError(f"wrong checksum of {path.relative_to(folder)}")


def remove_shards(folder: Path) -> None:
    """Remove the shards that no checkpoint in the folder names."""
    unnamed = set(folder.glob("shards-*"))
    for path in folder.glob("[!.]*.pt") if unnamed else ():
        try:
            state = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except Exception:  # damaged bytes raise errors of any type
            log.warning("%s cannot be read: no shards are removed", path)
            return
        if "shards" in state:
            unnamed.discard(folder / state["shards"]["folder"])
    for path in unnamed:
        shutil.rmtree(path)
