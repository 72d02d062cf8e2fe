"""Ranks that the others wait for, and what they spend their time with."""

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from runtime.shards import is_sharded
from runtime.timing import Timing

log = logging.getLogger(__name__)

CAUSES = ("data", "host", "compute")
"""What a rank's own time is spent with: waiting for data, being late on the CPU, and computing."""

SLOW, WINDOW_S = 0.1, 2.0
"""A rank is slow if it makes the steps longer by this share, in two windows in a row; log points
that come faster than a window are judged together, since less is noise."""


class SlowRank(NamedTuple):
    """A rank that makes the steps of all ranks longer, by a share."""

    rank: int
    host: str
    cause: str
    slower_by: float

    def __str__(self) -> str:
        place = f"rank {self.rank} on {self.host}"
        return f"{place} makes the steps {self.slower_by:.0%} longer: {self.cause}"


def slowest(hosts: Sequence[str], seconds: np.ndarray, total_s: float) -> SlowRank | None:
    """Return the rank that exceeds the others' median most, in any cause; None if none is slow.

    `seconds` (ranks, causes) are their own, of `total_s` in which they also waited for each other.
    """
    excess = seconds - np.sort(seconds, axis=0)[(len(seconds) - 1) // 2]
    rank, cause = divmod(int(excess.argmax()), len(CAUSES))
    share = float(excess[rank, cause] / max(total_s - excess[rank, cause], 1e-9))
    return SlowRank(rank, hosts[rank], CAUSES[cause], share) if share > SLOW else None


class SlowRanks:
    """Measures the own time of this rank, and compares it with that of the others.

    Own time, of all steps but the first, ends at the last gradient, since DistributedDataParallel
    waits for other ranks after it. The time of the host is that in which this thread does not run
    (on a CPU), or that of launching the kernels (on a GPU). A model whose forward exchanges values
    (FSDP, SyncBatchNorm) makes all ranks look equally slow: only the wait for data is known then.
    """

    def __init__(self, model: nn.Module, timing: Timing) -> None:
        """Watch a model before it is wrapped."""
        self.timing, self.host_s, self.compute_s = timing, 0.0, 0.0
        self.begun: Any = None
        self.spans: list[tuple[Any, Any]] = []
        self.judged: Any = (0.0, 0.0)  # own seconds of all ranks, and seconds of the training
        self.suspect: SlowRank | None = None  # in the last window
        self.slow: SlowRank | None = None  # in the last two
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        exchanges = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if trained and not exchanges and not is_sharded(trained[0]):
            trained[0].register_hook(self._end)  # the last one to get its gradient

    def begin_step(self) -> None:
        """Begin with a batch."""
        self.begun = self._now() if "first_step" in self.timing.seconds else None

    def _now(self) -> tuple[float, float, Any]:
        return self.timing.clock(), time.thread_time(), self.timing.record_event(self.timing.device)

    def _end(self, gradient: Tensor) -> None:
        if self.begun is not None:
            self.spans.append((self.begun, self._now()))
            self.begun = self.spans[-1][1]  # of the next micro-batch

    def own_seconds(self) -> tuple[float, float, float]:
        """Return the seconds of each cause so far; to be called where the device has finished."""
        for (begin_s, begin_cpu_s, begin), (end_s, end_cpu_s, end) in self.spans:
            own_s = end_s - begin_s
            host_s = own_s - (end_cpu_s - begin_cpu_s)
            if begin is not None:
                launch_s, own_s = own_s, begin.elapsed_time(end) / 1000
                host_s = min(launch_s, own_s)
            self.host_s += host_s
            self.compute_s += own_s - host_s
        self.spans.clear()
        return self.timing.seconds.get("data_wait", 0.0), self.host_s, self.compute_s

    def judge(self, hosts: Sequence[str], seconds: np.ndarray) -> SlowRank | None:
        """Compare the (ranks, causes) own seconds so far; warn of a rank that has become slow.

        Returns:
            The rank that was slow, for the same cause, in the last two windows.
        """
        before, before_s = self.judged
        total_s = self.timing.train_s
        if "first_step" not in self.timing.seconds or total_s - before_s < WINDOW_S:
            return self.slow
        self.judged = seconds, total_s
        last, self.suspect = self.suspect, slowest(hosts, seconds - before, total_s - before_s)
        is_again = last and self.suspect and last[:3] == self.suspect[:3]  # but for `slower_by`
        was_slow, self.slow = self.slow, self.suspect if is_again else None
        if self.slow and not was_slow:
            log.warning(str(self.slow))
        return self.slow
