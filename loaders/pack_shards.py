"""Writes a data set as shards: tar files as WebDataset has them, and beside them their index.

    python -m loaders.pack data=imagefolder data.root=photos format=shards out=s3://bucket/photos part=3/64

Files are copied as they are. With `quality=90` they are resized by `data.resize` and encoded anew: photos as
JPEG, with `quality=lossless` as PNG; masks always as PNG, TIFFs with any number of channels as TIFF.

Each shard is stored whole, and then a piece of the index, which says so: whoever starts again goes on with
the shards that have none. Who stores the last piece joins all of them.
"""

import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np
import simplejpeg
import tifffile
from PIL import Image
from tqdm import tqdm

from conf.mistakes import Mistake
from conf.schema import DataConfig
from loaders.columns import SETTINGS, SPLITS, settings_of, write_columns
from loaders.headers import HEADER, Header, read_tiff_header
from loaders.index import Index, Side
from loaders.layouts import build_index
from loaders.limits import cpus_per_rank
from loaders.packed import describe_split
from loaders.plan import resized_sizes
from loaders.randomness import key_of, shuffled
from loaders.resize import read_resized
from loaders.shard_index import DESCRIPTION, FORMAT
from loaders.shards import SPAN, key_in_shard, shard_name
from loaders.storage import open_storage, without_credentials
from loaders.targets import Labels, Numbers, SeveralLabels

T = TypeVar("T")
R = TypeVar("R")

BEGUN = "begun.json"
PIECE = np.dtype([("span", SPAN), ("header", HEADER)])
LOSSLESS = "lossless"
SIDE_NAMES = ("input", "target")
OF_FILES = ("table", "path_column")
"""Keys of `data` that say where labels are, which the shards then hold."""
SHARDS_AT_ONCE, IN_FLIGHT = 4, 32


