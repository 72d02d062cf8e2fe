"""Image files in shards: their index, which joins the sidecars, and the source of their bytes."""

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import Columns, parse_facts
from loaders.file_index import listed_files
from loaders.files import Files
from loaders.images import reason_of
from loaders.index import Index, Source, new_index, read_index, stored
from loaders.layouts import SPLITS, check_settings
from loaders.order import ORDER, random_permutation, stream_key
from loaders.shards.storage import Copies, Storage
from loaders.targets import ImageSpec, target_of

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Place of a file's content: number of the shard, first byte, number of bytes, their checksum."""

DESCRIPTION = "shards.json"
AT_ONCE = 32
"""Number of requests at a time."""

FIX = "pack by python -m loaders.pack ... format=shards into another place"


def open_shards(data: DataConfig) -> dict[str, Index]:
    """Open the index of the training and of the validation split from the shards below `data.root`.

    Raises:
        UserError: shards are missing, damaged, or packed with other settings or by another version.
        StorageError: their storage cannot be used.
    """
    storage, where = Storage(data.root, data.retry_s), f"data.root={data.root}: {DESCRIPTION}"
    text = storage.read(DESCRIPTION)
    about = parse_facts(text, where, FIX)
    check_settings(about["settings"], data, where, FIX)
    listed = sorted(listed_files(data))
    description = hashlib.sha256(text).hexdigest()[:16]
    cache = Path(data.cache_dir, "shards", description).absolute()
    window = data.shuffle_window if data.shuffle == "window" else None
    indexes = {}
    for split in SPLITS:
        folder = cache / f"{split}-{zlib.crc32(repr(listed).encode()):08x}"
        shards = [name for name in about["shards"] if name.startswith(split)]
        columns = stored(folder, partial(_join, storage, shards, about["splits"][split], listed))
        copies = Copies(storage, split, cache)
        indexes[split] = read_index(Shards(columns, copies, description, window))
    return indexes


def _join(storage: Storage, shards: list[str], facts: dict[str, Any], listed: list[str]) -> Index:
    """Return the index of a split with these shards, without the files `listed`."""

    def read(name: str) -> dict[str, np.ndarray]:
        content, place = storage.read(f"{name}.npz"), storage.place_of(f"{name}.npz")
        try:
            with np.load(BytesIO(content)) as columns:
                return dict(columns)
        except Exception as error:  # damaged bytes make NumPy raise errors of any type
            raise UserError(f"{place} is damaged ({reason_of(error, place)}); {FIX}") from None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(read, shards))
    columns = Columns()
    for name in parts[0]:
        columns[name] = np.concatenate([part[name] for part in parts])
    rows = np.argsort(columns["samples"])
    if listed:
        # Lines are places, see `Shards.place`, or paths below the folder that was packed.
        paths = [os.fsencode(line.rpartition(".tar: ")[2]) for line in listed]
        is_listed = np.any([np.isin(side, paths) for side in columns.of_sides("names")], axis=0)
        rows = rows[~is_listed[rows]]
    for name, column in columns.items():
        columns[name] = column[rows]
    target = target_of(facts["target"], columns.get("values"))
    inputs, notes = ImageSpec(**facts["inputs"]), facts["notes"]
    index = new_index(facts["name"], target, inputs, Source(columns), notes=notes)
    spans = columns["spans-0"]
    counts = np.bincount(spans["shard"], minlength=len(shards))
    columns["order"] = np.lexsort((spans["start"], spans["shard"]))
    columns["starts"] = np.concatenate([[0], np.cumsum(counts)])
    return index


