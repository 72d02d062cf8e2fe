"""Files of the tensors that `train_fsdp.py` leaves sharded: a folder `shards-*` for each checkpoint that names it."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.files import checksum

log = logging.getLogger(__name__)


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's shard of a tensor, which is whole on all ranks, if `example` is sharded; else the tensor."""
    if not hasattr(example, "to_local") or hasattr(tensor, "to_local"):
        return tensor
    from runtime.distributed import split_like

    return split_like(tensor, example)


def read_part(saved: dict[str, Any], key: str, example: Tensor) -> Any:
    """Read `saved[key]` of a checkpoint, with this rank's shards of its sharded tensors; every rank calls it.

    Args:
        saved: checkpoint with its `path`.
        key: of a part of the state.
        example: a parameter of the model, sharded over the ranks that read.

    Raises:
        UserError: a rank cannot read them, or the model is not sharded.
    """
    if "shards" not in saved:
        return saved[key]
    if not hasattr(example, "to_local"):
        raise UserError(
            f"{saved['path']} is in shards, which train_fsdp.py alone resumes from; make whole files of the "
            "checkpoints of its run: python -m runtime.whole run=DIR"
        )
    from runtime.distributed import read_shards

    return read_shards(saved, key, example)


def check_shards(state: dict[str, Any], folder: Path) -> None:
    """Compare the files of a checkpoint's sharded tensors with their checksums.

    Args:
        state: of the checkpoint; one without shards is right.
        folder: where the checkpoint lies.

    Raises:
        ValueError: a file has other content.
        OSError: a file cannot be read.
    """
    if "shards" not in state:
        return
    expected = {
        folder / state["shards"]["folder"] / name: value
        for name, value in state["shards"]["files"].items()
    }
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
        except Exception as error:  # damaged bytes raise errors of any type
            log.warning("%s cannot be read (%s): no shards are removed", path, error)
            return
        if "shards" in state:
            unnamed.discard(folder / state["shards"]["folder"])
    for path in unnamed:
        shutil.rmtree(path)
