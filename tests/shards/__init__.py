"""Tests of data in shards, on a local disk or a server."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.shards import pack_shards


def shard(data: DataConfig, out: Path) -> None:
    """Pack data in shards of a few samples."""
    pack_shards(data, str(out), "0.02")
