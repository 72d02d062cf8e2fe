"""A kind of data in a folder, the ways to read it, and what its samples should be."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loaders import Loader, build_loaders
from loaders.targets import Labels, MultiLabels
from tests.helpers import make_config
from tests.images import Data, common, index_in, paths_in
from tests.kinds import ARCHIVED, COPIES, READERS
from tests.kinds import KINDS as FILES

BATCH = 4
KINDS: dict[str, Callable[[Path], Data]] = FILES | ARCHIVED
"""Name of a kind of data -> function that writes it."""
WAYS: dict[str, list[str]] = READERS | COPIES
"""Name of a way to read data -> the overrides that choose it."""
# Ways that are not tested with all kinds of data. Of the other kinds, DALI refuses some files.
KINDS_OF = {
    "workers": ["photos"],
    "dali": [
        *("photos that DALI reads", "cells that DALI reads", "cells of 8 bits, not compressed"),
        *("cells of one channel", "pairs", "pairs, targets twice as large"),
        *("several labels", "numbers"),
    ],
    **{way: [*FILES] for way in COPIES},
}
CASES = [(kind, way) for way in WAYS for kind in KINDS if kind in KINDS_OF.get(way, KINDS)]
CROPS = ["data.crop=[24,32]", "data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]


class Sample(NamedTuple):
    name: str
    row: np.void
    inputs: Tensor
    target: Tensor


class Place:
    """A kind of data in a folder, its loaders and, by split, the names of its files."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self.root = folder, folder / "data"
        self.data = KINDS[kind](self.root)
        self.epochs: dict[tuple[object, ...], list[Sample]] = {}
        self.names = {
            index_in(loader).name: [Path(file).name for file in paths_in(index_in(loader))]
            for loader in self.loaders("threads")
        }

    def loaders(self, way: str, *more: str, rank=0, num_ranks=1) -> tuple[Loader, Loader]:
        options = (*self.data.options, *CROPS, *common(self.root), *WAYS[way])
        out = self.folder / f"pack {' '.join(more)}".replace("=", " ")
        options += (f"loader.pack='{out}'",) * (way in COPIES)
        cfg = make_config(*options, f"global_batch_size={BATCH}", *more)
        if way in COPIES:
            import_module("loaders.pack").pack(cfg.data, out)
        return build_loaders(cfg, torch.device("cpu"), rank, num_ranks)

    def read(self, loader: Loader, epoch: int | None = 0) -> list[Sample]:
        """The samples of an epoch."""
        loader.set_epoch(epoch or 0)
        names, found = self.names[index_in(loader).name], []
        for batch in loader:
            rows = loader.last_rows
            in_order = [names[sample] for sample in rows["sample"]]
            found += [Sample(*one) for one in zip(in_order, rows, *batch, strict=True)]
        return found

    def epoch(self, way: str, epoch: int | None, *more: str) -> list[Sample]:
        """An epoch of training, or (None) the validation, by one process."""
        if (way, epoch, *more) not in self.epochs:
            loader = self.loaders(way, *more)[epoch is None]
            self.epochs[way, epoch, *more] = self.read(loader, epoch)
        return self.epochs[way, epoch, *more]

    def assert_right(self, loader: Loader, sample: Sample) -> None:
        """Inputs and target are what the files hold in the rectangle of the row."""
        stored = self.data.targets[sample.name]
        target = expected_target(loader, stored, sample.row)
        expected = [cut_out(self.data.inputs[sample.name], sample.row), target]
        atol = 4.01 / 255 if sample.name.endswith("jpg") else 1e-5
        torch.testing.assert_close([*sample[2:]], expected, rtol=0, atol=atol, msg=sample.name)


def cut_out(image: np.ndarray, row: np.void, factor: int = 1) -> Tensor:
    """The rectangle of a row of the plan, flipped, as (C, H, W), or (H, W) of a mask."""
    y, x, height, width = (factor * int(row[key]) for key in ("y", "x", "height", "width"))
    image = image[y : y + height, x : x + width]
    image = image[::-1] if row["vflip"] else image
    image = image[:, ::-1] if row["hflip"] else image
    return torch.from_numpy((image if image.ndim == 2 else np.moveaxis(image, -1, 0)).copy())


def expected_target(loader: Loader, target: Any, row: np.void) -> Tensor:
    if isinstance(target, np.ndarray):
        return cut_out(target, row, max(side.size_factor for side in index_in(loader).sides))
    if isinstance(loader.info.target, Labels):
        return torch.tensor(loader.info.classes.index(target))
    if isinstance(loader.info.target, MultiLabels):
        names = target.replace(" ", "").split(";")
        return torch.tensor([float(name in names) for name in loader.info.classes])
    return torch.tensor([float(target)])
