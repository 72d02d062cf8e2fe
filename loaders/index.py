"""The samples of a split: what there is, as columns, and how their images are read from files."""

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import FORMAT, Columns, stored
from loaders.images import decode_resized, reason_of
from loaders.order import Order
from loaders.targets import ImageSpec, Target, describe_target, target_of

SPLITS = ("train", "val")
"""Those that a run reads."""

IDENTITY = ("sizes", "values", "names", "pixels")
"""Beginnings of the names of columns that tell a data set from others."""


class BadFileError(UserError):
    """A file whose content cannot be decoded; the message names it and the reason."""


class ReadError(UserError):
    """A file that cannot be read; the machine or the storage may be to blame."""


class Index(Order):
    """The N samples of one split. `side` 0 of a sample is the input, 1 its target image.

    Args:
        columns: what `complete` returned, in memory or in a folder. Of files, there are for each
            side `names`, (N,) bytes: their paths below `folder`; and `headers`, (N,) of dtype
            `loaders.images.HEADER`.

    Attributes:
        name: data set and split, for messages, such as `mnist_mini/train`.
        target: kind of the samples' targets and, if they are no images, their values.
        sides: the images of each sample: the input and, of pairs, the target.
        fingerprint: hash of all that the plan depends on, and of the files' names below the root.
        is_resized: `data.resize` was applied already.
        left_out: files that `data.on_error=skip` leaves out because of their headers, and why.
        notes: lines for the log on what may be wrong, found when the files were listed.
        form: what `read_form` returns: `paths`, `contents` or `pixels`.
        fix: what to do about a file that cannot be decoded.
    """

    form = "contents"
    fix = "repair or remove it"
    folder = ""

    def __init__(self, columns: Columns) -> None:
        self.columns, facts = columns, columns.facts
        self.name: str = facts["name"]
        self.target = target_of(facts["target"], columns.get("values"))
        self.sides = tuple(ImageSpec(*side) for side in facts["sides"])
        self.fingerprint: str = facts["fingerprint"]
        self.is_resized: bool = facts["is_resized"]
        self.left_out: dict[str, str] = facts["left_out"]
        self.notes = tuple(facts["notes"])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get no targets, of which there may be many."""
        return vars(self) | {"target": self.target.take(np.zeros(0, np.int64))}

    @property
    def inputs(self) -> ImageSpec:
        """What each input image is."""
        return self.sides[0]

    @property
    def sizes(self) -> np.ndarray:
        """(N, 2) int32: height and width of each input in pixels, upright."""
        return self.columns["sizes"]

    @cached_property
    def distinct_sizes(self) -> np.ndarray:
        """(M, 2) int64: the sizes that inputs have."""
        codes = np.unique(self.sizes[:, 0].astype(np.int64) << 32 | self.sizes[:, 1])
        return np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)  # faster than of rows

    @property
    def headers(self) -> list[np.ndarray]:
        """Of the files of each side; none of pixels."""
        return self.columns.of_sides("headers")

    def content(self, sample: int, side: int) -> bytes | bytearray:
        """Read the bytes of a file; raise ReadError if they cannot be read."""
        raise NotImplementedError

    def read(self, sample: int, side: int = 0) -> np.ndarray:
        """Read a whole image, upright, (height, width, channels); see `read_part`."""
        factor, (height, width) = self.sides[side].size_factor, self.sizes[sample].tolist()
        size = factor * height, factor * width
        return self.read_part(sample, side, (0, 0, height, width), size, False)

    def read_part(
        self,
        sample: int,
        side: int,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        """Read and resize a rectangle of an image, (height, width, channels).

        Args:
            rectangle: y, x, height and width in pixels of the input.
            size: (height, width) in pixels of the result.
            reduces: decode a JPEG at a fraction of its size if enough.

        Raises:
            BadFileError: its content cannot be decoded.
            ReadError: it cannot be read.
        """
        content, header = self.content(sample, side), self.columns[f"headers-{side}"][sample]
        spec = self.sides[side]
        y, x, height, width = (spec.size_factor * length for length in rectangle)
        part = y, x, height, width
        try:
            return decode_resized(content, header, spec, part, size, reduces)
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise self.bad_file(sample, side, error) from error

    def read_batch(self, rows: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        """Return the rectangles of the inputs of rows, which have this size, (B, *size, channels),
        if all inputs have one size and need no decoding; else None."""
        return None

    def read_form(self, samples: np.ndarray, side: int) -> Any:
        """Return what a decoder of whole batches gets: paths with zeros at their ends, (B, length)
        uint8, or contents of files, or decoded images, as lists or arrays."""
        contents = [self.content(sample, side) for sample in samples.tolist()]
        return [np.frombuffer(content, np.uint8) for content in contents]

    def name_of(self, sample: int, side: int = 0) -> str:
        """Return the path of a file, or the sample's number where there are no files."""
        return self.folder + os.fsdecode(bytes(self.columns[f"names-{side}"][sample]))

    def place_of(self, sample: int, side: int) -> str:
        """Return where the content of a file lies, for messages."""
        return self.name_of(sample, side)

    def bad_file(self, sample: int, side: int, error: Exception) -> BadFileError:
        """Return the error of a file that cannot be decoded."""
        reason = reason_of(error, self.name_of(sample, side))
        return BadFileError(
            f"{self.place_of(sample, side)} cannot be decoded ({reason}); {self.fix}, or leave it "
            "out with data.on_error=skip or data.leave_out=FILE"
        )


