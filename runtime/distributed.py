"""The process group of a run that torchrun started."""

import atexit
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import nn

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)


def local_rank() -> int:
    """Number of this process on its machine, from torchrun.

    Raises:
        RuntimeError: the script was not started by torchrun.
    """
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            "LOCAL_RANK is not set: start this script with torchrun, for example "
            "torchrun --standalone --nproc_per_node=2 train_ddp.py"
        )
    return int(os.environ["LOCAL_RANK"])


def init_process_group(cfg: "Config", device: torch.device) -> tuple[int, int]:
    """Join the process group that torchrun prepared; left again on every way out of the process.

    Returns:
        Global rank of this process and world size.

    Raises:
        ValueError: `distributed.backend` is unknown or does not fit the device, or Hydra's multirun
            was asked for.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "Hydra's multirun (-m) does not work under torchrun: the ranks of all jobs would share one "
            "process group; start torchrun once for each job, for example in a shell loop"
        )
    backend = cfg.distributed.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend not in ("nccl", "gloo") or (backend == "nccl" and device.type != "cuda"):
        raise ValueError(
            f"distributed.backend={backend} does not work with device={device}; use gloo, "
            "or nccl on CUDA"
        )
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=cfg.distributed.timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    atexit.register(leave_process_group)
    return dist.get_rank(), dist.get_world_size()


def leave_process_group() -> None:
    """Destroy the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with SyncBatchNorm on CUDA; on the CPU, where it does not exist, BatchNorm stays."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        log.info(
            "SyncBatchNorm needs CUDA: on the CPU each rank keeps BatchNorm statistics of its own"
        )
    return model


def visible_gpus(device: torch.device) -> list[int]:
    """Numbers of the GPUs that DataParallel uses; with fewer than two, says that nothing is gained.

    Raises:
        ValueError: the run is on the CPU though GPUs are visible, which DataParallel would take.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type != "cuda":
        raise ValueError(
            f"device={device}: DataParallel takes every visible GPU; hide the {num_gpus} GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty), or use train.py"
        )
    if num_gpus < 2:
        log.info(
            "DataParallel with %d GPUs: it runs, but nothing is gained over train.py", num_gpus
        )
    return list(range(num_gpus))
