"""What samples a split has: found and checked once by a layout, before any backend runs."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loaders.decode import decode, reason_of
from loaders.limits import cpus_per_rank
from loaders.paths import Paths
from loaders.reduced import factor_for, resized_rectangle
from loaders.shards import Shards
from loaders.stamps import ChangedError, Stamp, compare_stamps, stamp_of
from loaders.storage import StorageError
from loaders.targets import Labels, Masks, SeveralLabels, Target, TargetImages, describe_target

READERS = 16  # threads that wait for a server

Content = Callable[[], bytes | bytearray]
"""Waits for the content of a file."""


class BadFileError(OSError):
    """A file that cannot be decoded; the message names it and the reason."""


class Side(NamedTuple):
    """One of the images of a sample: the input, or its target."""

    channels: int
    dtype: str
    """`uint8` or `uint16`."""
    size_factor: int = 1
    """Height and width, divided by those of the input."""
    interpolation: str = "linear"
    """`linear` or `nearest`."""
    content: str = "rgb"
    """What is made of the files' pixels: `rgb` (8 bits), `stored` (as they are) or `indices` (of classes)."""

    @property
    def per_pixel(self) -> int:
        """Values of this side for each pixel of the input."""
        return self.channels * self.size_factor**2


@dataclass(frozen=True)
class Index:
    """The samples of one split.

    Their pixels are in `images`, in `packed` or in `files`. Samples have one side, the input, or two,
    the input and a target image, which `side` counts from 0.
    """

    name: str
    """Data set and split, for messages, such as `mnist_mini/train`."""

    sizes: np.ndarray
    """(N, 2) int: height and width of each input in pixels, upright."""

    channels: int
    """Channels of each image."""

    target: Target
    """What the samples' targets are."""

    dtype: str = "uint8"
    """`uint8` or `uint16`: type of the pixels."""

    images: np.ndarray | None = None
    """(N, height, width, channels): all inputs, in memory."""

    packed: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    """For each side: flat pixels, and (N,) where in them each image starts."""

    files: tuple[Paths, ...] = ()
    """For each side: the paths."""

    headers: tuple[np.ndarray, ...] = ()
    """For each side: what the files' headers say, of dtype `headers.HEADER`."""

    shards: Shards | None = None
    """Where the files' content is; None: in the files themselves."""

    resized: bool = False
    """Whether `data.resize` was applied already."""

    as_stored: bool = False
    """Whether the channels are those of the file; otherwise every image becomes 8-bit RGB."""

    left_out: tuple[str, ...] = ()
    """Files whose headers cannot be used, and which `data.on_error=skip` leaves out."""

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def distinct_sizes(self) -> np.ndarray:
        """(M, 2) int64: the sizes that inputs have."""
        if self.sizes.strides[0] == 0:  # one size, held once
            return self.sizes[:1].astype(np.int64)
        codes = np.unique(self.sizes[:, 0].astype(np.int64) << 32 | self.sizes[:, 1])
        return np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)

    @property
    def size_factors(self) -> tuple[int, ...]:
        """For each side: height and width of its images, divided by those of the inputs."""
        return tuple(side.size_factor for side in self.sides)

    @functools.cached_property
    def sides(self) -> tuple[Side, ...]:
        """The images of each sample."""
        content = "stored" if self.as_stored else "rgb"
        inputs, target = Side(self.channels, self.dtype, content=content), self.target
        if isinstance(target, TargetImages):
            return inputs, inputs._replace(channels=target.channels, size_factor=target.size_factor)
        if isinstance(target, Masks):
            return inputs, Side(1, target.stored_dtype, 1, target.interpolation, "indices")
        return (inputs,)

    def name_of(self, sample: int) -> str:
        """The sample's (input) file, or its number where there are no files."""
        return self.files[0][sample] if self.files else f"sample {sample}"

    @property
    def is_remote(self) -> bool:
        """Whether content comes from so far away that reading it has to begin well ahead."""
        return self.shards is not None and self.shards.is_remote

    @property
    def num_readers(self) -> int:
        """Threads that read and decode images one by one: more than CPUs where they wait for a server."""
        return READERS if self.is_remote else cpus_per_rank()

    def begin(self, sample: int, side: int = 0) -> Content:
        """Begin to read the content of a file, for `content`."""
        if self.shards is not None:
            return self.shards.begin(sample, side)
        return functools.partial(self._read_file, sample, side)

    def content(self, sample: int, side: int, begun: Content | None = None) -> bytes | bytearray:
        """All bytes of a file, whose reading may have begun.

        Raises:
            BadFileError: the file cannot be read, or is not the one that was indexed.
            StorageError: the place where it lies stays away.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        try:
            return (begun or self.begin(sample, side))()
        except Exception as error:
            raise self._bad(sample, side, error) from error

    def _read_file(self, sample: int, side: int) -> bytearray:
        header = self.headers[side][sample]
        then = int(header["num_bytes"]), int(header["modified_ns"])
        with open(self.files[side][sample], "rb") as file:
            compare_stamps(then, stamp_of(os.fstat(file.fileno())))
            content = bytearray(then[0])  # which, unlike bytes, an array can be without a copy
            if file.readinto(content) < len(content):
                raise OSError("it is cut short")
        return content

    def read(
        self,
        sample: int,
        side: int = 0,
        num_lines: int | None = None,
        factor: int = 1,
        begun: Content | None = None,
    ) -> np.ndarray:
        """(height, width, channels) of dtype `dtype`: one image, upright.

        With `num_lines`, lines below so many may be missing. With a `factor` of 2, 4 or 8, a JPEG may be
        reduced by it. `begun` is what `begin` has answered, if it was asked.

        Raises:
            BadFileError: the file cannot be decoded.
            StorageError, OSError, MemoryError: as `content`.
        """
        if self.images is not None:
            return self.images[sample]
        if self.packed:
            pixels, starts = self.packed[side]
            channels, factor = self.sides[side].channels, self.sides[side].size_factor
            height, width = (factor * int(size) for size in self.sizes[sample])
            image = pixels[starts[sample] : starts[sample] + height * width * channels]
            return image.reshape(height, width, channels)
        header, kind = self.headers[side][sample], self.sides[side].content
        content = self.content(sample, side, begun)
        byte, bit = sample >> 3, np.uint8(1 << (sample & 7))
        is_sound = bool(self._sound[side][byte] & bit)
        try:
            image, was_sound = decode(content, header, kind, num_lines, factor, is_sound)
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise self._bad(sample, side, error) from error
        if was_sound and not is_sound:
            self._sound[side][byte] |= bit  # another thread's, at the same moment, may be lost
        return image

    @functools.cached_property
    def _sound(self) -> tuple[np.ndarray, ...]:
        """For each side (N / 8,) uint8: one bit for each file, set once it was decoded as a whole and is
        undamaged."""
        return tuple(np.zeros(len(paths) // 8 + 1, np.uint8) for paths in self.files)

    def read_rectangle(
        self,
        sample: int,
        side: int,
        rectangle: tuple[int, int, int, int],
        size: tuple[int, int] | None = None,
        begun: Content | None = None,
    ) -> np.ndarray:
        """(height, width, channels) of dtype `dtype`: a rectangle of one image.

        Args:
            sample, side: of the image.
            rectangle: y, x, height and width in pixels.
            size: (height, width) that it will be resized to. Where a JPEG can be decoded at a fraction of
                its size for that, it has this size already. None: it is always decoded as a whole.
            begun: what `begin` has answered, if it was asked.

        Raises:
            BadFileError, StorageError, OSError, MemoryError: as `read`.
        """
        y, x, height, width = rectangle
        if size is not None and self.files and self.sides[side].content == "rgb":
            factor = factor_for((height, width), size)
            image = self.read(sample, side, y + height, factor, begun)
            header = self.headers[side][sample]
            whole, orientation = (
                (int(header["height"]), int(header["width"])),
                header["orientation"],
            )
            if image.shape[1] < whole[1]:
                return resized_rectangle(image, whole, factor, orientation, rectangle, size)
        else:
            image = self.read(sample, side, y + height, begun=begun)
        return image[y : y + height, x : x + width]

    @functools.cached_property
    def can_copy(self) -> bool:
        """Whether `copy` works: the inputs have one size and lie in memory or uncompressed in files."""
        in_files = self.as_stored and all((side["raw_offset"] >= 0).all() for side in self.headers)
        alike = len(self.sides) == 1 and len(self.distinct_sizes) == 1
        return alike and (self.images is not None or in_files)

    def class_counts(self) -> np.ndarray:
        """(K,) float64: how many samples, or pixels of masks, each class has; masks are all read for it.

        Raises:
            ValueError: the targets have no classes.
        """
        target = self.target
        if isinstance(target, Labels):
            return np.bincount(target.values, minlength=len(target.classes)).astype(float)
        if isinstance(target, SeveralLabels):
            return target.values.sum(axis=0, dtype=float)
        if not isinstance(target, Masks):
            raise ValueError(f"the targets of {self.name} are {target.kind}, which have no classes")

        def count(sample: int) -> np.ndarray:
            indices = self.read(sample, 1).ravel()
            return np.bincount(indices[indices != target.ignore_index], minlength=num_classes)

        num_classes = len(target.classes)
        with ThreadPoolExecutor(self.num_readers) as pool:
            return sum(pool.map(count, range(len(self))), np.zeros(num_classes))

    def copy(
        self, samples: np.ndarray, begun: "list[Content] | None" = None
    ) -> tuple[np.ndarray, dict[int, str]]:
        """(B, height, width, channels): whole inputs, and of each one that cannot be read, why.

        `begun` is what `begin` has answered of each, if it was asked. One thread that fills a batch is faster
        than several that share images of a few KB.
        """
        if self.images is not None:
            return self.images[samples], {}
        images = np.empty((len(samples), *self.sizes[0], self.channels), self.dtype)
        offsets = self.headers[0]["raw_offset"][samples].tolist()
        bad = {}
        if self.shards is not None:
            begun = begun or [self.begin(sample) for sample in samples.tolist()]
            for sample, image, content in zip(samples.tolist(), images, begun, strict=True):
                try:
                    image[:] = self.read(sample, begun=content)
                except BadFileError as error:
                    bad[sample] = str(error)
            return images, bad
        for (sample, path, then), image, offset in zip(
            self._stamped(samples, 0), images, offsets, strict=True
        ):
            try:
                with open(path, "rb", buffering=0) as file:
                    compare_stamps(then, stamp_of(os.fstat(file.fileno())))
                    file.seek(offset)
                    if file.readinto(image.data) < image.nbytes:
                        raise OSError("it is cut short")
            except OSError as error:
                bad[sample] = str(self._bad(sample, 0, error))
        return images, bad

    def changed(self, samples: np.ndarray) -> dict[int, str]:
        """Those of the samples with a file that has changed since it was indexed, and why they are bad."""
        bad: dict[int, str] = {}
        for side in range(len(self.files)) if self.shards is None else ():
            for sample, path, then in self._stamped(samples, side):
                try:
                    compare_stamps(then, stamp_of(os.stat(path)))
                except OSError as error:
                    bad[sample] = str(self._bad(sample, side, error))
        return bad

    def _stamped(self, samples: np.ndarray, side: int) -> Iterator[tuple[int, str, Stamp]]:
        """Of each sample its number, its file, and the file's stamp when it was indexed."""
        stamps = self.headers[side][["num_bytes", "modified_ns"]][samples].tolist()
        for sample, then in zip(samples.tolist(), stamps, strict=True):
            yield sample, self.files[side][sample], then

    def _bad(self, sample: int, side: int, error: Exception) -> BadFileError:
        """What is to be raised of a file that cannot be used.

        Raises:
            StorageError, OSError, MemoryError: the error itself, if something else than the file is to blame.
        """
        if isinstance(error, StorageError | BadFileError):
            raise error
        path = self.files[side][sample]
        if isinstance(error, ChangedError):
            return BadFileError(f"{path} has changed ({error}); start again, which indexes it anew")
        why, fix = reason_of(error, path), "repair or remove it"
        if self.shards is not None:
            path, fix = (
                f"{self.shards.place(sample, side)} ({path})",
                "mend it and pack the data again",
            )
        return BadFileError(f"{path} cannot be decoded ({why}); {fix}")

    @functools.cached_property
    def dali_reads(self) -> list[bool]:
        """For each side: whether DALI can decode all files."""
        return [bool(headers["dali_reads"].all()) for headers in self.headers]

    @functools.cached_property
    def doubtful(self) -> np.ndarray:
        """(M,) int64: samples with a JPEG that may be cut short, as far as the headers tell."""
        may_be = [~headers["ends"] for headers in self.headers]
        return np.flatnonzero(np.any(may_be, axis=0)) if may_be else np.zeros(0, np.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the hashes of all that the plan depends on, and of the file names: 16 hexadecimal digits."""
        target = {k: v for k, v in describe_target(self.target).items() if k != "predicted"}
        facts = f"{self.name} {self.channels} {self.dtype} {self.size_factors} {target}"
        values = getattr(self.target, "values", None)
        parts = [np.frombuffer(facts.encode(), np.uint8), self.sizes.astype(np.int32)]
        parts += [array for array in (values, self.images) if array is not None]
        for paths in self.files:
            parts += [paths.names, paths.ends]
        hashes = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts]
        return hashlib.sha256(b"".join(hashes)).hexdigest()[:16]
