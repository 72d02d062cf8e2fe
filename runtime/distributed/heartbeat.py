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

LONGEST_CALL_S = 10.0
"""Seconds for which a call of the store may last."""

WAIT_FOR_FAILED_S = 10.0
"""Seconds for which a device may be busy with the same work once another rank has failed."""

FLIGHT_RECORD = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Variable with the path of torch's record of the collectives, without the rank at its end."""

NCCL_EXTRA_S = 60.0
"""Seconds by which NCCL's watchdog, which ends a process without naming a rank, waits longer."""


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
        """Start the thread.

        Args:
            store: store that all ranks share.
            rank: rank of this process.
            world_size: number of ranks.
            device: device of this process.
            timeout_s: maximum duration of a collective in seconds.
            interval_s: seconds between two heartbeats.
        """
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
        self.thread.join(LONGEST_CALL_S)

    def _run(self) -> None:
        while not self.stopped.is_set():
            stack = private.main_thread_stack()
            ours = [line for line in stack if "site-packages" not in line.filename] or stack
            place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
            self._put(f"place{self.rank}", f"{time.time()} {place}")
            overdue_s = self.overdue_s()
            if overdue_s > self.timeout_s and self.is_ending.acquire(blocking=False):
                self._announce()
                # Another rank may have marked its work so much later.
                time.sleep(2 * self.interval_s)
                self.report_timeout()
                sys.stderr.flush()
                os._exit(1)
            is_left = overdue_s > WAIT_FOR_FAILED_S and self._another_failed()
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

    def flight_record(self) -> bytes:
        """Return torch's record of the collectives of this process, pickled, or nothing."""
        return private.flight_record(self.device)

    def announce_failure(self) -> None:
        """Let the other ranks know that this one has noticed a failure, and stop."""
        self.is_ending.acquire()
        self.stopped.set()
        self._announce()

    def _announce(self) -> None:
        self._put(f"failed{self.rank}")
        self._put("failed")

    def _another_failed(self) -> bool:
        try:
            return bool(self.store.check(["failed"]))
        except (RuntimeError, ValueError):
            return True  # the store is gone, and the rank that kept it

    def report_timeout(self) -> None:
        """Print which ranks are missing, where all stood, and the path of this rank's record."""
        time.sleep(self.interval_s)  # other ranks that waited notice at about the same time
        lines = self._places()
        path = Path(f"{os.environ.get(FLIGHT_RECORD, '')}{self.rank}")
        try:
            if record := self.flight_record():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(record)
                lines.append(f"  this rank's collectives: {path} (torchfrtrace reads it)")
        except (OSError, RuntimeError, ValueError) as error:
            lines.append(f"  this rank's collectives could not be written: {error}")
        print(f"[rank {self.rank}]", "\n".join(lines), file=sys.stderr)

    def _places(self) -> list[str]:
        lines, missing = [], []
        try:
            for rank in range(self.world_size):
                if not self.store.check([f"failed{rank}"]):
                    missing.append(str(rank))
                place = "unknown"
                if self.store.check([f"place{rank}"]):
                    when, _, place = self.store.get(f"place{rank}").decode().partition(" ")
                    place = f"{max(0.0, time.time() - float(when)):.0f} s ago at {place}"
                lines.append(f"  rank {rank}: {place}")
        except (RuntimeError, ValueError):
            lines.append("  the store with the other places is gone")
        head = f"a collective timed out; missing: rank {', '.join(missing) or 'unknown'}."
        return [f"{head} Where each rank stood:", *lines]

    def _put(self, key: str, value: str = "") -> None:
        """Set a value of the store, unless the store is gone, and with it the rank that kept it."""
        with suppress(RuntimeError, ValueError):
            self.store.set(key, value)


_heartbeat: Heartbeat | None = None


def record_collectives(folder: Path) -> None:
    """Let torch record its collectives; to be called before there is a process group."""
    os.environ.setdefault(FLIGHT_RECORD, f"{folder.absolute()}/flight_record_rank_")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives


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
