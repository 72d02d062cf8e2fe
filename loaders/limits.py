"""What a machine can run out of, and the setting that then helps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# what an error says when the machine has no more of something -> which setting to change
NO_SHARED_MEMORY = (
    "the batches of the worker processes do not fit into /dev/shm: enlarge it (docker run --shm-size=8g; "
    "Kubernetes: an emptyDir with medium: Memory at /dev/shm), or set loader.num_workers=0, which loads "
    "with threads and without shared memory"
)
LIMITS = {
    "Too many open files": "raise the limit with ulimit -n 65536, or lower loader.num_workers",
    "shared memory": NO_SHARED_MEMORY,
    "killed by signal: Bus error": NO_SHARED_MEMORY,
    "killed by signal: Killed": "most likely for lack of memory: lower loader.num_workers, "
    "loader.prefetch_factor or global_batch_size",
}


class LimitError(RuntimeError):
    """The machine has no more of something; the message names the setting to change."""

    may_pass = True  # another attempt can succeed


@contextmanager
def limits_explained() -> Iterator[None]:
    """Turn errors of the kinds in `LIMITS` into a `LimitError`."""
    try:
        yield
    except LimitError:
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error.__cause__, LimitError):  # which PyTorch wrapped
            raise error.__cause__ from None
        for sign, advice in LIMITS.items():
            if sign in str(error):
                what = str(error).strip(" .\n").splitlines()[-1]
                raise LimitError(f"{what}: {advice}") from error
        raise


def cpus_per_rank() -> int:
    """CPUs that this process may use, shared with the other ranks of this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (available or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
