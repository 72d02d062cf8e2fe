"""Write a data set as shards: tar files in WebDataset's format, and their index.

    python -m loaders.pack data=imagefolder data.root=photos format=shards out=s3://photos part=3/64

Files are copied unchanged, or with `quality=90` resized by `data.resize` and encoded again: photos
as JPEG (`quality=lossless`: PNG), masks always as PNG, TIFFs with any number of channels as TIFF.

After each complete shard its piece of the index is stored: a restart continues with the shards that
have no piece. The process that stores the last piece joins all of them.
"""

import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image
from tqdm import tqdm

from conf.credentials import without_credentials
from conf.errors import UserError
from conf.files import checksum
from conf.schema import DataConfig
from loaders.common import cpus_per_rank
from loaders.epoch import random_permutation, stream_key
from loaders.images import HEADER, Header, read_header
from loaders.index import (
    SPLITS,
    Index,
    build_index,
    read_whole,
    save_columns,
    settings_of,
    write_columns,
)
from loaders.plan import resized_sizes
from loaders.shards.files import SPAN, key_in_shard
from loaders.shards.open import DESCRIPTION, FORMAT, shard_name
from loaders.storage import Storage, open_storage
from loaders.targets import ImageSpec

BEGUN = "begun.json"
PIECE = np.dtype([("span", SPAN), ("header", HEADER)])
LOSSLESS = "lossless"
SIDE_NAMES = ("input", "target")
OF_FILES = ("table", "path_column")
"""Keys of `data` that locate labels, which the shards contain."""
SHARDS_AT_ONCE, IN_FLIGHT = 4, 32


class Part(NamedTuple):
    """The shards that a process writes: every `of`-th one, from the `number`-th one on."""

    number: int
    """In [1, of]."""
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def part_of(text: str | None, environment: Mapping[str, str] = os.environ) -> Part:
    """Parse `part=3/64`; without it, take the part of a Slurm array or torchrun, else all shards.

    Raises:
        UserError: the part is not possible, as that of a Slurm array with gaps.
    """
    if not text and "SLURM_ARRAY_TASK_ID" in environment:
        task, first, step, count = (
            int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "STEP", "COUNT")
        )
        text = f"{(task - first) // step + 1}/{count}"
    if not text and environment.get("RANK"):
        text = f"{int(environment['RANK']) + 1}/{environment.get('WORLD_SIZE', '')}"
    text = text or "1/1"
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise UserError(f"part={text} is not possible; use part=1/64 to part=64/64, for example")
    return Part(int(number), int(of))


def shard_options(shard_mb: str, part: str, quality: str) -> dict[str, Any]:
    """Convert options of the command line, empty if not given, to arguments of `pack_shards`.

    Raises:
        UserError: a value is not possible.
    """
    try:
        size = float(shard_mb or 128)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise UserError(f"shard_mb={shard_mb} is not possible; use a number above 0, such as 128")
    if quality not in ("", LOSSLESS, *map(str, range(1, 101))):
        raise UserError(
            f"quality={quality} is not possible; use 1 to 100 (JPEG), or {LOSSLESS} (PNG)"
        )
    return {"shard_mb": size, "part": part_of(part), "quality": quality or None}


Encoded = tuple[bytes | bytearray, Any, str]
"""Content of a file, its header (of dtype `HEADER`, or its fields) and ending, such as `.jpg`."""


