"""Device, seed, precision and determinism."""

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from conf.schema import Config

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this process; a GPU is made current.

    Args:
        name: `auto`, `cpu`, `cuda` (both with the GPU number `local_rank`) or `cuda:1`.
        local_rank: number of this process on its machine.

    Raises:
        ValueError: there is no such device, or with `auto` one that this PyTorch cannot use.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and num_gpus == 0:
        _check_that_no_gpu_is_left_out()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
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


def _check_that_no_gpu_is_left_out() -> None:
    """Raises ValueError where a GPU is there and not hidden: PyTorch only warns that it cannot use it."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not NVIDIA_DRIVER.exists():
        return
    driver = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", NVIDIA_DRIVER.read_text())
    built_for = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
    raise ValueError(
        f"there is an NVIDIA driver {driver[1] if driver else ''}, but torch {torch.__version__}, which "
        f"{built_for}, finds no GPU that it can use: set device=cpu if that is meant, else install a newer "
        "driver or a torch for this one, as docs/installation.md says"
    )


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch on all devices; the data's plan has a generator of its own.

    Args:
        seed: 0 or more.
        rank: every rank draws other numbers, and none that another seed draws on any rank.
    """
    # torch's generator on the CPU reads 32 bits of its seed.
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def set_numerics(cfg: "Config") -> None:
    """Choose how CUDA computes in float32, and whether it gives the same bits again.

    To be called before anything is computed: cuBLAS looks at its workspaces once.

    Args:
        cfg: `fp32_precision` and `deterministic`.
    """
    # torch.backends' older names set the newer `fp32_precision` of matmul, conv and rnn as well; the other
    # way round, torch.compile fails, which reads the older ones. Null gives PyTorch's defaults.
    torch.backends.cuda.matmul.allow_tf32 = cfg.fp32_precision == "tf32"
    torch.backends.cudnn.allow_tf32 = cfg.fp32_precision != "ieee"
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = cfg.deterministic
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # a call takes seconds
        torch.use_deterministic_algorithms(cfg.deterministic)


def amp_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of autocast's low precision.

    Args:
        name: `float16`, `bfloat16`, or `auto`: float16 on CUDA; on a CPU bfloat16, since most CPUs take
            many times as long in float16.
        device: the one that computes.

    Raises:
        ValueError: another name.
    """
    dtypes = {
        "auto": torch.float16 if device.type == "cuda" else torch.bfloat16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }
    if name not in dtypes:
        raise ValueError(f"amp.dtype={name} is unknown; use auto, float16 or bfloat16")
    return dtypes[name]
