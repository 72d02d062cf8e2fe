"""Batches by torch's `DataLoader`: in this process, or in worker processes, which end with it and
at no signal."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from conf.schema import Config
from loaders.batch import Batch, Slots
from loaders.limits import cpus_per_rank
from loaders.plan import Plan

MIN_ROWS = 64  # of an epoch, for which a worker is started where their number is null
# Often sent to all processes; only the training process handles them.
BLOCKED_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


def data_loader(
    dataset: Dataset[Batch],
    plan: Plan,
    num_workers: int,
    cfg: Config,
    device: torch.device,
    images: Sequence[Tensor] = (),
) -> DataLoader[Batch]:
    """Return a DataLoader of the batches that are left of the plan's epoch, each time it is
    iterated over; the dataset's `__getitems__` makes a `Batch` of an array of rows.

    Without worker processes, this process loads a batch when it is asked for. With them, batches
    whose content is like `images` are overwritten by later ones, once a `Loader` has used them.
    """
    options: dict[str, Any] = {"batch_sampler": plan, "collate_fn": default_convert}
    if num_workers:
        send: Any = Batch.share_memory
        if images:
            # So many are being transformed by threads; pinned ones are copies.
            num_used = 0 if device.type == "cuda" else cpus_per_rank() + 1
            num_slots = cfg.loader.prefetch_factor + -(-num_used // num_workers)
            send = Slots(images, num_workers, num_slots).send
        options |= {
            "collate_fn": send,
            "num_workers": num_workers,
            "prefetch_factor": cfg.loader.prefetch_factor,
            "persistent_workers": True,
            "worker_init_fn": _end_with_training,
            "multiprocessing_context": _worker_context(type(dataset).__module__),
        }
    # Drawing from the global generator would change dropout after a resume.
    generator = torch.Generator()
    return DataLoader(dataset, pin_memory=device.type == "cuda", generator=generator, **options)


def _worker_context(module: str) -> ForkServerContext:
    """Return a context whose processes are forked from a fork server, which has no threads that
    could hold locks.

    It inherits the blocked signals, and its forks do. It imports the script and `module` once for
    all of them; the script by its name, because Python before 3.12.8 ignores `__main__`.
    """
    import __main__  # the script that runs now

    context = multiprocessing.get_context("forkserver")
    script = Path(getattr(__main__, "__file__", None) or "__main__").stem
    context.set_forkserver_preload([script, module])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        resource_tracker.ensure_running()  # its start unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    util.Finalize(None, _kill_workers, exitpriority=0)
    return context


def _kill_workers() -> None:
    """End the workers before Python waits for them: they block the signal that it sends."""
    for process in multiprocessing.active_children():
        process.kill()


def _end_with_training(worker_id: int) -> None:
    """Watch the training process, in a worker: torch watches the fork server, which outlives it."""
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(0)

    Thread(target=wait, daemon=True).start()


def default_workers(device: torch.device, num_samples: int, num_threads: int) -> int:
    """Return the number of worker processes where `loader.num_workers` is null: on a GPU one per
    CPU but one (per `num_threads` CPUs), on a CPU none.

    Threads of the training process would hold up the one that launches kernels, since each call
    passes Python's interpreter lock around.
    """
    if device.type != "cuda":
        return 0
    return min((cpus_per_rank() - 1) // (num_threads or 1), -(-num_samples // MIN_ROWS))
