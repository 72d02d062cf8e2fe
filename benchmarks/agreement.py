"""What it costs that ranks agree in each step on signals and on the clock.

A rank that was told to stop, or whose time to save has come, must not leave the others in a collective:
all do the same after the step in which the largest flag of any rank arrives. On the CPU, with gloo.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.step import on_ranks
from benchmarks.turns import Count, Program
from runtime.distributed import ProcessGroup

WIDTH = 128
BATCH_SIZE_PER_RANK = 16

Agree = Callable[[Sequence[bool]], list[bool]]
"""From this rank's wishes (to leave, to save) to those that all ranks act on."""


def waits(wishes: Sequence[bool]) -> list[bool]:
    """Each step waits for the slowest rank once more."""
    flags = torch.tensor(wishes, dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags.bool().tolist()


AGREEMENTS: dict[str, Callable[[], Agree]] = {
    "no agreement": lambda: list,
    "all_reduce that waits": lambda: waits,
    "all_reduce read a step later": lambda: ProcessGroup().any_rank,
}


def main(run: Run, world_sizes: Sequence[int] = (2, 8)) -> None:
    for world_size in world_sizes:
        programs: dict[Subject, Program] = {
            Subject(name, num_devices=world_size): partial(
                on_ranks, partial(training_loop, name), world_size, "gloo"
            )
            for name in AGREEMENTS
        }
        run.compare("agreement", f"{world_size} gloo ranks", programs)


def training_loop(name: str, rank: int, count: Count) -> None:
    """Steps of DDP with a small model, after each of which the ranks agree."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH_SIZE_PER_RANK, WIDTH)
    targets = torch.randint(10, (BATCH_SIZE_PER_RANK,))
    agree = AGREEMENTS[name]()
    while True:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if any(agree([False, False])):
            raise RuntimeError("no rank has wished anything")
        count(1)
