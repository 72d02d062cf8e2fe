"""Ranks that fail or hang are named, with the line where each of them stands."""

import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conf import mistakes

if TYPE_CHECKING:
    from conf.schema import Config

HEARTBEAT_S = 2.0
LONGEST_CALL_S = 10.0

_board: Any = None
"""The store where the ranks tell each other where they stand."""

_world_size = 1
_teller: threading.Thread | None = None
_stops = threading.Event()


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
            rank = os.environ.get("RANK", "0")
            text = str(error).lower()
            _stops.set()
            _tell(f"failed{rank}")
            if "timed out" in text or "timeout" in text:
                print(f"[rank {rank}] {_who_is_missing()}", file=sys.stderr)
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


def start_telling(store: Any, rank: int, world_size: int) -> None:
    """Put the line that this process is at into the ranks' common store, from now on again and again."""
    global _board, _teller, _world_size
    _board, _world_size = store, world_size
    mistakes.board = store
    _stops.clear()
    _teller = threading.Thread(target=_tell_where_we_stand, args=(rank,), daemon=True)
    _teller.start()


def stop_telling() -> None:
    """To be called before the store is gone."""
    _stops.set()
    if _teller is not None:
        # Python aborts if it ends while a thread is about to return from the store.
        _teller.join(LONGEST_CALL_S)


def _tell_where_we_stand(rank: int) -> None:
    main_thread = threading.main_thread().ident
    while not _stops.is_set():
        frame = sys._current_frames().get(main_thread or 0)
        stack = traceback.extract_stack(frame)
        ours = [line for line in stack if "site-packages" not in line.filename] or stack
        place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
        if not _tell(f"place{rank}", f"{time.time()} {place}"):
            return
        _stops.wait(HEARTBEAT_S)


def _tell(key: str, value: str = "") -> bool:
    """Whether it could be told; otherwise the group is gone, and nobody will ask."""
    try:
        if _board is not None:
            _board.set(key, value)
    except (RuntimeError, ValueError):
        return False
    return True


def _who_is_missing() -> str:
    """Where each rank stood when it told last, and which of them did not notice that others waited."""
    if _board is None:
        return "the process group could not be joined in time"
    lines, missing = [], []
    try:
        time.sleep(HEARTBEAT_S)  # the others that waited notice at about the same time
        for other in range(_world_size):
            if not _board.check([f"failed{other}"]):
                missing.append(other)
            place = "has told nothing"
            if _board.check([f"place{other}"]):
                when, _, place = _board.get(f"place{other}").decode().partition(" ")
                place = f"{max(0.0, time.time() - float(when)):.0f} s ago at {place}"
            lines.append(f"  rank {other}: {place}")
    except (RuntimeError, ValueError):
        lines.append("  the store that would tell more is gone")
    who = ", ".join(str(other) for other in missing) or "unknown"
    return "\n".join(
        [f"a collective timed out; missing: rank {who}. Where each rank stood:", *lines]
    )
