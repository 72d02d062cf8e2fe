"""Reports of ranks that wait for another one, with the line that each rank executes."""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

import torch

GONE = (RuntimeError, ValueError)
"""Errors of a store that is gone, and with it the rank that kept it."""


class Heartbeat:
    """Thread that repeatedly writes the line that this process is at to a store of all ranks.

    It also reports if its device waits for other ranks for `timeout_s`, which raises no error in
    Python: NCCL, which waits longer, then ends the process.
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
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread; to be called before the store is gone."""
        self.stopped.set()
        # Python aborts if it ends while a thread is about to return from the store.
        self.thread.join(10.0)

    def _run(self) -> None:
        with suppress(*GONE):
            while not self.stopped.is_set():
                self.store.set(f"place{self.rank}", f"{time.time()} {_place()}")
                if self.overdue_s() > self.timeout_s:
                    self.report_timeout()
                    return
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

    def report_timeout(self) -> None:
        """Print which ranks do not wait for others, and where all stood."""
        self.stopped.set()  # the last beat is from where this rank waited
        with suppress(*GONE):
            self.store.set(f"waits{self.rank}", "yes")
            time.sleep(3 * self.interval_s)  # so much later, others that wait have noticed it, too
            ranks = range(self.world_size)
            missing = [str(rank) for rank in ranks if not self._read(f"waits{rank}")]
            lines = [f"a collective timed out; missing: rank {', '.join(missing) or 'unknown'}."]
            lines[0] += " Where each rank stood:"
            for rank in ranks:
                when, _, place = self._read(f"place{rank}").partition(" ")
                since = (
                    f"{max(0.0, time.time() - float(when)):.0f} s ago at" if place else "unknown"
                )
                lines.append(f"  rank {rank}: {since} {place}")
            print(f"[rank {self.rank}]", "\n".join(lines), file=sys.stderr, flush=True)

    def _read(self, key: str) -> str:
        """Return a value of the store, empty if there is none."""
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _place() -> str:
    """Return the line of this program that the main thread executes."""
    # Python documents this function, for finding deadlocks, in spite of its name. No variable has
    # the frame, which would keep its tensors alive.
    main = threading.main_thread().ident or 0
    stack = traceback.extract_stack(sys._current_frames().get(main))  # noqa: SLF001
    ours = [line for line in stack if "site-packages" not in line.filename] or stack
    return f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
