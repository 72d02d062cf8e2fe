"""A run on several devices: torchrun, torch's process group, and models spread over ranks."""

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Default arguments of its functions are the process group that exists at its first import. If DDP
# does that import, gloo's threads outlive the group, into the end of Python.
import torch.distributed.nn.functional
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import nn

from conf.errors import UserError, counted
from conf.schema import Config
from runtime.blocks import BATCH_NORMS
from runtime.process_group import ProcessGroup

log = logging.getLogger(__name__)

COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers say how many processes they have started."""


def local_rank() -> int:
    """Return the number of this process on its machine, from torchrun; 0 if python started it. A
    UserError if another launcher has started several, each of which would be a run of its own."""
    fix = f"start it with torchrun --standalone --nproc_per_node=2 {Path(sys.argv[0]).name}"
    if os.environ.get("RANK"):
        if not os.environ.get("LOCAL_RANK"):
            raise UserError(f"RANK is set, but LOCAL_RANK is not; {fix}")
        return int(os.environ["LOCAL_RANK"])
    for name in COUNTS:
        count = os.environ.get(name) or "1"
        if count != "1":
            raise UserError(
                f"{name}={count}, but RANK is not set: {count} runs would start; {fix}, on each "
                f"machine, or unset {name} for one process"
            )
    return 0


def init_process_group(cfg: Config, device: torch.device) -> ProcessGroup:
    """Join the process group that torchrun prepared, or make one of this process alone. From here
    on, ranks other than 0 log warnings only. `entry_point` leaves the group at the end."""
    backend = cfg.distributed.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    elif backend == "nccl" and device.type != "cuda":
        raise UserError(f"distributed.backend=nccl does not work with device={device}; use gloo")
    if os.environ.get("RANK"):
        store, rank, world_size = _store_of_torchrun()
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
        log.info("one process; torchrun --nproc_per_node=2 %s starts two", Path(sys.argv[0]).name)
    # NCCL writes its record of the last collectives there before it ends a process.
    flight_record = f"{Path(cfg.output_dir).absolute()}/flight_record_rank_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", flight_record)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in it
    dist.init_process_group(
        # With NCCL, gloo carries the small messages that lie on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=cfg.distributed.timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        dist.set_debug_level(dist.DebugLevel.INFO)  # DDP names parameters without gradients
    if rank != 0:
        form = f"[rank {rank}] %(message)s"
        logging.basicConfig(level=logging.WARNING, format=form, force=True)
    return ProcessGroup(dist.group.WORLD)


def convert_sync_batchnorm(cfg: Config, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with SyncBatchNorm on CUDA, unless `distributed.sync_batchnorm` is off."""
    if not cfg.distributed.sync_batchnorm:
        return model
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        log.info("SyncBatchNorm needs CUDA: on the CPU each rank normalises by its own share")
    return model


def sync_buffers(state: dict[str, Any]) -> None:
    """Broadcast rank 0's buffers of the models in the state, such as BatchNorm's statistics."""
    for value in state.values():
        if hasattr(value, "buffers"):
            for buffer in value.buffers():
                dist.broadcast(buffer, src=0)


def visible_gpus(cfg: Config, device: torch.device) -> list[int]:
    """Return the indices of all visible GPUs for DataParallel, first `device`, where outputs are
    gathered."""
    if cfg.model.compile:
        raise UserError(
            "model.compile=true does not work with DataParallel, whose copies of the model would "
            "all compute with the weights of the first; use DDP"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type != "cuda":
        raise UserError(
            f"device={device}, but train_dp.py uses all visible GPUs ({num_gpus}); set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU, or use train.py"
        )
    if num_gpus < 2:
        log.info("DataParallel with %s is no faster than train.py", counted(num_gpus, "GPU"))
    return sorted(range(num_gpus), key=lambda number: number != device.index)


def _store_of_torchrun() -> tuple[Any, int, int]:
    """Return the key-value store of this attempt, this process's rank and the number of ranks."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            "Hydra's multirun (-m) does not work under torchrun: the ranks of all jobs would share "
            "one process group; start torchrun once for each job, for example in a shell loop"
        )
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun's store has the addresses of earlier attempts, too. The one of rank 0, which
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 asks for where nodes count attempts differently, is new.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store, rank, world_size
