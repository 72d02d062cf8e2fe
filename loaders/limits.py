"""CPUs and threads of this process."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")


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


def torch_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Create a pool of threads, whose torch operations are not split among further threads, which
    would take longer.

    The calling thread keeps its own number: torch otherwise gives it, at its first large operation,
    the number that any other thread has set last.
    """
    torch.get_num_threads()  # fixes the number of the calling thread
    return ThreadPoolExecutor(number, name, torch.set_num_threads, (1,))


def map_in_threads(
    function: Callable[[T], R],
    items: Sequence[T],
    what: str,
    num_threads: int = 32,
    size: int | None = None,
) -> list[R]:
    """Return what a function makes of items, in threads, with a progress bar once it takes more
    than two seconds.

    A thread takes `size` items at once; None: more of many, as one by one, a million would take a
    minute longer.
    """
    if size is None:
        size = min(256, len(items) // 256 + 1)
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    bar = {"desc": what, "total": len(parts), "unit_scale": size, "delay": 2, "leave": False}
    with ThreadPoolExecutor(num_threads) as pool:
        found = tqdm(pool.map(lambda part: list(map(function, part)), parts), **bar)
        return list(chain.from_iterable(found))
