"""Device, threads, seed, precision and determinism of a process."""

import logging
import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import torch

from conf.errors import UserError
from conf.schema import Config

log = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def setup(cfg: Config, local_rank: int | None = None) -> torch.device:
    """Choose the device of this process, its precision and its use of CPUs.

    Args:
        cfg: configuration of the run.
        local_rank: number of this process on its machine; None: it is the only process of the run.

    Returns:
        Device; a GPU is made current.

    Raises:
        UserError: as `resolve_device()`, or torchrun has started several processes of a script for
            one.
    """
    if local_rank is None and num_processes() > 1:
        script = Path(sys.argv[0]).name
        raise UserError(
            f"{script} is for one process, but torchrun has started {num_processes()}; "
            f"start it with python {script}, or use a script of several processes"
        )
    device = resolve_device(cfg.device, local_rank or 0)
    if device.type == "cpu":
        set_threads()
    set_numerics(cfg)
    return device


def set_threads() -> None:
    """Use no more threads than a container may use CPUs, of whose quota OpenMP does not know.

    Where other programs keep the CPUs busy, too, log what helps: a thread of OpenMP that waits for
    another one, which a third program keeps from running, occupies its CPU.
    """
    from loaders.limits import cpus_per_rank  # which commands need only here

    num_cpus = cpus_per_rank()
    if num_cpus < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_cpus)
    load, all_cpus = os.getloadavg()[0], os.cpu_count() or 1
    is_busy = load > 2 * all_cpus  # the threads of a run that has just ended count, too
    if is_busy and torch.get_num_threads() > 1 and "OMP_WAIT_POLICY" not in os.environ:
        log.info(
            "other programs use the CPUs (%d), too (load %.0f): the environment variable "
            "OMP_WAIT_POLICY=passive makes this run faster",
            all_cpus,
            load,
        )


def num_processes() -> int:
    """Return the number of processes that torchrun has started; without it, 1."""
    return int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK") else 1


def resolve_device(name: str, local_rank: int = 0, driver: Path = NVIDIA_DRIVER) -> torch.device:
    """Return the device of this process; a GPU is made current.

    Args:
        name: `auto`, `cpu`, `cuda` (both with the GPU number `local_rank`) or `cuda:1`.
        local_rank: number of this process on its machine.
        driver: file with the version of the NVIDIA driver, if there is one.

    Raises:
        UserError: there is no such device, or with `auto` a GPU that this PyTorch cannot use, of
            which PyTorch would only warn.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if num_gpus == 0 and not is_hidden and driver.exists():
            version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", driver.read_text())
            cuda = torch.version.cuda
            raise UserError(
                f"there is an NVIDIA driver {version[1] if version else ''}, but torch "
                f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}, "
                "finds no GPU that it can use: set device=cpu to train on the CPU, else install a "
                "newer driver or a torch for it, see docs/installation.md"
            )
        name = "cuda" if num_gpus else "cpu"
    if name == "cpu":
        return torch.device(name)
    given = torch.device(name).index
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
    """Seed Python, NumPy and torch on all devices, with other numbers for each pair of seed and
    rank; the plan of the data has its own generator."""
    # torch's generator on the CPU reads 32 bits of its seed.
    number = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def set_numerics(cfg: Config) -> None:
    """Choose the precision of float32 and the determinism of CUDA.

    To be called before anything is computed: cuBLAS reads the configuration of its workspaces once.
    """
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
