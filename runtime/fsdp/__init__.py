"""FSDP: models whose parameters are divided among the ranks, and checkpoints in shards."""

from runtime.fsdp.checkpoints import group_for_writing, read_shards, read_whole, write_shards
from runtime.fsdp.models import shard, shard_like, without_exchange
