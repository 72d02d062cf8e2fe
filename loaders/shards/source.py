"""Image files in shards: their index, which joins the sidecars, and reading of their bytes."""

import hashlib
import zlib
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import Columns, check_settings, parse_facts, stored
from loaders.file_index import listed_names, report_unmatched
from loaders.images import reason_of
from loaders.index import SPLITS, Index, complete
from loaders.limits import map_in_threads
from loaders.order import random_permutation, stream_key
from loaders.shards.storage import Copies, Storage
from loaders.targets import ImageSpec, target_of

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Place of a file's content: number of the shard, first byte, number of bytes, their checksum."""

DESCRIPTION = "shards.json"
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
    listed = sorted(listed_names(data))
    description = hashlib.sha256(text).hexdigest()[:16]
    cache = Path(data.cache_dir, "shards", description).absolute()
    window = data.shuffle_window if data.shuffle == "window" else None
    indexes: dict[str, Index] = {}
    for split in SPLITS:
        folder = cache / f"{split}-{zlib.crc32(repr(listed).encode()):08x}"
        shards = [name for name in about["shards"] if name.startswith(split)]
        columns = stored(folder, partial(_join, storage, shards, about["splits"][split], listed))
        copies = Copies(storage, split, cache)
        indexes[split] = Shards(columns, copies, description, window)
    matched = sum(index.columns.facts["num_matched"] for index in indexes.values())
    report_unmatched(data, len(listed), matched)
    return indexes


def _join(
    storage: Storage, shards: list[str], facts: dict[str, Any], listed: list[bytes]
) -> Columns:
    """Return the columns of a split with these shards, without the files `listed`."""
    files, parts = [f"{name}.npz" for name in shards], []
    contents = map_in_threads(storage.read, files, "reading sidecars")
    # In one thread: in several, Python 3.11 may fail to parse NumPy's headers (issue gh-106905).
    for file, content in zip(files, contents, strict=True):
        try:
            with np.load(BytesIO(content)) as part:
                parts.append(dict(part))
        except Exception as error:  # damaged bytes make NumPy raise errors of any type
            place = storage.place_of(file)
            raise UserError(f"{place} is damaged ({reason_of(error, place)}); {FIX}") from None
    columns = Columns({name: np.concatenate([p[name] for p in parts]) for name in parts[0]})
    rows = np.argsort(columns["samples"])
    is_listed = [np.isin(side, listed) for side in columns.of_sides("names")]
    columns = columns.take(rows[~np.any(is_listed, axis=0)[rows]])
    target = target_of(facts["target"], columns.get("values"))
    specs = [ImageSpec(*side) for side in facts["sides"]]
    complete(columns, facts["name"], target, specs, notes=facts["notes"])
    columns.facts["num_matched"] = int(np.sum(is_listed))
    spans = columns["spans-0"]
    columns["order"] = np.lexsort((spans["start"], spans["shard"]))
    columns["starts"] = np.append(0, np.bincount(spans["shard"], minlength=len(shards)).cumsum())
    return columns


class Shards(Index):
    """The image files of N samples in S shards.

    Args:
        columns: those of files; for each side `spans`, (N,) of dtype `SPAN`; `order`, (N,) int64:
            the samples in the order in which they are stored; `starts`, (S + 1,) int64: where in it
            each shard begins, and the end.
        copies: the tar files.
        description: hash of what was packed.
        window: shards in a window, within which training is shuffled; None: shuffle all samples.
    """

    fix = "pack the data again, or remove the copy"

    def __init__(
        self, columns: Columns, copies: Copies, description: str, window: int | None
    ) -> None:
        super().__init__(columns)
        self.copies, self.window = copies, window
        if window is not None:
            self.order_name = f"{self.order_name}, windows of {window} shards of {description}"

    def content(self, sample: int, side: int) -> bytes:
        shard, start, length, crc32 = self.columns[f"spans-{side}"][sample].item()
        content = self.copies.read(shard, start, length)
        if zlib.crc32(content) != crc32:
            error = ValueError(f"in {self.copies.path(shard)}, its bytes are not those packed")
            raise self.bad_file(sample, side, error) from error
        return content

    def place_of(self, sample: int, side: int) -> str:
        shard = self.columns[f"spans-{side}"]["shard"][sample]
        tar = f"{self.copies.split}/{shard:06d}.tar"
        return f"{self.copies.storage.place_of(tar)}: {self.name_of(sample, side)}"

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        if self.window is None:
            return super().shuffled(positions, count, seed, epoch)
        shards, begins = _shards_of(self, seed, epoch, True)
        window_of = (np.searchsorted(begins, positions, side="right") - 1) // self.window
        mixed = np.empty(len(positions), np.int64)  # positions before samples are shuffled
        for window in np.unique(window_of).tolist():
            inside = window_of == window
            first_shard = window * self.window
            end_shard = min(first_shard + self.window, len(shards))
            first, end = begins[[first_shard, end_shard]].tolist()
            key = stream_key("window", seed, epoch, window)
            mixed[inside] = first + random_permutation(positions[inside] - first, end - first, key)
        place = np.searchsorted(begins, mixed, side="right") - 1
        stored = self.columns["starts"][shards[place]] + mixed - begins[place]
        return self.columns["order"][stored]

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
        shards, begins = _shards_of(self, seed, int(rows["pass"][0]), train)
        place = int(np.searchsorted(begins, rows["position"][0], side="right")) - 1
        first = place - place % self.window
        end = first + 2 * self.window
        # Batches of the window before may still be in use.
        self.copies.keep(shards[max(0, first - self.window) : end].tolist())
        self.copies.prefetch(shards[first:end].tolist())


@lru_cache(maxsize=4)
def _shards_of(index: Shards, seed: int, epoch: int, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the S shards of an epoch in their order, which training shuffles, and the positions in
    the epoch at which each begins, and the end."""
    lengths = np.diff(index.columns["starts"])
    shards = np.arange(len(lengths))
    if train:
        shards = random_permutation(shards, len(lengths), stream_key("shard", seed, epoch))
    return shards, np.append(0, lengths[shards].cumsum())
