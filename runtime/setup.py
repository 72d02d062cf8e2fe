"""Device, threads, seed, precision and determinism of a process."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch

from conf.errors import UserError
from conf.schema import Config

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def setup(cfg: Config, local_rank: int | None = None) -> torch.device:
    """Choose the device of this process, its precision and its use of CPUs. `local_rank` is its
    number on the machine; None: it is the only process of the run, or a UserError is raised."""
    if local_rank is None and num_processes() > 1:
        script = Path(sys.argv[0]).name
        raise UserError(
            f"{script} is for one process, but torchrun has started {num_processes()}; "
            f"start it with python {script}, or use a script of several processes"
        )
    device = resolve_device(cfg.device, local_rank or 0)
    # A container may use fewer CPUs than it sees, of whose quota OpenMP does not know.
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        from loaders.limits import cpus_per_rank  # which commands need only here

        if (num_cpus := cpus_per_rank()) < torch.get_num_threads():
            torch.set_num_threads(num_cpus)
    set_numerics(cfg)
    return device


def num_processes() -> int:
    """Return the number of processes that torchrun has started; without it, 1."""
    return int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK") else 1


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of this process; a GPU is made current. `name` is `auto`, `cpu`, `cuda`
    (both with the GPU number `local_rank`) or, for one process, `cuda:1`. With `auto`, a UserError
    is raised for a GPU that this PyTorch cannot use, of which PyTorch only warns."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if name == "auto" and num_gpus == 0 and not is_hidden and NVIDIA_DRIVER.exists():
        raise UserError(
            f"there is an NVIDIA driver, but torch {torch.__version__} finds no GPU that it can "
            "use: set device=cpu to train on the CPU, else install a newer driver or a torch for "
            "it"
        )
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    given = None if name == "auto" else torch.device(name).index
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if given is not None and on_machine > 1:
        raise UserError(
            f"device={name} is one GPU, for {on_machine} processes of this machine; use device=cuda"
            ", and choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    index = local_rank if given is None else given
    if index >= num_gpus:
        fix = f"use --nproc_per_node={num_gpus} or" if num_gpus else "use"
        raise UserError(
            f"device={name} with local_rank={local_rank} needs GPU {index}, but the number of "
            f"visible GPUs is {num_gpus}; {fix} device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch with other numbers for each pair of seed and rank."""
    # torch's generator on the CPU reads 32 bits of its seed.
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def set_numerics(cfg: Config) -> None:
    """Choose the precision of float32 and the determinism of CUDA, before anything is computed:
    cuBLAS reads the configuration of its workspaces once."""
    # torch.backends' older names set the newer `fp32_precision` of matmul, conv and rnn, too; the
    # other way round, torch.compile, which reads the older ones, fails. Null: PyTorch's defaults.
    torch.backends.cuda.matmul.allow_tf32 = cfg.fp32_precision == "tf32"
    torch.backends.cudnn.allow_tf32 = cfg.fp32_precision != "ieee"
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = cfg.cudnn_benchmark and not cfg.deterministic
    torch.backends.cudnn.deterministic = cfg.deterministic
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # a call takes seconds
        torch.use_deterministic_algorithms(cfg.deterministic)
