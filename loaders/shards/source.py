"""Image files in shards as the source of a split."""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from loaders.columns import open_column
from loaders.files import Files, open_files
from loaders.index import Source
from loaders.order import ORDER
from loaders.shards.copies import Copies
from loaders.shards.windows import Windows
from loaders.targets import ImageSpec

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Place of a file's content: number of the shard, first byte, number of bytes, their checksum."""


class Shards(Files):
    """The image files of N samples in S shards.

    Args:
        folder: folder of the columns: those of `Files`; `spans-0` and, of pairs, `spans-1`, (N,) of
            dtype `SPAN`; `order`, (N,) int64: the samples in the order in which they are stored;
            `starts`, (S + 1,) int64: where in it each shard begins, and the end.
        copies: the tar files.
        description: hash of what was packed.
        window: shards in a window, within which training is shuffled; None: shuffle all samples.
    """

    form = "contents"
    fix = "pack the data again"

    def __init__(self, folder: Path, copies: Copies, description: str, window: int | None) -> None:
        self.arguments = folder, copies, description, window
        files = open_files(folder, "")
        super().__init__(files.paths, files.headers, folder)
        self.spans = [open_column(folder / f"spans-{side}.npy") for side in range(len(self.paths))]
        self.order = open_column(folder / "order.npy")
        self.starts = open_column(folder / "starts.npy")
        self.copies, self.window = copies, window
        if window is not None:
            self.order_name = f"{ORDER}, windows of {window} shards of {description}"
        self._place = (-1, -1)  # epoch and window of the last batch

    def __reduce__(self) -> Any:
        return Shards, self.arguments

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        return None

    def content(self, sample: int, side: int) -> bytes:
        shard, start, length, crc32 = self.spans[side][sample].item()
        for _ in range(2):
            content = self.copies.read(shard, start, length)
            if zlib.crc32(content) == crc32:
                return content
            self.copies.renew(shard)
        error = ValueError(f"in {self.copies.path(shard)}, its bytes are not those packed")
        raise self.bad_file(sample, side, error) from error

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        return Source.read_form(self, samples, side, spec)

    def place(self, sample: int, side: int) -> str:
        tar = f"{self.copies.split}/{self.spans[side]['shard'][sample]:06d}.tar"
        return f"{self.copies.storage.place_of(tar)}: {self.paths[side][sample]}"

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        if self.window is None:
            return super().shuffled(positions, count, seed, epoch)
        return self.order[_windows(self, seed, epoch, True).shuffled(positions)]

    def storage_order(self, count: int) -> Sequence[int]:
        return self.order.tolist()

    def following(self, sample: int, count: int) -> int:
        """Return the next sample of the same shard, after its last one the first."""
        shard = int(self.spans[0]["shard"][sample])
        inside = self.order[self.starts[shard] : self.starts[shard + 1]]
        position = int(np.flatnonzero(inside == sample)[0])
        return int(inside[(position + 1) % len(inside)])

    def fetch(self, rows: np.ndarray, seed: int, train: bool) -> None:
        self.copies.fetch(np.unique(self.spans[0]["shard"][rows["sample"]]).tolist())
        epoch = int(rows["epoch"][0])
        windows = _windows(self, seed, epoch, train)
        window = int(windows.at(rows["position"][:1])[0])
        if self._place != (epoch, window):
            self._place = epoch, window
            # Batches of the window before may still be in use.
            self.copies.keep(windows.between(window - 1, window + 2))
        self.copies.prefetch(windows.between(window, window + 2))


@lru_cache(maxsize=4)
def _windows(source: Shards, seed: int, epoch: int, train: bool) -> Windows:
    """Return the windows of an epoch; without any, one of all shards."""
    size = source.window or len(source.starts) - 1
    return Windows(source.starts, size, seed, epoch, train)
