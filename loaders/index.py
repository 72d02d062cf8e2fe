"""What samples a split has: found and checked once by a layout, before any backend runs."""

import functools
import hashlib
import os
from dataclasses import dataclass

import numpy as np

from loaders.decode import decode, reason_of


class BadFileError(OSError):
    """A file that cannot be decoded; the message names it and the reason."""


@dataclass(frozen=True)
class Labels:
    """Targets that are classes."""

    values: np.ndarray
    """(N,) int64: the class of each sample, in [0, len(classes))."""

    classes: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True)
class TargetImages:
    """Targets that are images, of the inputs' channels and type: the second side of a pair."""

    size_factor: int = 1
    """Their height and width, divided by those of the inputs."""


@dataclass(frozen=True)
class NoTarget:
    """Nothing is known of the samples: they are there to be predicted. Batches have the samples' numbers
    as targets."""

    classes: tuple[str, ...] = ()
    """Names of the classes that the model tells apart; empty if it makes images."""


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

    target: Labels | TargetImages | NoTarget
    """What the samples' targets are."""

    dtype: str = "uint8"
    """`uint8` or `uint16`: type of the pixels."""

    images: np.ndarray | None = None
    """(N, height, width, channels): all inputs, in memory."""

    packed: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    """For each side: flat pixels, and (N,) where in them each image starts."""

    files: tuple[list[str], ...] = ()
    """For each side: the paths."""

    headers: tuple[np.ndarray, ...] = ()
    """For each side: what the files' headers say, of dtype `headers.HEADER`."""

    resized: bool = False
    """Whether `data.resize` was applied already."""

    as_stored: bool = False
    """Whether the channels are those of the file; otherwise every image becomes 8-bit RGB."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_factors(self) -> tuple[int, ...]:
        """For each side: height and width of its images, divided by those of the inputs."""
        return (1, self.target.size_factor) if isinstance(self.target, TargetImages) else (1,)

    def name_of(self, sample: int) -> str:
        """The sample's (input) file, or its number where there are no files."""
        return self.files[0][sample] if self.files else f"sample {sample}"

    def read(self, sample: int, side: int = 0, num_lines: int | None = None) -> np.ndarray:
        """(height, width, channels) of dtype `dtype`: one image, upright.

        With `num_lines`, lines below so many may be missing.

        Raises:
            BadFileError: the file cannot be decoded.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        if self.images is not None:
            return self.images[sample]
        if self.packed:
            pixels, starts = self.packed[side]
            height, width = (self.size_factors[side] * int(size) for size in self.sizes[sample])
            image = pixels[starts[sample] : starts[sample] + height * width * self.channels]
            return image.reshape(height, width, self.channels)
        path = self.files[side][sample]
        try:
            return decode(path, self.headers[side][sample], self.as_stored, num_lines)
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise _bad_file(path, reason_of(error, path)) from error

    @functools.cached_property
    def can_copy(self) -> bool:
        """Whether `copy` works: the inputs have one size and lie in memory or uncompressed in files."""
        in_files = self.as_stored and all((side["raw_offset"] >= 0).all() for side in self.headers)
        return bool((self.sizes == self.sizes[0]).all()) and (self.images is not None or in_files)

    def copy(self, samples: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """(B, height, width, channels): whole inputs, and of each one that cannot be read, why.

        One thread that fills a batch is faster than several that share images of a few KB.
        """
        if self.images is not None:
            return self.images[samples], {}
        images = np.empty((len(samples), *self.sizes[0], self.channels), self.dtype)
        bad = {}
        for sample, image in zip(samples.tolist(), images, strict=True):
            path, reason = self.files[0][sample], "it is cut short"
            try:
                with open(path, "rb", buffering=0) as file:
                    file.seek(self.headers[0]["raw_offset"][sample])
                    if file.readinto(image.data) == image.nbytes:
                        continue
            except OSError as error:
                reason = reason_of(error, path)
            bad[sample] = str(_bad_file(path, reason))
        return images, bad

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan depends on and of the file names: 16 hexadecimal digits."""
        digest = hashlib.sha256(self.sizes.astype(np.int32).tobytes())
        digest.update(f"{self.name} {self.channels} {self.dtype} {self.size_factors}".encode())
        if isinstance(self.target, Labels):
            digest.update(self.target.values.astype(np.int64).tobytes())
        if self.images is not None:
            digest.update(self.images.tobytes())
        for names in self.files:
            root = common_folder(names)
            digest.update("\n".join(name.removeprefix(root) for name in names).encode())
        return digest.hexdigest()[:16]


def common_folder(files: list[str]) -> str:
    """The longest path below which all files lie; the first and the last in order tell it."""
    return os.path.commonpath([min(files), max(files)])


def _bad_file(path: str, reason: str) -> BadFileError:
    return BadFileError(f"{path} cannot be decoded ({reason}); repair or remove it")
