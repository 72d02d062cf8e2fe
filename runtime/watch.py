"""Ranks that fail or hang are named, with the line where each of them stands."""

import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conf import mistakes

if TYPE_CHECKING:
    from conf.schema import Config

HEARTBEAT_S = 2.0
LONGEST_CALL_S = 10.0

_world_size = 1
_flight_record: Callable[[], bytes] = bytes
_teller: threading.Thread | None = None
_stops = threading.Event()
_ending = threading.Lock()
"""Held by whoever reports why this process ends, which it then does."""

# Where torch writes what it has recorded of the collectives, the rank's number behind it.
FLIGHT_RECORD = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def report_by_rank(main: Callable[["Config"], None]) -> Callable[["Config"], None]:
    """Let an error in `main` be told once, with its rank, and end the process at once.

    A rank whose partner failed says so in one line. When a collective timed out, each rank says where
    it and the others stood, as far as they have told.
    """

    @functools.wraps(main)
    def reporting(cfg: "Config") -> None:
        try:
            main(cfg)
        except Exception as error:
            if mistakes.is_mistake(error):
                mistakes.end(error)
            _ending.acquire()
            rank = os.environ.get("RANK", "0")
            text = str(error).lower()
            _stops.set()
            _tell(f"failed{rank}")
            if "timed out" in text or "timeout" in text:
                _report_timeout(rank)
            if _is_about_a_partner(error):
                reason = str(error).splitlines()[0][:200]
                print(f"[rank {rank}] stops, because another rank has: {reason}", file=sys.stderr)
            else:
                lines = traceback.format_exc().splitlines()
                print("\n".join(f"[rank {rank}] {line}" for line in lines), file=sys.stderr)
            sys.stderr.flush()
            # Without the usual way out, which would wait for the other ranks.
            os._exit(1)

    return reporting


def _is_about_a_partner(error: Exception) -> bool:
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "timed out waiting",
        "gloo/transport",
    )
    return any(word in str(error).lower() for word in words)


class DeviceWork:
    """What a device was given to do: a collective that some rank never joins keeps it from ending."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark: torch.cuda.Event | None = None
        self.marked_at = 0.0

    def overdue_s(self) -> float:
        """Asked again and again: the seconds for which something has kept the device busy, if it has not
        ended since then; 0 on a CPU, whose collectives raise errors."""
        if self.device.type != "cuda":
            return 0.0
        if self.mark is None or self.mark.query():
            self.mark, self.marked_at = torch.cuda.Event(), time.monotonic()
            self.mark.record(torch.cuda.default_stream(self.device))
        return time.monotonic() - self.marked_at


def start_telling(
    store: Any,
    rank: int,
    world_size: int,
    work: DeviceWork,
    timeout_s: float,
    flight_record: Callable[[], bytes],
) -> None:
    """Put the line that this process is at into the ranks' common store, from now on again and again; and
    report and end this process when its device waits for others, which raises no error in Python.

    Args:
        store: common to all ranks.
        rank: of this process.
        world_size: the number of ranks.
        work: of this process's device.
        timeout_s: how long a collective may take.
        flight_record: what torch has recorded of the collectives of this process.
    """
    global _flight_record, _teller, _world_size
    mistakes.board, _world_size, _flight_record = store, world_size, flight_record
    _stops.clear()
    _teller = threading.Thread(target=_watch, args=(rank, work, timeout_s), daemon=True)
    _teller.start()


def stop_telling() -> None:
    """To be called before the store is gone."""
    _stops.set()
    if _teller is not None:
        # Python aborts if it ends while a thread is about to return from the store.
        _teller.join(LONGEST_CALL_S)


def _watch(rank: int, work: DeviceWork, timeout_s: float) -> None:
    main_thread = threading.main_thread().ident
    while not _stops.is_set():
        # Under no name: a frame that is kept keeps its tensors, too.
        stack = traceback.extract_stack(sys._current_frames().get(main_thread or 0))
        ours = [line for line in stack if "site-packages" not in line.filename] or stack
        place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
        if not _tell(f"place{rank}", f"{time.time()} {place}"):
            return
        if work.overdue_s() > timeout_s and _ending.acquire(blocking=False):
            _tell(f"failed{rank}")
            time.sleep(2 * HEARTBEAT_S)  # by so much later another rank may have marked its work
            _report_timeout(str(rank))
            sys.stderr.flush()
            os._exit(1)
        _stops.wait(HEARTBEAT_S)


def _tell(key: str, value: str = "") -> bool:
    """Whether it could be told; otherwise the group is gone, and nobody will ask."""
    try:
        if mistakes.board is not None:
            mistakes.board.set(key, value)
    except (RuntimeError, ValueError):
        return False
    return True


def _report_timeout(rank: str) -> None:
    """Print who is missing and where torch's record of this rank's collectives is now."""
    lines = _who_is_missing()
    path = Path(f"{os.environ.get(FLIGHT_RECORD, '')}{rank}")
    try:
        if record := _flight_record():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record)
            lines += f"\n  this rank's collectives: {path} (torchfrtrace reads it)"
    except (OSError, RuntimeError) as error:
        lines += f"\n  this rank's collectives could not be written: {error}"
    print(f"[rank {rank}] {lines}", file=sys.stderr)


def _who_is_missing() -> str:
    """Where each rank stood when it told last, and which of them did not notice that others waited."""
    board = mistakes.board
    if board is None:
        return "the process group could not be joined in time"
    lines, missing = [], []
    try:
        time.sleep(HEARTBEAT_S)  # the others that waited notice at about the same time
        for other in range(_world_size):
            if not board.check([f"failed{other}"]):
                missing.append(other)
            place = "has told nothing"
            if board.check([f"place{other}"]):
                when, _, place = board.get(f"place{other}").decode().partition(" ")
                place = f"{max(0.0, time.time() - float(when)):.0f} s ago at {place}"
            lines.append(f"  rank {other}: {place}")
    except (RuntimeError, ValueError):
        lines.append("  the store that would tell more is gone")
    who = ", ".join(str(other) for other in missing) or "unknown"
    return "\n".join(
        [f"a collective timed out; missing: rank {who}. Where each rank stood:", *lines]
    )
