"""Device, memory and seed."""

import ctypes
import logging
import random
import sys

import numpy as np
import torch

log = logging.getLogger(__name__)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this process. A GPU is made current; on a CPU, freed memory is kept from now on.

    Args:
        name: `auto`, `cpu`, `cuda` (both with the GPU number `local_rank`) or `cuda:1`.
        local_rank: number of this process on its machine.

    Raises:
        ValueError: there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        _keep_freed_memory()
        return torch.device("cpu")
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError as error:
        raise ValueError(f"device={name} is unknown; use auto, cpu, cuda or cuda:1") from error
    if device.type != "cuda":
        raise ValueError(f"device={name} is not supported; use auto, cpu, cuda or cuda:1")
    index = local_rank if device.index is None else device.index
    if index >= num_gpus:
        raise ValueError(
            f"device={name} with local_rank={local_rank} needs GPU {index}, but {num_gpus} are "
            f"visible; start at most {num_gpus} processes per machine or use device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _keep_freed_memory() -> None:
    """Let malloc keep what a step frees for the next one.

    Else it returns memory to the system in some runs and not in others, and a step pays a page fault for
    every 4 KB of activations.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; its man page names the two options and the largest value
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_mmap_threshold, 32 << 20)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices; the data's plan has a generator of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def amp_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of autocast's low precision; a choice that makes this device slow is logged.

    Raises:
        ValueError: `name` is neither float16 nor bfloat16.
    """
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"amp.dtype={name} is unknown; use float16 or bfloat16")
    if name == "float16" and device.type == "cpu":
        log.info("float16 makes most CPUs many times slower: try amp.dtype=bfloat16 or train.py")
    return dtypes[name]
