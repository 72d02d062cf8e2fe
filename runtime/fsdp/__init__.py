"""FSDP: models whose parameters are divided among the ranks."""

from runtime.fsdp.models import shard