@dataclass(frozen=True)
class Part:
    """Which of the shards a process writes: every `of`-th one from `number` on, which counts from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def part_of(
    text: str | None, environment: "os._Environ[str] | dict[str, str]" = os.environ
) -> Part:
    """The part that `part=3/64` says, or else torchrun or a Slurm array; the whole if nothing does.

    Raises:
        Mistake: there is no such part, or the array has gaps.
    """
    if text is not None:
        number, slash, of = text.partition("/")
        if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise Mistake(f"part={text} is not possible; use part=1/64 to part=64/64, for example")
        return Part(int(number), int(of))
    if "SLURM_ARRAY_TASK_ID" in environment:
        task, least, most, step, count = (
            int(environment[f"SLURM_ARRAY_TASK_{name}"])
            for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
        )
        if (most - least) // step + 1 != count:
            raise Mistake(
                f"the Slurm array has gaps: {count} tasks from {least} to {most}, so that "
                f"SLURM_ARRAY_TASK_ID={task} says no part; give it: part=3/64, for example"
            )
        return Part((task - least) // step + 1, count)
    return Part(int(environment.get("RANK", "0")) + 1, int(environment.get("WORLD_SIZE", "1")))


def shard_options(shard_mb: str | None, part: str | None, quality: str | None) -> dict[str, Any]:
    """Arguments of `pack_shards`, from the command line.

    Raises:
        Mistake: one that is not possible.
    """
    try:
        size = float(shard_mb or 128)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise Mistake(f"shard_mb={shard_mb} is not possible; use a number above 0, such as 128")
    if quality not in (None, LOSSLESS, *map(str, range(1, 101))):
        raise Mistake(
            f"quality={quality} is not possible; use 1 to 100 (JPEG), or {LOSSLESS} (PNG)"
        )
    return {"shard_mb": size, "part": part_of(part), "quality": quality}


class Encoded(NamedTuple):
    """A file as it comes into a shard."""

    content: bytes | bytearray
    header: Any
    """Of dtype `HEADER`, or its fields."""
    ending: str
    """Of its name, such as `.jpg`."""


class Split:
    """Which samples come into which shard.

    Args:
        split: `train` or `val`.
        index: of its samples.
        data: the configuration.
        shard_mb: about as many MB come into a shard.
        quality: None, `lossless`, or of JPEGs, as the module says.

    Attributes:
        order, starts: as of `Shards`. Training samples are shuffled, so that a shard has some of all classes;
            validation reads them as they come.
    """

    def __init__(
        self, split: str, index: Index, data: DataConfig, shard_mb: float, quality: str | None
    ) -> None:
        if not index.files or index.shards is not None:
            raise Mistake(
                f"data={data.layout} data.root={without_credentials(data.root)} does not come as image files, "
                "which shards hold; set data.root to a folder of some"
            )
        self.split, self.index, self.data, self.quality = split, index, data, quality
        self.sizes = index.sizes if quality is None else resized_sizes(data, index.sizes)
        self.order = np.arange(len(index))
        if split == "train":
            self.order = shuffled(self.order, len(index), key_of("shard", data.split_seed))
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
        """The number of shards."""
        return len(self.starts) - 1

    def describe(self) -> dict[str, Any]:
        """What decides the shards' content."""
        sizes = [np.ascontiguousarray(side["num_bytes"]) for side in self.index.headers]
        return describe_split(self.index) | {
            "shards": len(self),
            "starts_crc32": zlib.crc32(self.starts.tobytes()),
            "sizes_crc32": zlib.crc32(b"".join(side.tobytes() for side in sizes)),
        }

    def samples_of(self, number: int) -> np.ndarray:
        """Those of a shard, in its order."""
        return self.order[self.starts[number] : self.starts[number + 1]]

    def write(self, number: int, path: Path) -> np.ndarray:
        """Write a shard; (samples of it, sides) of dtype `PIECE`: what lies where in it."""
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
            image = read_resized(self.index, sample, side, size, reduces)
            return encode(image, self.index.sides[side], self.quality)
        ending = os.path.splitext(self.index.files[side][sample])[1].lower()
        content = self.index.content(sample, side)
        return Encoded(content, self.index.headers[side][sample], ending)

    def _labels(self, sample: int) -> Iterator[tuple[str, str]]:
        """What WebDataset's users find beside the images: the ending of its name, and its text."""
        target = self.index.target
        if isinstance(target, Labels):
            yield ".cls", str(int(target.values[sample]))
        elif isinstance(target, SeveralLabels):
            has = target.values[sample] > 0
            yield (
                ".json",
                json.dumps([n for n, is_it in zip(target.classes, has, strict=True) if is_it]),
            )
        elif isinstance(target, Numbers):
            values = target.values[sample].tolist()
            yield ".json", json.dumps(dict(zip(target.names, values, strict=True)))

    def write_index(self, table: np.ndarray, folder: Path) -> None:
        """Write the columns, from the (samples, sides) of dtype `PIECE` of all shards."""
        headers = tuple(table["header"][:, side] for side in range(table.shape[1]))
        is_resized = self.quality is not None and self.data.resize is not None
        index = replace(self.index, headers=headers, sizes=self.sizes, resized=is_resized)
        write_columns(index, folder, self.data.root)
        for side in range(table.shape[1]):
            np.save(folder / f"spans-{side}.npy", table["span"][:, side])
        np.save(folder / "order.npy", self.order)
        np.save(folder / "starts.npy", self.starts)


def encode(image: np.ndarray, side: Side, quality: str) -> Encoded:
    """An image of (H, W, C) as a file."""
    height, width = image.shape[:2]
    file = BytesIO()
    if side.content == "stored":
        tifffile.imwrite(file, image, photometric="minisblack", planarconfig="contig")
        file.seek(0)
        return Encoded(file.getvalue(), tuple(read_tiff_header(file)), ".tif")
    header = Header(height, width, 3 if side.content == "rgb" else 1, 8 * image.itemsize)
    if side.content == "rgb" and quality != LOSSLESS:
        jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(image), int(quality))
        return Encoded(jpeg, tuple(header), ".jpg")
    Image.fromarray(image if side.content == "rgb" else image[..., 0]).save(file, "PNG")
    return Encoded(file.getvalue(), tuple(header), ".png")


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    facts = tarfile.TarInfo(name)  # without times and users: the same samples make the same bytes
    facts.size = len(content)
    tar.addfile(facts, BytesIO(content))


