"""Reading the checkpoints of runs: folders `step-00000120`, verified by their manifest.

A folder holds `state.pt` and, of a run of `train_fsdp.py`, one `shard-*.pt` of each rank. Both are
files of `torch.save` with tensors and plain values alone; `manifest.json` has their sizes and
checksums. An empty file `best` says that no earlier checkpoint of the run was better.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.files import checksum

FORMAT = 2
"""Version of the folders; to be raised with each change that older ones do not fit."""

STATE, MANIFEST, BEST = "state.pt", "manifest.json", "best"

NAME = re.compile(r"\.?step-(\d+)(\.old)?")
"""A folder that one of the same step is about to replace is hidden, and ends with `.old`."""


@dataclass(frozen=True)
class Shards:
    """A tensor in parts along its first dimension, which lie in files until they are used."""

    parts: list[Tensor]
    """That of each rank that wrote it, in the order of the ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(map(len, self.parts)), *self.parts[0].shape[1:]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return these rows; no others are read."""
        found, first = [], 0
        for part in self.parts:
            found.append(part[max(0, start - first) : max(0, stop - first)])
            first += len(part)
        return torch.cat(found)

    def whole(self) -> Tensor:
        return torch.cat(self.parts)


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, that of the last step first."""
    paths = [path for path in folder.glob("*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: (step_of(path), path.name), reverse=True)


def step_of(path: Path) -> int:
    """Return the number of steps before a checkpoint."""
    return int(NAME.fullmatch(path.name)[1])  # type: ignore[index]


def best_of(paths: list[Path]) -> Path | None:
    """Return the best of a run's checkpoints, the newest first; None if no one is."""
    return next((path for path in paths if (path / BEST).exists()), None)


def fingerprint(path: Path) -> dict[str, int]:
    """Return the size and the checksum of a file, as they stand in a manifest."""
    return {"bytes": path.stat().st_size, "crc32": checksum(path)}


def read_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint to the host; where it holds a tensor in shards, there is None.

    Raises:
        Exception: it is no checkpoint, damaged, or of another version; of any type.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, that of this version {FORMAT}")
    files = manifest["files"]
    with ThreadPoolExecutor() as pool:
        found = pool.map(fingerprint, [folder / Path(name).name for name in files])
        for name, actual in zip(files, found, strict=True):
            if actual != files[name]:
                raise ValueError(f"{name} is not as it was written")
    state = load_tensors(folder / STATE)
    if missing := {STATE, *state["shards"]} - files.keys():
        raise ValueError(f"its manifest lacks {', '.join(sorted(missing))}")
    for _ in opened_shards(state, folder):  # that they hold nothing else
        pass
    return state


def opened_shards(state: dict[str, Any], folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in the file of each rank by name, such as `/model/conv.weight`."""
    for name in state["shards"]:
        yield load_tensors(folder / name, mmap=True)


def with_shards(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint with `Shards` of each tensor that it holds in shards."""
    ranks = list(opened_shards(state, folder))
    names = ranks[0].keys() if ranks else ()

    def filled(name: str, value: Any) -> Any:
        return Shards([rank[name] for rank in ranks]) if name in names else value

    return map_named(filled, state)


def map_named(function: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """Return nested dicts and lists with `function(name, value)` in place of each other value;
    names are such as `/model/conv.bias`."""
    if isinstance(tree, dict):
        return {key: map_named(function, value, f"{name}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_named(function, value, f"{name}/{n}") for n, value in enumerate(tree)]
        return values if isinstance(tree, list) else tuple(values)
    return function(name, tree)


def load_tensors(path: Path, mmap: bool = False) -> Any:
    """Read a file of `torch.save` to the host, or with `mmap` each tensor when it is used.

    Raises:
        ValueError: it holds more than tensors and plain values, which may be code.
        Exception: it is damaged; of any type.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if "weights_only" not in str(error):
            raise
        # PyTorch advises to run whatever is in the file.
        raise ValueError("damaged, or more than tensors and plain values") from error