class Split:
    """A split, divided into shards.

    Args:
        name: `train` or `val`.
        index: index of its samples.
        data: the configuration.
        shard_mb: approximate size of a shard in MB.
        quality: quality of JPEGs, 1 to 100; `lossless`: PNG; None: copy the files.

    Attributes:
        order, starts: see `Shards`. Training samples are shuffled, which mixes the classes in a
            shard; validation samples keep the order of the index.
    """

    def __init__(
        self, name: str, index: Index, data: DataConfig, shard_mb: float, quality: str | None
    ) -> None:
        if not index.files:
            raise UserError(
                f"data={data.layout} data.root={without_credentials(data.root)} has no image files "
                "to pack; set data.root to a folder of images"
            )
        self.name, self.index, self.data, self.quality = name, index, data, quality
        self.sizes = index.sizes if quality is None else resized_sizes(data, index.sizes)
        self.order = np.arange(len(index))
        if name == "train":
            self.order = random_permutation(
                self.order, len(index), stream_key("shard", data.split_seed)
            )
        shrunk = np.minimum(1, self.sizes.prod(axis=1) / index.sizes.prod(axis=1))
        stored = [
            np.ceil(side["num_bytes"] * shrunk / tarfile.BLOCKSIZE) + 1 for side in index.headers
        ]
        labels = 0 if len(index.sides) > 1 else 2  # blocks, with the header
        num_bytes = tarfile.BLOCKSIZE * (np.sum(stored, axis=0)[self.order] + labels)
        shard_of = (np.cumsum(num_bytes) - num_bytes) // (shard_mb * 1e6)
        changes = np.flatnonzero(np.diff(shard_of)) + 1
        self.starts = np.concatenate([[0], changes, [len(index)]]).astype(np.int64)

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.starts) - 1

    def describe(self) -> dict[str, Any]:
        """Describe the files that the content of the shards depends on."""
        sizes = [np.ascontiguousarray(side["num_bytes"]) for side in self.index.headers]
        sizes_crc32 = zlib.crc32(np.stack(sizes).tobytes())
        return {"fingerprint": self.index.fingerprint, "sizes_crc32": sizes_crc32}

    def samples_of(self, number: int) -> np.ndarray:
        """Return the samples of a shard, in its order."""
        return self.order[self.starts[number] : self.starts[number + 1]]

    def write(self, number: int, path: Path) -> np.ndarray:
        """Write a shard and return its piece of the index: (samples, sides) of dtype `PIECE`."""
        samples = self.samples_of(number)
        piece = np.zeros((len(samples), len(self.index.sides)), PIECE)
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for row, sample in zip(piece, samples.tolist(), strict=True):
                key = key_in_shard(sample)
                for side, place in enumerate(row):
                    content, header, ending = self._encoded(sample, side)
                    name = f".{SIDE_NAMES[side]}" if len(row) > 1 else ""
                    start = tar.offset + tarfile.BLOCKSIZE
                    _add(tar, f"{key}{name}{ending}", content)
                    place["span"] = number, start, len(content), zlib.crc32(content)
                    place["header"] = header
                    place["header"]["num_bytes"], place["header"]["modified_ns"] = len(content), 0
                for ending, text in self._labels(sample):
                    _add(tar, f"{key}{ending}", text.encode())
        return piece

    def _encoded(self, sample: int, side: int) -> Encoded:
        if self.quality is not None:
            size, reduces = self.sizes[sample], self.data.reduced_decoding
            image = read_whole(self.index, sample, side, size, reduces)
            return encode(image, self.index.sides[side], self.quality)
        ending = os.path.splitext(self.index.files[side][sample])[1].lower()
        content = self.index.read_bytes(sample, side)
        return (content, self.index.headers[side][sample], ending)

    def _labels(self, sample: int) -> Iterator[tuple[str, str]]:
        """Yield labels for users of WebDataset: the ending of the file's name, and its text."""
        target: Any = self.index.target
        if target.kind == "labels":
            yield ".cls", str(int(target.values[sample]))
        elif target.kind == "several labels":
            has = target.values[sample] > 0
            yield (
                ".json",
                json.dumps([n for n, is_it in zip(target.classes, has, strict=True) if is_it]),
            )
        elif target.kind == "numbers":
            values = target.values[sample].tolist()
            yield ".json", json.dumps(dict(zip(target.names, values, strict=True)))


def encode(image: np.ndarray, side: ImageSpec, quality: str) -> Encoded:
    """Encode an image of shape (H, W, C)."""
    height, width = image.shape[:2]
    file = BytesIO()
    if side.content == "stored":
        from tifffile import imwrite

        imwrite(file, image, photometric="minisblack", planarconfig="contig")
        file.seek(0)
        return (file.getvalue(), tuple(read_header(file, "stored")), ".tif")
    is_photo = side.content == "rgb"
    header = Header(height, width, 3 if is_photo else 1, 8 * image.itemsize, dali_reads=is_photo)
    if is_photo and quality != LOSSLESS:
        jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(image), int(quality))
        return (jpeg, tuple(header), ".jpg")
    Image.fromarray(image if is_photo else image[..., 0]).save(file, "PNG")
    return (file.getvalue(), tuple(header), ".png")


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    facts = tarfile.TarInfo(name)  # no times and users: the same samples give the same bytes
    facts.size = len(content)
    tar.addfile(facts, BytesIO(content))


