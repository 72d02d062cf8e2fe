"""Sharded tensors of `train_fsdp.py` in checkpoints; other scripts do not load their modules."""

from typing import Any

from torch import Tensor

from conf.errors import UserError


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor if `example` is sharded, else the tensor."""
    if not hasattr(example, "to_local") or hasattr(tensor, "to_local"):
        return tensor
    from runtime.distributed import split_like

    return split_like(tensor, example)


def read_part(saved: dict[str, Any], key: str, example: Tensor) -> Any:
    """Read `saved[key]` with this rank's shards of its sharded tensors; every rank calls it.

    Args:
        saved: checkpoint with its `path`.
        key: key of a part of the state.
        example: a parameter of the model, sharded over the ranks that read.

    Raises:
        UserError: a rank cannot read them, or the model is not sharded.
    """
    if "shards" not in saved:
        return saved[key]
    if not hasattr(example, "to_local"):
        raise UserError(
            f"{saved['path']} is in shards, which train_fsdp.py alone resumes from; make whole "
            "files of the checkpoints of its run: python -m runtime.whole run=DIR"
        )
    from runtime.distributed import read_shards

    return read_shards(saved, key, example)
