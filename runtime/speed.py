"""How fast a run is, which rank is the slowest, and what limits the speed."""

import socket
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from conf.names import names_in
from conf.schema import Config
from loaders.batch import num_samples
from runtime.gpu_monitor import GpuMonitor
from runtime.process_group import ProcessGroup
from runtime.shards import is_sharded
from runtime.timing import Timing

MEMORY = "perf/peak_memory_gib"

INPUT_BOUND, BUSY = 0.2, 0.8
"""Share of the time waiting for data from which on a run is called input-bound; utilisation of a
GPU below which it is host-bound, if it does not wait for data."""

SLOW, LEAST_S = 0.1, 2.0
"""A rank is slow if its own part of the steps takes longer than the others' by this share; before
theirs has taken so many seconds, a difference may be noise."""


class SlowRank(NamedTuple):
    """A rank that the others wait for: its own part of the steps takes longer than theirs."""

    rank: int
    host: str
    slower_by: float

    def __str__(self) -> str:
        return f"slowest: rank {self.rank} on {self.host}, {self.slower_by:.0%} slower than others"


class Speed:
    """Measures a run; every rank calls its methods.

    The own part of a rank's step is its wait for data and its work up to the last gradient, after
    which DistributedDataParallel waits for other ranks. A model whose forward exchanges values
    (FSDP, SyncBatchNorm) makes all ranks look equally slow but for their waits for data.

    Attributes:
        slow: the slowest rank of several, if it is slow.
    """

    def __init__(self, group: ProcessGroup, timing: Timing) -> None:
        self.group, self.timing = group, timing
        self.gpu, self.peak_memory = GpuMonitor(timing.device), 0.0
        self.own_s = 0.0
        self.begun: Any = None
        self.spans: list[tuple[Any, Any]] = []  # of own work that the device may not have finished
        self.slow: SlowRank | None = None

    def open_run(self, model: nn.Module) -> None:
        """Watch a model before it is wrapped."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.group.world_size > 1 and trained and not is_sharded(trained[0]):
            trained[0].register_hook(self._end_own_part)  # the last one to get its gradient

    def begin_step(self, batch: tuple[Any, Any]) -> None:
        """Begin a step with a batch of this rank."""
        self.timing.count_images(num_samples(batch) * self.group.world_size)
        self.begun = self._now() if "first_step" in self.timing.seconds else None

    def _now(self) -> tuple[float, Any]:
        return self.timing.clock(), self.timing.record_event(self.timing.device)

    def _end_own_part(self, gradient: Tensor) -> None:
        if self.begun is not None:
            self.spans.append((self.begun, self._now()))
            self.begun = self.spans[-1][1]  # of the next micro-batch

    def exchange(self) -> None:
        """Compare the ranks; to be called where the device has finished its steps."""
        if self.group.world_size == 1:
            return
        for (begin_s, begin), (end_s, end) in self.spans:
            on_host = begin is None
            self.own_s += end_s - begin_s if on_host else begin.elapsed_time(end) / 1000
        self.spans.clear()
        step_s = self.timing.seconds.get("data_wait", 0.0) + self.own_s
        memory = self.gpu.values().get(MEMORY, 0.0)
        all_ranks = self.group.gather((socket.gethostname(), step_s, memory))
        hosts, seconds, memories = zip(*all_ranks, strict=True)
        self.peak_memory = max(memories)
        self.slow = slowest(hosts, seconds) if "first_step" in self.timing.seconds else None

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
        values, timing = self.gpu.values(), self.timing
        if MEMORY in values:
            values[MEMORY] = max(values[MEMORY], self.peak_memory)
        if timing.num_images:
            values["perf/images_per_s"] = timing.images_per_s
            values["perf/data_wait_share"] = timing.data_wait_share
        if self.slow is not None:
            values["perf/slowest_rank"] = self.slow.rank
        return values


def slowest(hosts: tuple[str, ...], seconds: tuple[float, ...]) -> SlowRank | None:
    """Return the rank whose own parts of the steps took longest, if it is slower than the median of
    the ranks by more than `SLOW`."""
    rank = seconds.index(max(seconds))
    usual = median_low(seconds)
    if usual < LEAST_S or seconds[rank] <= (1 + SLOW) * usual:
        return None
    return SlowRank(rank, hosts[rank], seconds[rank] / usual - 1)


def bottleneck(speeds: dict[str, float]) -> str:
    """Name what limits the speed, such as `compute-bound: 3% of the time waiting for data`.

    Args:
        speeds: `perf/data_wait_share` and, if it is known, `perf/gpu_utilization`, both in [0, 1].
    """
    waits, busy = speeds["perf/data_wait_share"], speeds.get("perf/gpu_utilization", 1.0)
    kind = "input" if waits >= INPUT_BOUND else "compute" if busy >= BUSY else "host"
    kernels = f", GPU busy {busy:.0%}" if "perf/gpu_utilization" in speeds else ""
    return f"{kind}-bound: {waits:.0%} of the time waiting for data{kernels}"


def verdict(speeds: dict[str, float], cfg: Config, device: torch.device) -> str:
    """Name the bottleneck and settings to try that `cfg` has not; `speeds` as for `bottleneck()`.

    `python -m tools.bottleneck` measures it.
    """
    bound = bottleneck(speeds)
    if bound.startswith("compute"):
        return bound
    options = {"a larger loader.num_workers": True}
    if cfg.data.layout != "own":
        backends = names_in("loaders.backends")
        in_memory = cfg.data.layout.startswith("mnist")
        # On a CPU, DALI is slower than the threads.
        on_gpu = device.type == "cuda" and cfg.loader.name == "pytorch"
        packs = cfg.loader.name not in ("packed", "synthetic") and not in_memory
        options = {
            "python -m tools.bottleneck": cfg.loader.name != "synthetic",
            "loader=dali": "dali" in backends and on_gpu and not in_memory,
            "loader=packed": "packed" in backends and packs,
        }
    if bound.startswith("host"):  # which launches kernels more slowly than they run
        options |= {"model.compile=true": not cfg.model.compile, "a larger global_batch_size": True}
    advice = [option for option, is_new in options.items() if is_new] or ["smaller images"]
    return f"{bound}; try {', '.join(advice)}"
