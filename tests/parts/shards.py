"""Data in shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers import make_config
from tests.images import Data, common, photos
from tests.shards import shard


def sharded(root: Path, write: Callable[[Path], Data], *options: str) -> Data:
    """The same data in shards of a few samples."""
    data = write(files := root.parent / "files" / root.name)
    shard(make_config(*data.options, *common(files)).data, root)
    data.options += options
    data.spoil = spoil
    return data


def spoil(index: Any, sample: int) -> None:
    """Damage the bytes of the target of a sample, or of its image."""
    shard, start, length, _ = index.source.spans[-1][sample].item()
    path = index.source.copies.path(shard)
    damaged = bytearray(path.read_bytes())
    damaged[start + length - 10] ^= 1
    path.write_bytes(damaged)


def photos_in_shards(root: Path) -> Data:
    data = sharded(root, photos)
    data.copy_of = "photos"
    return data


ARCHIVED = {"photos in shards": photos_in_shards}


def read_from_shards(photos: list[str], folder: Path) -> list[str]:
    """The overrides that read photos from shards in a folder."""
    shard(make_config(*photos).data, folder / "shards")
    return [f"data.root={folder / 'shards'}", "data.shuffle=window"]


WAYS_OF_A_BATCH = {"docs/buckets.md": read_from_shards}
