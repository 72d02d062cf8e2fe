"""What it costs that ranks agree in each step on signals and on the clock.

A rank that was told to stop, or whose time to save has come, must not leave the others in a collective:
all do the same after the step in which the largest flag of any rank arrives. On the CPU, with gloo.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.step import on_ranks
from benchmarks.turns import Count, Program

WORLD_SIZES = (2, 8)
WIDTH = 128
BATCH_SIZE_PER_RANK = 16

Pending = list[tuple[dist.Work, Tensor]]
Agree = Callable[[Tensor, Pending], Tensor]
"""From this rank's flags, two int32 (signal, clock), to those that all ranks act on; what is under way is
kept in a list."""


def no_agreement(flags: Tensor, pending: Pending) -> Tensor:
    return flags


def blocking_agreement(flags: Tensor, pending: Pending) -> Tensor:
    """Each step waits for the slowest rank once more."""
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return flags


def asynchronous_agreement(flags: Tensor, pending: Pending) -> Tensor:
    """Started in one step and read in the next, when it has long arrived."""
    work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    pending.append((work, flags))
    if len(pending) == 1:
        return torch.zeros_like(flags)
    work, agreed = pending.pop(0)
    work.wait()
    return agreed


AGREEMENTS: dict[str, Agree] = {
    "no agreement": no_agreement,
    "all_reduce that waits": blocking_agreement,
    "all_reduce read a step later": asynchronous_agreement,
}


def main(run: Run) -> None:
    for world_size in WORLD_SIZES:
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
    agree, pending = AGREEMENTS[name], Pending()
    while True:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        signal, clock = agree(torch.zeros(2, dtype=torch.int32), pending).tolist()
        if signal or clock:
            raise RuntimeError(f"no rank has set a flag, but signal={signal}, clock={clock}")
        count(1)
