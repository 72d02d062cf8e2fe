"""Shards of weights."""

import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runtime.fsdp import shard
from tests.helpers import refused
from tests.processes import join, start_process

pytestmark = pytest.mark.slow


def shard_blocks(rank: int, place: str) -> None:
    """Shard a model of blocks of 36 MiB each, which malloc gives back at once."""
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    side, num_blocks = 3072, 8
    blocks = [nn.Linear(1, 1, bias=False) for _ in range(num_blocks)]
    for block in blocks:  # of one number until they are moved
        block.weight = nn.Parameter(torch.ones(()).expand(side, side))
    shard(nn.Sequential(nn.Linear(1, 1)), torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = shard(nn.Sequential(*blocks), torch.device("cpu"))
    shards: list[Any] = list(model.parameters())
    assert all(part.to_local().eq(1).all() for part in shards)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < (num_blocks / 2 + 2.5) * side * side * 4, grown
    dist.destroy_process_group()


def test_no_rank_holds_more_than_its_shards_and_a_block_when_a_model_is_sharded(tmp_path) -> None:
    ranks = [start_process(shard_blocks, rank, f"file://{tmp_path / 'place'}") for rank in (0, 1)]
    assert join(ranks) == [0, 0]


def test_a_weight_of_two_blocks_which_fsdp_cannot_divide_is_named() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with refused("2.weight", "train_ddp.py"):
        shard(tied, torch.device("cpu"))
