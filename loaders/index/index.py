"""The samples of a split as columns, found and checked once by a layout before any backend runs."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.epoch import ORDER, BadFileError, EpochSampler, shuffled
from loaders.images import decode, decode_resized, reason_of
from loaders.index.paths import Paths, check_unchanged, read_unchanged
from loaders.targets import ImageSpec, Target, describe_target


@dataclass(frozen=True)
class Stored:
    """What an index knows whose columns are in a folder and mapped into memory."""

    reopen: Callable[[], "Index"]
    """Call that opens it in another process, which shares the memory of the columns."""

    fingerprint: str
    distinct_sizes: np.ndarray


@dataclass(frozen=True)
class Index:
    """The samples of one split, whose images are in files.

    They have one side, the input, or two: the input (side 0) and a target image (side 1).
    Subclasses have images elsewhere, see `MemoryIndex`.
    """

    by_path: ClassVar[bool] = True
    """True if `files` are read by their paths."""

    fix: ClassVar[str] = "repair or remove it"
    """What to do about a file that cannot be decoded."""

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

    stored: Stored | None = None
    """None if the columns are in the memory of this process."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> Any:
        if self.stored is None:
            raise TypeError("an index is pickled once share() has stored it")
        return self.stored.reopen, ()

    @functools.cached_property
    def distinct_sizes(self) -> np.ndarray:
        """(M, 2) int64: the sizes that inputs have."""
        if self.stored is not None:
            return self.stored.distinct_sizes
        codes = np.unique(self.sizes[:, 0].astype(np.int64) << 32 | self.sizes[:, 1])
        return np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan depends on, and of the file names: 16 hexadecimal digits."""
        if self.stored is not None:
            return self.stored.fingerprint
        factors = tuple(side.size_factor for side in self.sides)
        target = describe_target(self.target)
        facts = f"{self.name} {self.channels} {self.dtype} {factors} {target}"
        parts = [np.frombuffer(facts.encode(), np.uint8), self.sizes.astype(np.int32)]
        parts += [self.target.values, *self.identity()]
        hashes = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts]
        return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]

    def identity(self) -> list[np.ndarray]:
        """Return what tells the images from those of another data set: the names of the files."""
        parts = []
        for paths in self.files:
            ends = np.concatenate([[0], np.cumsum(np.char.str_len(paths.names))])
            # Without the zeros that fill up shorter names.
            parts += [np.frombuffer(paths.names.tobytes().replace(b"\0", b""), np.uint8), ends]
        return parts

    @functools.cached_property
    def sides(self) -> tuple[ImageSpec, ...]:
        """The images of each sample."""
        content = "stored" if self.keep_channels else "rgb"
        inputs = ImageSpec(self.channels, self.dtype, content=content)
        targets = self.target.spec(inputs)
        return (inputs, targets) if targets else (inputs,)

    @property
    def has_one_shape(self) -> bool:
        """True if all images have the same size and a sample has one."""
        return len(self.sides) == len(self.distinct_sizes) == 1

    @functools.cached_property
    def is_raw(self) -> bool:
        """True if `read_raw_batch` can read the inputs: they have one size and are in memory
        unresized, or uncompressed in files."""
        can_be = self.keep_channels and self.has_one_shape
        return can_be and bool((self.headers[0]["raw_offset"] >= 0).all())

    # The order in which samples are read.

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

    # Reading images.

    def read_image(self, sample: int, side: int = 0) -> np.ndarray:
        """Read an image, upright, (height, width, channels) of dtype `sides[side].dtype`.

        Raises:
            BadFileError: the file cannot be decoded.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        return self._decoded(sample, side, decode)

    def read_resized(
        self,
        sample: int,
        side: int,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        """Read and resize a rectangle of an image, (height, width, channels) of the side's dtype.

        Args:
            rectangle: y, x, height and width in pixels of the input.
            size: (height, width) in pixels of the result.
            reduces: decode a JPEG at a fraction of its size if enough.

        Raises:
            BadFileError, OSError, MemoryError: as `read_image`.
        """
        spec = self.sides[side]
        part = [spec.size_factor * length for length in rectangle]
        return self._decoded(sample, side, decode_resized, part, size, spec.interpolation, reduces)

    def _decoded(
        self, sample: int, side: int, decode: Callable[..., np.ndarray], *options: Any
    ) -> np.ndarray:
        content = self.read_bytes(sample, side)
        try:
            return decode(content, self.headers[side][sample], self.sides[side].content, *options)
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise self.bad_file(sample, side, error) from error

    def read_whole(self, sample: int, side: int, size: np.ndarray, reduces: bool) -> np.ndarray:
        """Read an image in the size for an input of (2,) `size`; see `read_resized` for the
        rest."""
        factor, whole = self.sides[side].size_factor, (0, 0, *self.sizes[sample].tolist())
        new_size = factor * int(size[0]), factor * int(size[1])
        return self.read_resized(sample, side, whole, new_size, reduces)

    def read_raw_batch(self, samples: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Read whole inputs if `is_raw`, (B, height, width, channels); return them, and the reasons
        by sample why samples are bad.

        One thread that fills a batch is faster than several that share images of a few KB, and
        reading the pixels alone 1.9 times as fast as whole files and `decode` (5 channels of
        50x50).
        """
        shape = *self.distinct_sizes[0].tolist(), self.channels
        images, bad = np.empty((len(samples), *shape), self.dtype), {}
        for sample, image in zip(samples.tolist(), images, strict=True):
            try:
                self.read_raw(sample, image)
            except OSError as error:
                bad[sample] = str(self.bad_file(sample, 0, error))
        return images, bad

    def read_raw(self, sample: int, image: np.ndarray) -> None:
        """Read the uncompressed pixels of an input into an array of its shape."""
        header = self.headers[0][sample]
        read_unchanged(self.files[0][sample], header, image.data.cast("B"), header["raw_offset"])

    def read_bytes(self, sample: int, side: int) -> bytes | bytearray:
        """Return the content of a file.

        Raises:
            BadFileError: the file cannot be read, or is not the one that was indexed.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        header = self.headers[side][sample]
        try:
            # Unlike bytes, an array can use a bytearray without a copy.
            content = bytearray(header["num_bytes"])
            read_unchanged(self.files[side][sample], header, content)
        except (OSError, MemoryError) as error:
            raise self.bad_file(sample, side, error) from error
        return content

    def changed(self, samples: np.ndarray) -> dict[int, str]:
        """Return, by sample, the reasons why samples are bad whose files have changed since they
        were indexed.

        Raises:
            OSError, MemoryError: as `bad_file`.
        """
        bad: dict[int, str] = {}
        for side, (paths, headers) in enumerate(zip(self.files, self.headers, strict=True)):
            for sample, header in zip(samples.tolist(), headers[samples], strict=True):
                path = paths[sample]
                try:
                    check_unchanged(path, header, os.stat(path))
                except OSError as error:
                    bad[sample] = str(self.bad_file(sample, side, error))
        return bad

    # For messages.

    def name_of(self, sample: int) -> str:
        """Return the path of the sample's (input) file, or its number where there are no files."""
        return self.files[0][sample]

    def place_of(self, sample: int, side: int) -> str:
        """Return where the content of a file lies."""
        return self.files[side][sample]

    def bad_file(self, sample: int, side: int, error: Exception) -> BadFileError:
        """Return the error to raise where reading a file failed with `error`.

        Raises:
            OSError, MemoryError: `error`, if the machine is to blame and not the file.
        """
        if isinstance(error, BadFileError):
            return error
        place, reason = self.place_of(sample, side), reason_of(error, self.files[side][sample])
        return BadFileError(f"{place} cannot be decoded ({reason}); {self.fix}")
