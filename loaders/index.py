"""The samples of a split: what there is, as columns, and the source of their images."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from loaders.order import ORDER, shuffled
from loaders.targets import ImageSpec, Target, describe_target


class BadFileError(UserError):
    """A file whose content cannot be decoded; the message names it and the reason."""


class ReadError(UserError):
    """A file that cannot be read; the machine or the storage may be to blame."""


class Source:
    """Where the images of the N samples of a split lie. `side` 0 is the input, 1 a target image."""

    order_name = ORDER
    """Name of the order of training, which changes with it."""

    form = "contents"
    """What `read_form` returns: `paths`, `contents` or `pixels`."""

    headers: tuple[np.ndarray, ...] = ()
    """Headers of the files of each side, (N,) of dtype `loaders.images.HEADER`; none of pixels."""

    def read(self, sample: int, side: int, spec: ImageSpec) -> np.ndarray:
        """Read a whole image, upright, (height, width, channels) of `spec.dtype`.

        Raises:
            BadFileError: its content cannot be decoded.
            ReadError: it cannot be read.
        """
        raise NotImplementedError

    def read_part(
        self,
        sample: int,
        side: int,
        spec: ImageSpec,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        """Read and resize a rectangle of an image, (height, width, channels) of `spec.dtype`.

        Args:
            rectangle: y, x, height and width in pixels of the input.
            size: (height, width) in pixels of the result.
            reduces: decode a JPEG at a fraction of its size if enough.
        """
        raise NotImplementedError

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        """Return whole inputs, (B, height, width, channels), if they have one size and need no
        decoding; else None."""
        return None

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        """Return what a decoder of whole batches gets: paths with zeros at their ends, (B, length)
        uint8, or contents of files, or decoded images, as lists or arrays."""
        contents = [self.content(sample, side) for sample in samples.tolist()]
        return [np.frombuffer(content, np.uint8) for content in contents]

    def content(self, sample: int, side: int) -> bytes | bytearray:
        """Read the bytes of a file."""
        raise NotImplementedError

    def name(self, sample: int) -> str:
        """Return the path of the sample's (input) file, or its number where there are no files."""
        return f"sample {sample}"

    def place(self, sample: int, side: int) -> str:
        """Return where the content of a file lies, for messages."""
        return self.name(sample)

    def identity(self) -> list[np.ndarray]:
        """Return arrays that tell the images from those of another data set."""
        return []

    def columns(self) -> dict[str, np.ndarray]:
        """Return the arrays of which `opened` makes this source again, by name."""
        raise NotImplementedError

    def opened(self, folder: Path) -> "Source":
        """Return the same source over its columns in a folder."""
        raise NotImplementedError

    # The order in which samples are read.

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at these positions of an epoch of `count` samples."""
        return shuffled(positions, count, seed, epoch)

    def storage_order(self, count: int) -> Sequence[int]:
        """Return the `count` samples in the order in which they are stored."""
        return range(count)

    def following(self, sample: int, count: int) -> int:
        """Return the sample that stands in for one that cannot be decoded."""
        return (sample + 1) % count

    def fetch(self, rows: np.ndarray, seed: int, train: bool) -> None:
        """Wait until the samples of rows can be read, and begin to fetch what follows them."""


@dataclass(frozen=True)
class Index:
    """The samples of one split; `new_index` makes one, `columns.open_index` opens one on disk."""

    name: str
    """Data set and split, for messages, such as `mnist_mini/train`."""

    sizes: np.ndarray
    """(N, 2) int32: height and width of each input in pixels, upright."""

    target: Target
    """Kind of the samples' targets and, if they are no images, their values."""

    inputs: ImageSpec
    """What each input image is."""

    source: Source
    """Where the images lie."""

    distinct_sizes: np.ndarray
    """(M, 2) int64: the sizes that inputs have."""

    fingerprint: str
    """Hash of all that the plan depends on, and of the files' names: 16 hexadecimal digits."""

    is_resized: bool = False
    """True if `data.resize` was applied already."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Files that `data.on_error=skip` leaves out because of their headers, and the reasons."""

    notes: tuple[str, ...] = ()
    """Lines for the log on what may be wrong, found when the files were listed."""

    reopen: Callable[[], "Index"] | None = None
    """Opens it in another process, if its columns are on disk; None: they are in memory."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> Any:
        if self.reopen is None:
            raise TypeError(f"{self.name}: columns.stored() writes an index that is to be pickled")
        return self.reopen, ()

    @cached_property
    def sides(self) -> tuple[ImageSpec, ...]:
        """The images of each sample."""
        targets = self.target.spec(self.inputs)
        return (self.inputs, targets) if targets else (self.inputs,)

    def read(self, sample: int, side: int = 0) -> np.ndarray:
        """Read a whole image; see `Source.read`."""
        return self.source.read(sample, side, self.sides[side])


def new_index(
    name: str,
    sizes: np.ndarray,
    target: Target,
    inputs: ImageSpec,
    source: Source,
    left_out: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> Index:
    """Make an index in memory; see `Index` for the arguments."""
    codes = np.unique(sizes[:, 0].astype(np.int64) << 32 | sizes[:, 1])
    distinct_sizes = np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)
    facts = f"{name} {inputs} {target.spec(inputs)} {describe_target(target)}"
    parts = [np.frombuffer(facts.encode(), np.uint8), sizes.astype(np.int32), target.values]
    parts += source.identity()
    hashes = [hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in parts]
    fingerprint = hashlib.sha256(b"".join(hashes)).hexdigest()[:16]
    return Index(
        name,
        sizes.astype(np.int32),
        target,
        inputs,
        source,
        distinct_sizes,
        fingerprint,
        left_out=left_out or {},
        notes=notes,
    )
