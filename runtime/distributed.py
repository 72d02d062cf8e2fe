"""All that several processes need: their group, its collectives, and models that are spread over them.

No other file but the entry points uses torch.distributed.
"""

import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist

# The default arguments of its functions are the process group that exists when it is first imported,
# which DDP does: gloo's threads would then outlive the group, into the end of Python.
import torch.distributed.nn.functional
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from conf.mistakes import is_mistake, is_torchrun
from runtime import watch
from runtime.group import Alone

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
NCCL_WAITS_LONGER_S = 60.0


class ProcessGroup(Alone):
    """The ranks of the run, as its machinery asks them: on gloo, beside the collectives of training."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.wishes: Tensor | None = None
        self.work: Any = None

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        agreement = self.last_agreement()
        self.wishes = torch.tensor(wishes, dtype=torch.int32)
        self.work = dist.all_reduce(self.wishes, dist.ReduceOp.MAX, async_op=True)
        return agreement

    def last_agreement(self) -> list[bool]:
        if self.wishes is None:
            return []
        self.work.wait()
        agreement, self.wishes = self.wishes.bool().tolist(), None
        return agreement

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_rank_0(self, read: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        tensors: list[Tensor] = []
        if self.rank == 0:
            try:
                answer[0] = _without_tensors(read(), tensors)
            except Exception as error:
                error.is_bug = not is_mistake(error)  # type: ignore[attr-defined]
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return _with_tensors(answer[0], iter(tensors))

    def mean(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor / self.world_size

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        if not isinstance(example, DTensor):
            return tensor
        # Every rank has the whole tensor, so that nothing has to be sent.
        whole = tensor.to(example.device)
        return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None)


class _Place:
    """Stands for a tensor that is sent by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _without_tensors(tree: Any, tensors: list[Tensor]) -> Any:
    """The nested values with a place for each tensor; the tensors are added to the list."""
    if isinstance(tree, Tensor):
        tensors.append(tree.contiguous())
        return _Place(tree)
    if isinstance(tree, dict):
        return {key: _without_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_without_tensors(value, tensors) for value in tree)
    return tree


def _with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """What `_without_tensors` left, with the tensors of rank 0, which alone has any."""
    if isinstance(tree, _Place):
        tensor = next(tensors, None)
        if tensor is None:
            tensor = torch.empty(tree.shape, dtype=tree.dtype)
        dist.broadcast(tensor, src=0)
        return tensor
    if isinstance(tree, dict):
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_tensors(value, tensors) for value in tree)
    return tree


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


def init_process_group(cfg: "Config", device: torch.device) -> ProcessGroup:
    """Join the process group that torchrun prepared; left again on every way out of the process.

    Rank 0 alone reports from now on; the others only warn.

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
    faulthandler.enable()
    # The argument of DDP whose newer name torch 2.11 does not know.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, timeout = open_store(), timedelta(seconds=cfg.distributed.timeout_s)
    folder = Path(cfg.output_dir).absolute()
    os.environ.setdefault(watch.FLIGHT_RECORD, f"{folder}/flight_record_rank_")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    dist.init_process_group(
        # With NCCL, gloo carries the small messages that lie on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    atexit.register(leave_process_group)
    if backend == "nccl":
        # Its own watchdog ends the process without a word about the ranks.
        patience = timedelta(seconds=NCCL_WAITS_LONGER_S)
        dist.distributed_c10d._get_default_group()._get_backend(device)._set_default_timeout(
            timeout + patience
        )
    dump = "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"
    watch.start_telling(
        *(store, rank, world_size),
        watch.DeviceWork(device),
        cfg.distributed.timeout_s,
        getattr(torch._C._distributed_c10d, dump, bytes),
    )
    if rank != 0:
        _only_warn(rank)
    elif not_dividing := numbers_of_ranks_that_do_not_divide(cfg.global_batch_size, world_size):
        log.warning(
            "global_batch_size=%d cannot be divided among %s ranks: the run would end if as many machines "
            "were left of --nnodes=%s",
            *(cfg.global_batch_size, not_dividing, os.environ["ELASTIC_NNODES"]),
        )
    return ProcessGroup()


def _only_warn(rank: int) -> None:
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    root = logging.getLogger()
    root.handlers = [console]
    root.setLevel(logging.WARNING)


def numbers_of_ranks_that_do_not_divide(global_batch_size: int, world_size: int) -> str:
    """Of those that launch/elastic_torchrun.py may start beside the number that there are now."""
    if "ELASTIC_NNODES" not in os.environ:
        return ""
    fewest, _, most = os.environ["ELASTIC_NNODES"].partition(":")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    numbers = (per_node * nodes for nodes in range(int(fewest), int(most or fewest) + 1))
    return ", ".join(str(n) for n in numbers if global_batch_size % n and n != world_size)


def open_store() -> dist.Store:
    """The key-value store of torchrun; a part of its own for each restart.

    A restarted rank would otherwise read the addresses of processes that are gone. On several nodes,
    where agents may count restarts differently, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each
    attempt another store, and rank 0 has to open it.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not is_shared and os.environ["RANK"] == "0",
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "0"
    return dist.PrefixStore(f"attempt{attempt}", store)


