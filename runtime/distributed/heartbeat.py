"""Reports of a rank that fails or hangs, with the line that each rank executes."""

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.distributed import private

WAIT_FOR_FAILED_S = 10.0
"""Seconds for which a device may be busy with the same work once another rank has failed."""

FLIGHT_RECORD = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Variable with the path of torch's record of the collectives, without the rank at its end."""

NCCL_EXTRA_S = 60.0
"""Seconds by which NCCL's watchdog, which ends a process without naming a rank, waits longer."""

GONE = (RuntimeError, ValueError)
"""Errors of a store that is gone, and with it the rank that kept it."""


class Heartbeat:
    """Thread that repeatedly writes the line that this process is at to a store of all ranks.

    It also reports and ends this process if its device waits for other ranks for too long, which
    raises no error in Python: for `timeout_s`, or for 10 s once another rank has announced an
    error. A rank that was killed cannot announce it: torchrun then ends the others.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        interval_s: float = 2.0,
    ) -> None:
        """Start the thread; a collective may take `timeout_s`, a beat comes every `interval_s`."""
        self.store, self.rank, self.world_size = store, rank, world_size
        self.device, self.timeout_s, self.interval_s = device, timeout_s, interval_s
        self.mark: torch.cuda.Event | None = None
        self.marked_at = 0.0
        self.stopped = threading.Event()
        self.is_ending = threading.Lock()  # held by the thread that reports why this process ends
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread; to be called before the store is gone."""
        self.stopped.set()
        # Python aborts if it ends while a thread is about to return from the store.
        self.thread.join(10.0)

    def _run(self) -> None:
        while not self.stopped.is_set():
            stack = private.main_thread_stack()
            ours = [line for line in stack if "site-packages" not in line.filename] or stack
            place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
            self._put(f"place{self.rank}", f"{time.time()} {place}")
            overdue_s = self.overdue_s()
            is_left = overdue_s > WAIT_FOR_FAILED_S and self._read("failed") != ""
            if overdue_s > self.timeout_s and self.is_ending.acquire(blocking=False):
                self._announce()
                # Another rank may have marked its work so much later.
                time.sleep(2 * self.interval_s)
                self.report_timeout()
                os._exit(1)
            if is_left and self.is_ending.acquire(blocking=False):
                text = "stops, because another rank has, for which its device waits"
                print(f"[rank {self.rank}] {text}", file=sys.stderr, flush=True)
                os._exit(1)
            self.stopped.wait(self.interval_s)

    def overdue_s(self) -> float:
        """Return the seconds since an earlier call for which the device has been busy with the same
        work; 0 on a CPU, whose collectives raise errors."""
        if self.device.type != "cuda":
            return 0.0
        if self.mark is None or self.mark.query():
            self.mark, self.marked_at = torch.cuda.Event(), time.monotonic()
            self.mark.record(torch.cuda.default_stream(self.device))
        return time.monotonic() - self.marked_at

    def announce_failure(self) -> None:
        """Let the other ranks know that this one has noticed a failure, and stop."""
        self.is_ending.acquire()
        self.stopped.set()
        self._announce()

    def _announce(self) -> None:
        self._put(f"failed{self.rank}", "yes")
        self._put("failed", "yes")

    def report_timeout(self) -> None:
        """Print which ranks are missing, where all stood, and the path of this rank's record."""
        time.sleep(self.interval_s)  # other ranks that waited notice at about the same time
        ranks = range(self.world_size)
        missing = ", ".join(str(rank) for rank in ranks if not self._read(f"failed{rank}"))
        lines = [f"a collective timed out; missing: rank {missing or 'unknown'}."]
        lines[0] += " Where each rank stood:"
        for rank in ranks:
            when, _, place = self._read(f"place{rank}").partition(" ")
            since = f"{max(0.0, time.time() - float(when)):.0f} s ago at" if place else "unknown"
            lines.append(f"  rank {rank}: {since} {place}")
        path = Path(f"{os.environ.get(FLIGHT_RECORD, '')}{self.rank}")
        try:
            if record := private.flight_record(self.device):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(record)
                lines.append(f"  this rank's collectives: {path} (torchfrtrace reads it)")
        except (OSError, *GONE) as error:
            lines.append(f"  this rank's collectives could not be written: {error}")
        print(f"[rank {self.rank}]", "\n".join(lines), file=sys.stderr, flush=True)

    def _put(self, key: str, value: str) -> None:
        with suppress(*GONE):
            self.store.set(key, value)

    def _read(self, key: str) -> str:
        """Return a value of the store: empty if there is none, `gone` if there is no store."""
        try:
            return self.store.get(key).decode() if self.store.check([key]) else ""
        except GONE:
            return "gone"


_heartbeat: Heartbeat | None = None


def start(store: Any, device: torch.device, timeout_s: float) -> None:
    """Start the heartbeat of this process in its process group; arguments as for `Heartbeat`."""
    global _heartbeat
    if private.backend_name(device).startswith("nccl"):
        private.set_nccl_timeout(device, timedelta(seconds=timeout_s + NCCL_EXTRA_S))
    _heartbeat = Heartbeat(store, dist.get_rank(), dist.get_world_size(), device, timeout_s)


def stop() -> None:
    """Stop the heartbeat, if it was started."""
    if _heartbeat is not None:
        _heartbeat.stop()


def announce(error: Exception) -> None:
    """Let the other ranks know that this one has failed.

    After a collective that timed out, each rank prints where all of them stood.
    """
    if _heartbeat is None:
        return
    _heartbeat.announce_failure()
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        _heartbeat.report_timeout()