def pack_shards(
    data: DataConfig, out: str, shard_mb: float, part: Part, quality: str | None = None
) -> None:
    """Write the shards of a part into `out`, and the index once all parts are complete.

    Raises:
        UserError: `out` holds shards of other data, or the data has no files.
        StorageError: `out` cannot be read or written.
        BadFileError: a file cannot be read.
    """
    storage, shown = open_storage(out, data), without_credentials(out)
    indexes = zip(SPLITS, build_index(data), strict=True)
    splits = {name: Split(name, index, data, shard_mb, quality) for name, index in indexes}
    for line in splits["train"].index.notes:
        print(line)
    encodes = quality is not None
    resized = ["resize"] if encodes and data.resize is not None else []
    settings = settings_of(data, *resized)
    about: dict[str, Any] = {
        "format": FORMAT,
        "settings": {key: settings[key] for key in settings if key not in OF_FILES},
        "shard_mb": shard_mb,
        "encoded": [quality, data.reduced_decoding] if encodes else None,
        "splits": {name: split.describe() for name, split in splits.items()},
    }
    text = json.dumps(about, indent=2, default=list).encode() + b"\n"
    if not storage.exists(BEGUN):
        storage.write(BEGUN, text)
    elif storage.read(BEGUN) != text:
        raise UserError(f"{shown} holds shards of other data or settings; choose another out=")
    if storage.exists(DESCRIPTION):
        print(f"{shown} is packed already")
        return

    def is_complete(job: tuple[str, int]) -> bool:
        return storage.exists(piece_name(*job))

    def write(job: tuple[str, int]) -> None:
        if not is_complete(job):
            split, number = job
            with NamedTemporaryFile(suffix=".tar") as file:
                piece = splits[split].write(number, Path(file.name))
                storage.write(shard_name(split, number), Path(file.name))
            storage.write(piece_name(split, number), piece.tobytes())

    jobs = [(name, number) for name, split in splits.items() for number in range(len(split))]
    mine = jobs[part.number - 1 :: part.of]
    with ThreadPoolExecutor(max(SHARDS_AT_ONCE, cpus_per_rank())) as pool:
        list(tqdm(pool.map(write, mine), total=len(mine), desc=f"part {part}", unit="shard"))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        complete = list(pool.map(is_complete, jobs))
        if not all(complete):
            missing = complete.index(False)
            of = Part(missing % part.of + 1, part.of)
            print(
                f"part {part} is complete; {shard_name(*jobs[missing])} of part {of} is missing: "
                "the part that ends last writes the index"
            )
            return
        about["columns"] = {}
        for split in splits.values():
            about["columns"] |= _write_index(split, storage, pool)
    storage.write(DESCRIPTION, json.dumps(about, indent=2, default=list).encode())
    print(f"{shown} is packed: {len(jobs):,} shards")


def _write_index(
    split: Split, storage: Storage, pool: ThreadPoolExecutor
) -> dict[str, dict[str, int]]:
    """Join a split's pieces to columns and store them; return their names, sizes and checksums."""
    with TemporaryDirectory(prefix="shards-") as temporary:
        shape = len(split.index), len(split.index.sides)
        table = np.lib.format.open_memmap(Path(temporary, "table.npy"), "w+", PIECE, shape)

        def join(number: int) -> None:
            name, samples = piece_name(split.name, number), split.samples_of(number)
            piece = np.frombuffer(storage.read(name), PIECE)
            table[samples] = piece.reshape(len(samples), shape[1])

        list(pool.map(join, range(len(split))))
        folder, columns, sides = Path(temporary, "index"), {}, range(shape[1])
        headers = tuple(table["header"][:, side] for side in sides)
        is_resized = split.quality is not None and split.data.resize is not None
        index = replace(split.index, headers=headers, sizes=split.sizes, resized=is_resized)
        write_columns(index, folder)
        spans = {f"spans-{side}": table["span"][:, side] for side in sides}
        save_columns(folder, spans | {"order": split.order, "starts": split.starts})
        for path in sorted(folder.iterdir()):
            name = f"index/{split.name}/{path.name}"
            columns[name] = {"size": path.stat().st_size, "crc32": checksum(path)}
            storage.write(name, path)
    return columns


def piece_name(split: str, number: int) -> str:
    """Return the path of a shard's piece below the root."""
    return f"pieces/{split}/{number:06d}.bin"
