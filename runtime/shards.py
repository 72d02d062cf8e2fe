"""Files of tensors that `train_fsdp.py` leaves sharded: a folder `shards-*` per checkpoint."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from conf.files import checksum

log = logging.getLogger(__name__)


def check_shards(state: dict[str, Any], folder: Path) -> None:
    """Compare the files of the sharded tensors, if any, of a checkpoint in a folder with their
    checksums.

    Raises:
        ValueError: a file has other content, or is elsewhere.
        OSError: a file cannot be read.
    """
    if "shards" not in state:
        return
    place, files = state["shards"]["folder"], state["shards"]["files"]
    for name in (place, *files):
        if name != Path(name).name:
            raise ValueError(f"{name} is not in the folder of the checkpoint")
    expected = {folder / place / name: value for name, value in files.items()}
    with ThreadPoolExecutor() as pool:
        for path, value in zip(expected, pool.map(checksum, expected), strict=True):
            if value != expected[path]:
                raise ValueError(f"wrong checksum of {path.relative_to(folder)}")


def remove_shards(folder: Path) -> None:
    """Remove the shards that no checkpoint in the folder names."""
    unnamed = set(folder.glob("shards-*"))
    for path in folder.glob("[!.]*.pt") if unnamed else ():
        try:
            state = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes raise errors of any type
            log.warning("%s cannot be read (%s): no shards are removed", path, error)
            return
        if "shards" in state:
            unnamed.discard(folder / state["shards"]["folder"])
    for path in unnamed:
        shutil.rmtree(path)
