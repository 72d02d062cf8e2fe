"""Cost per training step of exchanging flags between ranks, with gloo on the CPU.

A rank that receives a signal or has to save a checkpoint must not leave the others in a collective
operation. All ranks therefore act on the maximum of their flags, after the same step.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.interleave import CountItems, Workload
from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.step import on_ranks
from runtime.distributed import ProcessGroup

WIDTH = 128
BATCH_SIZE_PER_RANK = 16

AnyRank = Callable[[Sequence[bool]], list[bool]]
"""Maps the flags of this rank (stop, save) to the flags that all ranks act on."""


def blocking_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Maximum of the flags over all ranks; each step waits for the slowest rank."""
    largest = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.bool().tolist()


AGREEMENTS: dict[str, Callable[[], AnyRank]] = {
    "no agreement": lambda: list,
    "all_reduce that waits": lambda: blocking_any_rank,
    "all_reduce read a step later": lambda: ProcessGroup().any_rank,
}


def main(run: Run, world_sizes: Sequence[int] = (2, 8)) -> None:
    for world_size in world_sizes:
        workloads: dict[Subject, Workload] = {
            Subject(name, num_devices=world_size): partial(
                on_ranks, partial(training_loop, name), world_size, "gloo"
            )
            for name in AGREEMENTS
        }
        run.compare("agreement", f"{world_size} gloo ranks", workloads)


def training_loop(name: str, rank: int, count_items: CountItems) -> None:
    """Train a small DDP model and exchange flags after each step."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH_SIZE_PER_RANK, WIDTH)
    targets = torch.randint(10, (BATCH_SIZE_PER_RANK,))
    any_rank = AGREEMENTS[name]()
    while True:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if any(any_rank([False, False])):
            raise RuntimeError("a flag is set, but no rank has set one")
        count_items(1)
