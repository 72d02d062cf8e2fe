"""Out of memory: what filled it, and what would help."""

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from conf.errors import MEMORY, UserError, cause_of, place_of

MIB = 2**20
REPOSITORY = Path(__file__).resolve().parents[1]

_run: Any = None
"""Weak reference to the run of this process, which `main` cannot hand to errors that end it."""


def watch(run: Any) -> None:
    """Explain the errors of this `Run` from here on, as long as it is used."""
    global _run
    _run = weakref.ref(run)


def is_out_of_memory(error: Exception) -> bool:
    """Return True for an error of an allocator: of PyTorch, Python or a library."""
    has_type = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return has_type or (cause_of(error) or "").endswith(MEMORY)


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turn a lack of memory in a block into a UserError: the place, what is held, what helps."""
    try:
        yield
    except Exception as error:
        run = _run and _run()
        if run is None or not is_out_of_memory(error):
            raise
        said = re.split(r"\. (?=[A-Z])", str(error).partition("\n")[0])
        held = held_by(run)
        sizes = ", ".join(f"{name} {size / MIB:,.0f} MiB" for name, size in held.items() if size)
        if run.cfg.profile.memory and run.device.type == "cuda":
            from runtime.profile import write_memory

            write_memory(run.run_dir, run.group.rank)
        raise UserError(
            f"out of memory{place_of(error)}: {'. '.join(said[:2])}\n"
            f"{run.device} of rank {run.group.rank} holds {sizes}\n"
            f"to need less: {', '.join(help_for(held, run))}; see docs/cost.md"
        ) from error


def held_by(run: Any) -> dict[str, int]:
    """Return what this rank's memory holds, in bytes, while the error's frames still hold it."""
    parameters, others = list(run.model.parameters()), run.state.keys() - {"model", "run"}
    held = {
        "weights": bytes_of([parameters, *run.model.buffers()]),
        "gradients": bytes_of([p.grad for p in parameters]),
        **{name: bytes_of(run.state[name].state_dict()) for name in sorted(others)},
    }
    if run.device.type != "cuda":
        used = psutil.Process().memory_info().rss
        return held | {"activations and the program": max(0, used - sum(held.values()))}
    used, reserved = torch.cuda.memory_allocated(run.device), torch.cuda.memory_reserved(run.device)
    free, total = torch.cuda.mem_get_info(run.device)
    held["activations"] = max(0, used - sum(held.values()))
    return held | {"cache": reserved - used, "others": total - free - reserved, "free": free}


def help_for(held: dict[str, int], run: Any) -> list[str]:
    """Return the scripts and keys that would help and are there, the most helpful first."""
    smaller = ["train_accumulate.py accumulate_steps=auto", "train_recompute.py"]
    smaller += ["train_amp.py amp.dtype=bfloat16"] * (run.precision is torch.float32)
    sharded = ["train_fsdp.py on more GPUs"]
    state = sum(held.get(name, 0) for name in ("weights", "gradients", "optimizer"))
    activations = sum(size for name, size in held.items() if name.startswith("activations"))
    advice = smaller + sharded if activations > state else sharded + smaller
    there = [each for each in advice if (REPOSITORY / each.split()[0]).exists()]
    return [*there, "a smaller global_batch_size"]


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; of one that is sharded, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(state: Any) -> int:
    """Return the bytes of this rank's shards of all tensors in nested values."""
    from loaders.batch import tensors_of  # which commands need only here

    return sum(local(tensor).nbytes for tensor in tensors_of(state))