def leave_process_group() -> None:
    """Destroy the process group if there is one."""
    watch.stop_telling()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_with_the_launcher() -> None:
    """Ask Linux for SIGTERM when torchrun dies, or leave now if it has died; its ranks would train on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        parent = psutil.Process(os.getppid())
        is_gone = not is_torchrun(parent) and (
            parent.pid == 1 or "python" not in os.path.basename(parent.exe())
        )
    except psutil.NoSuchProcess:
        is_gone = True
    except psutil.AccessDenied:
        is_gone = False
    if is_gone:
        print(f"[rank {os.environ['RANK']}] stops, because torchrun is gone", file=sys.stderr)
        os._exit(1)


def convert_sync_batchnorm(cfg: "Config", model: nn.Module, device: torch.device) -> nn.Module:
    """The model with SyncBatchNorm, on CUDA and unless `distributed.sync_batchnorm` is off."""
    has_any = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if not cfg.distributed.sync_batchnorm or not has_any:
        return model
    if device.type != "cuda":
        log.info("SyncBatchNorm needs CUDA: on the CPU each rank normalises by its own part")
        return model
    if cfg.model.compile:
        log.info("SyncBatchNorm splits a compiled model; distributed.sync_batchnorm=false does not")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def broadcast_buffers(state: dict[str, Any]) -> None:
    """Give the buffers of all modules in the state, BatchNorm's statistics among them, rank 0's values."""
    for part in state.values():
        if isinstance(part, nn.Module):
            for buffer in part.buffers():
                dist.broadcast(buffer, src=0)


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Let each rank keep its part of every parameter of the model; a block is gathered while it computes.

    The blocks are the model's children, and those of a ModuleList. They have to be called as modules:
    outside its `forward`, a block's parameters are parts.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_like(copy: nn.Module, model: nn.Module) -> None:
    """Spread a copy of a model over the ranks as the model is; without FSDP this does nothing."""
    if isinstance(model, FSDPModule):
        shard(copy, next(model.parameters()).device)


def _blocks(module: nn.Module) -> list[nn.Module]:
    blocks = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks += _blocks(child)
        elif next(child.parameters(), None) is not None:
            blocks.append(child)
    return blocks


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Whether the next backward exchanges gradients; to be called before forward.

    Without DDP or FSDP there is nothing to exchange, and this does nothing.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)


def run_stamp() -> str:
    """Start time of the run, the same string on every rank that torchrun started.

    Ranks start at different moments; the first one to ask torchrun's key-value store decides. Without that
    store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), it is what torchrun calls the run (--rdzv_id).
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return now
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ["TORCHELASTIC_RUN_ID"]
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    return store.compare_set("run_stamp", "", now).decode()


OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)

# As early as can be: torchrun may be killed while its ranks still start.
leave_with_the_launcher()