class Files(Index):
    """Image files below `root`."""

    form = "paths"

    def __init__(self, columns: Columns, root: str) -> None:
        super().__init__(columns)
        self.folder = folder_of(root)

    def content(self, sample: int, side: int) -> bytes | bytearray:
        path = self.name_of(sample, side)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise _unread(path, error) from error

    @cached_property
    def raw_shape(self) -> tuple[int, int, int, int] | None:
        """Height, width, channels and bits of all images, if they are uncompressed inputs of one
        size."""
        headers = self.headers
        shapes = headers[0][["height", "width", "channels", "bits"]]
        is_raw = (shapes == shapes[:1]).all() and (headers[0]["raw_offset"] >= 0).all()
        return shapes[0].item() if is_raw and len(headers) == 1 else None

    def read_batch(self, rows: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        """Read pixels alone into one array: twice as fast as whole files, one by one (5 channels of
        50x50 pixels)."""
        if self.raw_shape is None:
            return None
        *shape, bits = self.raw_shape
        samples, images = rows["sample"], np.empty((len(rows), *shape), f"uint{bits}")
        starts = self.headers[0]["raw_offset"][samples].tolist()
        for sample, start, image in zip(samples.tolist(), starts, images, strict=True):
            path = self.name_of(sample)
            try:
                file = os.open(path, os.O_RDONLY)  # a file object would call the system more often
                try:
                    num_bytes = os.preadv(file, [image.data.cast("B")], start)
                finally:
                    os.close(file)
            except OSError as error:
                raise _unread(path, error) from error
            if num_bytes < image.nbytes:
                raise self.bad_file(sample, 0, EOFError("it is cut short"))
        return images if images.shape[1:3] == size else cut(images, rows, size)

    def read_form(self, samples: np.ndarray, side: int) -> Any:
        # One array is fed in a fifth of the time that a list of paths takes; the system takes a
        # path to end at its first zero.
        folder = os.fsencode(self.folder)
        length = len(folder) + 1 + max(names.itemsize for names in self.columns.of_sides("names"))
        paths = np.char.add(folder, self.columns[f"names-{side}"][samples])
        return paths.astype(f"S{length}").view(np.uint8).reshape(len(samples), length)


def _unread(path: str, error: OSError) -> ReadError:
    """Return the error of a file that cannot be read, unless the machine is to blame."""
    return ReadError(f"{path} cannot be read ({reason_of(error, path)}); see to it, and resume")


def cut(images: Iterable[np.ndarray], rows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the rectangles of the images of rows, which have this size."""
    height, width = size
    corners = zip(images, rows["y"].tolist(), rows["x"].tolist(), strict=True)
    return np.stack([image[y : y + height, x : x + width] for image, y, x in corners])


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


def path_below(root: str, name: bytes) -> str:
    """Return the path of a file that is called `name` below `root`."""
    return folder_of(root) + os.fsdecode(bytes(name))


def complete(
    columns: Columns,
    name: str,
    target: Target,
    sides: Sequence[ImageSpec],
    left_out: dict[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Columns:
    """Add what an index needs to columns with the `sizes` of inputs; see `Index`."""
    columns["sizes"] = columns["sizes"].astype(np.int32)
    if target.values is not None:
        dtype = np.int64 if target.kind == "labels" else np.float32
        columns["values"] = target.values.astype(dtype, copy=False)
    described = describe_target(target)
    hashed = hashlib.sha256(f"{tuple(sides)} {described}".encode())
    for key in sorted(columns):
        if key.startswith(IDENTITY):
            hashed.update(hashlib.sha256(columns[key].tobytes()).digest())
    fingerprint = hashed.hexdigest()[:16]
    columns.facts = {"name": name, "target": described, "sides": sides, "fingerprint": fingerprint}
    columns.facts |= {"is_resized": False, "left_out": left_out or {}, "notes": notes}
    return columns


def share(index: Index, data: DataConfig) -> None:
    """Move the columns of an index to a folder in `data.cache_dir`, where they may lie already:
    worker processes map them into memory."""
    columns = index.columns
    if columns.folder is not None:
        return
    content = 0  # of all columns: files of the same names may have other headers
    for column in columns.values():
        content = zlib.crc32(column.tobytes(), content)
    name = f"index-{index.fingerprint}-{content:08x}-{FORMAT}"
    folder = Path(data.cache_dir, name).absolute()
    columns.update(stored(folder, lambda: columns))
    columns.folder = folder
