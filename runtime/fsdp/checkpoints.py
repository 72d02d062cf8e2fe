"""Checkpoints of sharded models, by torch.distributed.checkpoint: each rank has its own shards.

The file `step-00000123.pt` of such a run holds all but the sharded tensors, which lie in a folder
`shards-*` in the same place. All ranks have to see this folder. Its table of contents is a pickle,
which is refused if it names anything but descriptions of tensors.
"""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, empty

from conf.errors import UserError
from conf.files import checksum, sync_folder
from runtime.distributed import ProcessGroup
from runtime.shards import check_shards

OF_TABLES = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
}
"""What a table of contents names besides dtypes and the classes of torch.distributed.checkpoint."""


def group_for_writing() -> ProcessGroup:
    """Return all ranks, whose messages do not mix with those of other groups; every rank calls
    it."""
    return ProcessGroup(dist.new_group(backend="gloo"))


def write_shards(state: dict[str, Any], folder: Path, group: ProcessGroup) -> dict[str, Any]:
    """Write the sharded tensors of nested values to a new folder in `folder`; every rank calls it.

    Returns:
        The values with None in place of these tensors, and `shards`: the name of the folder, and
        the checksums of the files in it.

    Raises:
        OSError: a rank could not write.
    """
    tensors: dict[str, Tensor] = {}

    def without_shards(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensors[name] = value
        return None

    state = map_named(without_shards, state)
    path = group.broadcast_from_rank0(lambda: folder / f"shards-{uuid4().hex[:8]}")
    writer = dcp.FileSystemWriter(path)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group.handle)
    except dcp.CheckpointException as error:  # a BaseException, on all ranks
        rank, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"{path} could not be written on rank {rank} ({reason!r})") from error
    return state | {"shards": {"folder": path.name, "files": _checksums(path, group)}}


def _checksums(path: Path, group: ProcessGroup) -> dict[str, int]:
    """Return the checksums of the files in a folder; each rank computes its share.

    Raises:
        OSError: on all ranks, where one cannot read them or sees another folder.
    """
    mine: OSError | tuple[list[str], dict[str, int]]
    try:
        files = sorted(path.iterdir())
        share = files[group.rank :: group.world_size]
        mine = [x.name for x in files], {x.name: checksum(x) for x in share}
        sync_folder(path)
    except OSError as error:
        mine = error
    answers: list[Any] = group.gather(mine)
    for number, answer in enumerate(answers):
        if isinstance(answer, OSError):
            raise OSError(f"{path} cannot be read on rank {number} ({answer})")
        if answer[0] != answers[0][0]:
            raise OSError(
                f"rank {number} sees other files in {path}; use a folder that all ranks share"
            )
    return {name: value for _, sums in answers for name, value in sums.items()}


def read_shards(saved: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Return a checkpoint, which has its `path`, with this rank's shards of its sharded tensors;
    fewer or more ranks than those of the mesh may have written it. Every rank calls it.

    Raises:
        UserError: a rank cannot read the files.
    """
    new = partial(empty, device_mesh=mesh, placements=[Shard(0)])
    try:
        return _read(saved, Path(saved["path"]), new)
    except (OSError, dcp.CheckpointException) as error:
        reason = str(error).rstrip().rpartition("\n")[2]
        raise UserError(
            f"{saved['path']}: its shards cannot be read on all ranks ({reason}); "
            "they need a common file system"
        ) from error


def read_whole(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Read the checkpoint `path` in one process: its state, with whole tensors in place of shards.

    Raises:
        OSError, ValueError: the shards are damaged.
    """
    check_shards(state, path.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch.distributed is not in use
        return _read(state, path, torch.empty)


def _read(state: dict[str, Any], path: Path, new: Callable[..., Tensor]) -> dict[str, Any]:
    """Read the sharded tensors of the checkpoint `path` into `new` ones, and put these into its
    state."""
    folder = path.parent / state["shards"]["folder"]
    _check_table(folder / ".metadata")
    reader = dcp.FileSystemReader(folder)
    tensors = {
        name: new(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, dcp.TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader)
    others = {key: value for key, value in state.items() if key != "shards"}
    return map_named(lambda name, value: tensors.get(name, value), others)


class _Table(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OF_TABLES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check_table(path: Path) -> None:
    """Raise UserError if reading the table of contents of shards could run code."""
    try:
        with path.open("rb") as file:
            _Table(file).load()
    except OSError:
        raise
    except Exception as error:  # damaged bytes raise errors of any type
        raise UserError(
            f"{path} is no table of shards as train_fsdp.py writes it ({error}); "
            "resume from a run of your own"
        ) from error


def map_named(function: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """Return nested dicts and lists with `function(name, value)` in place of each other value;
    names are such as `/model/conv.bias`."""
    if isinstance(tree, dict):
        return {key: map_named(function, value, f"{name}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_named(function, value, f"{name}/{n}") for n, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(name, tree)