class Shards(Files):
    """The image files of N samples in S shards.

    Args:
        columns: those of `Files`; for each side `spans`, (N,) of dtype `SPAN`; `order`, (N,) int64:
            the samples in the order in which they are stored; `starts`, (S + 1,) int64: where in it
            each shard begins, and the end.
        copies: the tar files.
        description: hash of what was packed.
        window: shards in a window, within which training is shuffled; None: shuffle all samples.
    """

    form = "contents"
    fix = "pack the data again, or remove the copy"

    def __init__(
        self, columns: Columns, copies: Copies, description: str, window: int | None
    ) -> None:
        super().__init__(columns, "")
        self.copies, self.window = copies, window
        if window is not None:
            self.order_name = f"{ORDER}, windows of {window} shards of {description}"

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        return None

    def content(self, sample: int, side: int) -> bytes:
        shard, start, length, crc32 = self.columns[f"spans-{side}"][sample].item()
        content = self.copies.read(shard, start, length)
        if zlib.crc32(content) != crc32:
            error = ValueError(f"in {self.copies.path(shard)}, its bytes are not those packed")
            raise self.bad_file(sample, side, error) from error
        return content

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        return Source.read_form(self, samples, side, spec)

    def place(self, sample: int, side: int) -> str:
        shard = self.columns[f"spans-{side}"]["shard"][sample]
        tar = f"{self.copies.split}/{shard:06d}.tar"
        return f"{self.copies.storage.place_of(tar)}: {self.path(sample, side)}"

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        if self.window is None:
            return super().shuffled(positions, count, seed, epoch)
        return self.columns["order"][_windows(self, seed, epoch, True).shuffled(positions)]

    def following(self, sample: int, count: int) -> int:
        """Return the next sample of the same shard, after its last one the first."""
        shard = int(self.columns["spans-0"]["shard"][sample])
        start, end = self.columns["starts"][shard : shard + 2]
        inside = self.columns["order"][start:end].tolist()
        return inside[(inside.index(sample) + 1) % len(inside)]

    def fetch(self, rows: np.ndarray, seed: int, train: bool) -> None:
        """Begin to copy what rows need or, in windows, this one and the next, and remove all but
        the one before."""
        if not self.copies.is_remote:
            return
        if self.window is None:
            shards = self.columns["spans-0"]["shard"][rows["sample"]]
            self.copies.prefetch(np.unique(shards).tolist())
            return
        windows = _windows(self, seed, int(rows["epoch"][0]), train)
        window = int(windows.at(rows["position"][:1])[0])
        # Batches of the window before may still be in use.
        self.copies.keep(windows.between(window - 1, window + 2))
        self.copies.prefetch(windows.between(window, window + 2))


@lru_cache(maxsize=4)
def _windows(source: Shards, seed: int, epoch: int, train: bool) -> "Windows":
    """Return the windows of an epoch."""
    assert source.window is not None
    return Windows(source.columns["starts"], source.window, seed, epoch, train)


class Windows:
    """The S shards of a split in the order of an epoch, which is shuffled, and then the samples
    within windows of `size` shards; the last one may have fewer. It takes O(S) of memory.

    `starts`, (S + 1,) int64, is the number of samples stored before each shard, and of all. If not
    `train`, the shards are read as they are stored.
    """

    def __init__(self, starts: np.ndarray, size: int, seed: int, epoch: int, train: bool) -> None:
        self.starts, self.size, self.seed, self.epoch = starts, size, seed, epoch
        count = len(starts) - 1
        self.shards = np.arange(count)
        if train:
            key = stream_key("shard", seed, epoch)
            self.shards = random_permutation(self.shards, count, key)
        # Positions in the epoch at which each shard and each window begins, and the end.
        self.begins = np.concatenate([[0], np.cumsum(np.diff(starts)[self.shards])])
        self.bounds = np.append(self.begins[:-1:size], self.begins[-1])

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the window of each position."""
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def between(self, first: int, end: int) -> list[int]:
        """Return the shards of the windows from `first` on, before `end`."""
        return self.shards[self.size * max(0, first) : self.size * end].tolist()

    def shuffled(self, positions: np.ndarray) -> np.ndarray:
        """Return how many samples are stored before those at these positions of the epoch."""
        window_of = self.at(positions)
        mixed = np.empty(len(positions), np.int64)
        for window in np.unique(window_of).tolist():
            inside = window_of == window
            first, end = self.bounds[window : window + 2].tolist()
            key = stream_key("window", self.seed, self.epoch, window)
            mixed[inside] = first + random_permutation(positions[inside] - first, end - first, key)
        place = np.searchsorted(self.begins, mixed, side="right") - 1
        return self.starts[self.shards[place]] + mixed - self.begins[place]