def pack_shards(
    data: DataConfig, out: str, shard_mb: float, part: Part, quality: str | None = None
) -> None:
    """Write the shards of a part into `out`, and the index if all others are there, too.

    Raises:
        Mistake: `out` holds shards of other data, or the data cannot be packed so.
        StorageError: `out` cannot be read or written.
        BadFileError: a file cannot be read.
    """
    storage, shown = open_storage(out, data).origin, without_credentials(out)
    indexes = zip(SPLITS, build_index(data), strict=True)
    splits = {name: Split(name, index, data, shard_mb, quality) for name, index in indexes}
    encodes = quality is not None
    keys = [key for key in SETTINGS if key not in OF_FILES]
    keys += ["resize"] if encodes and data.resize is not None else []
    about = {
        "format": FORMAT,
        "settings": settings_of(data, tuple(keys)),
        "encoded": [quality, data.reduced_decoding] if encodes else None,
        "splits": {name: split.describe() for name, split in splits.items()},
    }
    text = json.dumps(about, indent=2, default=list).encode() + b"\n"
    with TemporaryDirectory(prefix="shards-") as temporary, ThreadPoolExecutor(IN_FLIGHT) as pool:
        folder = Path(temporary)

        def put(name: str, content: bytes) -> None:
            path = folder / name.replace("/", "-")
            path.write_bytes(content)
            storage.write(name, path)
            path.unlink()

        if not storage.exists(BEGUN):
            put(BEGUN, text)
        elif storage.read_whole(BEGUN) != text:
            raise Mistake(f"{shown} holds shards of other data or settings; choose another out=")
        if storage.exists(DESCRIPTION):
            print(f"{shown} is packed already")
            return

        def write(job: tuple[str, int]) -> None:
            split, number = job
            if not is_whole(job):
                path = folder / f"{split}-{number}.tar"
                piece = splits[split].write(number, path)
                storage.write(shard_name(split, number), path)
                path.unlink()
                put(piece_name(split, number), _saved(piece))

        def is_whole(job: tuple[str, int]) -> bool:
            return storage.exists(piece_name(*job)) and storage.exists(shard_name(*job))

        jobs = [(name, number) for name, split in splits.items() for number in range(len(split))]
        mine = jobs[part.number - 1 :: part.of]
        with ThreadPoolExecutor(max(SHARDS_AT_ONCE, cpus_per_rank())) as writers:
            list(tqdm(writers.map(write, mine), total=len(mine), desc=f"part {part}", unit="shard"))
        found = enumerate(_mapped(pool, is_whole, jobs))
        missing = next((number for number, is_there in found if not is_there), None)
        if missing is not None:
            of = Part(missing % part.of + 1, part.of)
            print(
                f"part {part} is whole; {shard_name(*jobs[missing])} of part {of} is not there yet: "
                "the part that ends last writes the index"
            )
            return
        columns = {}
        for name, split in splits.items():
            shape = len(split.index), len(split.index.sides)
            table = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", PIECE, shape)
            names = [piece_name(name, number) for number in range(len(split))]
            for number, content in enumerate(_mapped(pool, storage.read_whole, names)):
                table[split.samples_of(number)] = np.load(BytesIO(content))
            split.write_index(table, folder / "index" / name)
            for path in sorted((folder / "index" / name).iterdir()):
                column = f"index/{name}/{path.name}"
                columns[column] = {"size": path.stat().st_size, "crc32": _crc32_of(path)}
                storage.write(column, path)
        put(DESCRIPTION, json.dumps(about | {"columns": columns}, indent=2, default=list).encode())
        print(f"{shown} is packed: {len(jobs):,} shards")


def _mapped(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Sequence[T]
) -> Iterator[R]:
    """As `pool.map`, but no further ahead than needed."""
    for start in range(0, len(items), 8 * IN_FLIGHT):
        yield from pool.map(function, items[start : start + 8 * IN_FLIGHT])


def piece_name(split: str, number: int) -> str:
    return f"pieces/{split}/{number:06d}.npy"


def _saved(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def _crc32_of(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while content := file.read(1 << 24):
            crc32 = zlib.crc32(content, crc32)
    return crc32
