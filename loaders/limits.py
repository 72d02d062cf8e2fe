"""Limits of the machine: CPUs, threads, and which setting to change where something has run out."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

WORKER_DIED = (
    "most likely the machine has no more memory: lower loader.num_workers, "
    "loader.prefetch_factor or global_batch_size"
)
# part of an error's message -> which setting to change
LIMITS = {
    "Too many open files": ("raise the limit with ulimit -n 65536, or lower loader.num_workers"),
    "shared memory": (
        "the batches of the worker processes do not fit into /dev/shm: enlarge it (docker run "
        "--shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm), or set "
        "loader.num_workers=0, which loads with threads and without shared memory"
    ),
    "exited unexpectedly": WORKER_DIED,
    "Connection reset by peer": WORKER_DIED,
}


class LimitError(RuntimeError):
    """The machine has run out of something; the message names the setting to change."""


def explain(error: Exception) -> None:
    """Raise a `LimitError` in place of an error of the kinds in `LIMITS`."""
    for sign, advice in LIMITS.items():
        if sign in str(error):
            what = str(error).strip(" .\n").splitlines()[-1]
            raise LimitError(f"{what}: {advice}") from error


@contextmanager
def limits_explained() -> Iterator[None]:
    """Turn errors of the kinds in `LIMITS` into a `LimitError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        explain(error)
        raise


def cpus_per_rank(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPUs for this process, a share of those of all ranks of this machine.

    Args:
        cgroup: folder of the container's quota of CPU time (of cgroups 2), if there is one.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = all_ranks = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        mine = len(os.sched_getaffinity(0))
        # torchrun's own CPUs are those of all ranks; with --numa-binding, each rank has a part.
        all_ranks = len(os.sched_getaffinity(os.getppid())) if num_ranks > 1 else mine
    if (limit := cgroup / "cpu.max").exists():
        quota, period = limit.read_text().split()  # in us; `max`: none
        all_ranks = min(all_ranks, int(quota) // int(period) if quota != "max" else all_ranks)
    return max(1, min(mine, all_ranks // num_ranks))


def torch_threads(number: int, name: str, torch_num_threads: int) -> ThreadPoolExecutor:
    """Create a pool of threads, each of which runs torch's operations with `torch_num_threads`.

    The calling thread keeps its own number: torch otherwise gives it, at its first large operation,
    the number that any other thread has set last.
    """
    torch.get_num_threads()  # fixes the number of the calling thread
    return ThreadPoolExecutor(number, name, torch.set_num_threads, (torch_num_threads,))
