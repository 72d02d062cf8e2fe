"""The samples of a split as columns, found and checked once by a layout before any backend runs."""

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from conf.errors import UserError, shown
from conf.schema import DataConfig
from loaders.epoch import ORDER, BadFileError, EpochSampler, shuffled
from loaders.images import reason_of
from loaders.targets import ImageSpec, Target, describe_target


@dataclass(frozen=True, eq=False)
class Paths(Sequence[str]):
    """The paths of N files, in an array that is smaller than N strings and that processes share."""

    folder: str
    """Below which all of them lie, as `folder_of` returns it."""

    names: np.ndarray
    """(N,) bytes: what follows in each path."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        name = os.fsdecode(bytes(self.names[number]))
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise UserError(
                f"{shown(repr(name))} leads out of {self.folder}; write the index again"
            )
        return self.folder + name


def paths_of(files: Sequence[str], root: str) -> Paths:
    """Store these paths of files below `root`, in this order."""
    folder = folder_of(root)
    names = [os.fsencode(os.path.normpath(path).removeprefix(folder)) for path in files]
    return Paths(folder, np.array(names, np.bytes_))


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


@dataclass(frozen=True)
class Index:
    """The samples of one split.

    Their pixels are in `pixels` or in `files`. Samples have one side, the input, or two: the input
    (side 0) and a target image (side 1). A subclass reads files that lie elsewhere.
    """

    by_path: ClassVar[bool] = True
    """True if `files` are read by their paths."""

    name: str
    """Data set and split, for messages, such as `mnist_mini/train`."""

    sizes: np.ndarray
    """(N, 2) int: height and width of each input in pixels, upright."""

    channels: int
    """Channels of each image."""

    target: Target
    """Kind, and labels if there are any, of the samples' targets."""

    dtype: str = "uint8"
    """`uint8` or `uint16`: type of the pixels."""

    pixels: tuple[np.ndarray, ...] = ()
    """Decoded images of each side, flat and one after the other."""

    offsets: np.ndarray | None = None
    """(N,) int64: number of pixels of the inputs before each one in `pixels`."""

    files: tuple[Paths, ...] = ()
    """Paths of each side."""

    headers: tuple[np.ndarray, ...] = ()
    """Headers of the files of each side, of dtype `loaders.images.HEADER`."""

    resized: bool = False
    """True if `data.resize` was applied already."""

    keep_channels: bool = False
    """True if the channels are those of the file; otherwise every image becomes 8-bit RGB."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Files that `data.on_error=skip` leaves out, and the reasons why their headers cannot be
    used."""

    notes: tuple[str, ...] = ()
    """Lines for the log on what may be wrong, found when the files were listed."""

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def distinct_sizes(self) -> np.ndarray:
        """(M, 2) int64: the sizes that inputs have."""
        if self.sizes.strides[0] == 0:  # one size, held once
            return self.sizes[:1].astype(np.int64)
        codes = np.unique(self.sizes[:, 0].astype(np.int64) << 32 | self.sizes[:, 1])
        return np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)

    @functools.cached_property
    def sides(self) -> tuple[ImageSpec, ...]:
        """The images of each sample."""
        content = "stored" if self.keep_channels else "rgb"
        inputs = ImageSpec(self.channels, self.dtype, content=content)
        targets = self.target.spec(inputs)
        return (inputs, targets) if targets else (inputs,)

    def name_of(self, sample: int) -> str:
        """Return the path of the sample's (input) file, or its number where there are no files."""
        return self.files[0][sample] if self.files else f"sample {sample}"

    def place_of(self, sample: int, side: int) -> str:
        """Return where the content of a file lies, such as its path, for messages."""
        return self.files[side][sample]

    @functools.cached_property
    def is_raw(self) -> bool:
        """True if inputs have one size and are in memory unresized, or uncompressed in files."""
        if len(self.sides) > 1 or len(self.distinct_sizes) > 1:
            return False
        if self.files and self.keep_channels:
            return bool((self.headers[0]["raw_offset"] >= 0).all())
        return bool(self.pixels) and not self.resized

    @property
    def storage_order(self) -> Sequence[int]:
        """All samples, in the order in which they are stored."""
        return range(len(self))

    def order_name(self, data: DataConfig) -> str:
        """Return a name of the order of training, which changes with it.

        Raises:
            UserError: it cannot be read in the order `data.shuffle`.
        """
        if data.shuffle == "window":
            raise UserError(
                f"data.shuffle=window needs shards, and {self.name} has none; use data.shuffle=full"
            )
        return ORDER

    def shuffled(self, positions: np.ndarray, sampler: EpochSampler) -> np.ndarray:
        """Return the samples at these positions of the sampler's current epoch of training."""
        return shuffled(positions, len(self), sampler.seed, sampler.epoch)

    def fetch(self, rows: np.ndarray, sampler: EpochSampler) -> None:
        """Wait until the samples of a batch can be read. Files and memory need no waiting."""

    def check(self, samples: np.ndarray | slice) -> None:
        """Raise UserError if the columns of these samples, which somebody else may have written,
        are impossible. Those of this process need no check."""

    def read_bytes(self, sample: int, side: int) -> bytes | bytearray:
        """Return the content of a file.

        Raises:
            BadFileError: the file cannot be read, or is not the one that was indexed.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        try:
            return read_unchanged(self.files[side][sample], self.headers[side][sample])
        except (OSError, MemoryError) as error:
            raise self.bad_file(sample, side, error) from error

    def unchanged_path(self, sample: int, side: int) -> str:
        """Return the path of a file.

        Raises:
            BadFileError: it has changed since it was indexed.
            OSError, MemoryError: as `bad_file`.
        """
        path = self.files[side][sample]
        try:
            check_unchanged(path, self.headers[side][sample], os.stat(path))
        except OSError as error:
            raise self.bad_file(sample, side, error) from error
        return path

    def changed(self, samples: np.ndarray) -> dict[int, str]:
        """Return, by sample, the reasons why samples are bad because a file has changed since it
        was indexed."""
        bad: dict[int, str] = {}
        for side in range(len(self.files)):
            for sample in samples.tolist():
                try:
                    self.unchanged_path(sample, side)
                except BadFileError as error:
                    bad[sample] = str(error)
        return bad

    def bad_file(self, sample: int, side: int, error: Exception) -> BadFileError:
        """Return the error to raise where reading a file failed with `error`.

        Raises:
            OSError, MemoryError: `error`, if the machine is to blame and not the file.
        """
        if isinstance(error, BadFileError):
            return error
        path = self.files[side][sample]
        reason = reason_of(error, path)
        return BadFileError(f"{path} cannot be decoded ({reason}); repair or remove it")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan depends on, and of the file names: 16 hexadecimal digits."""
        factors = tuple(side.size_factor for side in self.sides)
        target = describe_target(self.target)
        facts = f"{self.name} {self.channels} {self.dtype} {factors} {target}"
        values = getattr(self.target, "values", None)
        parts = [np.frombuffer(facts.encode(), np.uint8), self.sizes.astype(np.int32)]
        parts += [array for array in (values, *self.pixels) if array is not None]
        for paths in self.files:
            ends = np.concatenate([[0], np.cumsum(np.char.str_len(paths.names))])
            # Without the zeros that fill up shorter names.
            parts += [np.frombuffer(paths.names.tobytes().replace(b"\0", b""), np.uint8), ends]
        hashes = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts]
        return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]


def read_unchanged(
    path: str, header: np.void, start: int = 0, into: np.ndarray | None = None
) -> bytearray:
    """Return the content of a file; with `into`, fill that array with its bytes from `start` on.

    Raises:
        OSError: it cannot be read, or is not the one that was indexed.
    """
    file = os.open(path, os.O_RDONLY)  # a file object would call the system twice as often
    try:
        check_unchanged(path, header, os.fstat(file))
        # Unlike bytes, an array can use a bytearray without a copy.
        content = bytearray(header["num_bytes"] if into is None else 0)
        filled = content if into is None else into.data.cast("B")
        if os.preadv(file, [filled], start) < len(filled):
            raise OSError("it is cut short")
        return content
    finally:
        os.close(file)


def check_unchanged(path: str, header: np.void, found: os.stat_result) -> None:
    """Raise BadFileError unless a file, found like this, has the size and the time of change of its
    indexed header (of dtype `HEADER`)."""
    if (header["num_bytes"], header["modified_ns"]) != (found.st_size, found.st_mtime_ns):
        raise BadFileError(f"{path} has changed since it was indexed; start again to reindex it")
