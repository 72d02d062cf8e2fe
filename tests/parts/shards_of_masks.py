"""Masks in shards, whose order is drawn in windows."""

from pathlib import Path

from tests.images import Data
from tests.parts.masks import masks
from tests.parts.shards import sharded


def masks_in_windows(root: Path) -> Data:
    return sharded(root, masks, "data.shuffle=window", "data.shuffle_window=2")


ARCHIVED = {"masks in shards, in windows": masks_in_windows}
WITH_WORKERS = [*ARCHIVED]
