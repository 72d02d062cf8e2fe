"""The samples of a split: what there is, as columns, and the source of their images."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import (
    FORMAT,
    Columns,
    one_process_at_a_time,
    open_columns,
    replace_columns,
)
from loaders.order import ORDER, shuffled
from loaders.targets import ImageSpec, Target, describe_target, target_of

IDENTITY = ("sizes", "values", "names", "pixels")
"""Beginnings of the names of columns that tell a data set from others."""


class BadFileError(UserError):
    """A file whose content cannot be decoded; the message names it and the reason."""


class ReadError(UserError):
    """A file that cannot be read; the machine or the storage may be to blame."""


class Source:
    """Where the images of the N samples of a split lie. `side` 0 is the input, 1 a target image.

    Attributes:
        columns: of the index; `sizes`, (N, 2) int32, are those of the inputs.
        order_name: name of the order of training, which changes with it.
        form: what `read_form` returns: `paths`, `contents` or `pixels`.
    """

    order_name = ORDER
    form = "contents"

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @property
    def headers(self) -> list[np.ndarray]:
        """Of the files of each side, (N,) of dtype `loaders.images.HEADER`; none of pixels."""
        return self.columns.of_sides("headers")

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

        Raises:
            BadFileError: its content cannot be decoded.
            ReadError: it cannot be read.
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

    def shuffled(self, positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at these positions of an epoch of `count` samples."""
        return shuffled(positions, count, seed, epoch)

    def following(self, sample: int, count: int) -> int:
        """Return the sample that stands in for one that cannot be decoded."""
        return (sample + 1) % count

    def fetch(self, rows: np.ndarray, seed: int, train: bool) -> None:
        """Wait until the samples of rows can be read, and begin to fetch what follows them."""


@dataclass(frozen=True)
class Index:
    """The samples of one split; `new_index` makes one, `read_index` reads one on disk.

    Attributes:
        name: data set and split, for messages, such as `mnist_mini/train`.
        target: kind of the samples' targets and, if they are no images, their values.
        inputs: what each input image is.
        source: where the images lie, with the columns.
        fingerprint: hash of all that the plan depends on, and of the files' names.
        is_resized: `data.resize` was applied already.
        left_out: files that `data.on_error=skip` leaves out because of their headers, and why.
        notes: lines for the log on what may be wrong, found when the files were listed.
    """

    name: str
    target: Target
    inputs: ImageSpec
    source: Source
    fingerprint: str
    is_resized: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get no targets, of which there may be many."""
        return vars(self) | {"target": self.target.take(np.zeros(0, np.int64))}

    @property
    def sizes(self) -> np.ndarray:
        """(N, 2) int32: height and width of each input in pixels, upright."""
        return self.source.columns["sizes"]

    @property
    def distinct_sizes(self) -> np.ndarray:
        """(M, 2) int64: the sizes that inputs have."""
        return self.source.columns["distinct_sizes"]

    @cached_property
    def sides(self) -> tuple[ImageSpec, ...]:
        """The images of each sample."""
        targets = self.target.spec(self.inputs)
        return (self.inputs, targets) if targets else (self.inputs,)

    def read(self, sample: int, side: int = 0) -> np.ndarray:
        """Read a whole image, upright, (height, width, channels); see `Source.read_part`."""
        spec, (height, width) = self.sides[side], self.sizes[sample].tolist()
        size = spec.size_factor * height, spec.size_factor * width
        return self.source.read_part(sample, side, spec, (0, 0, height, width), size, False)

    def facts(self) -> dict[str, Any]:
        """Return all of the index but its columns and its source, for a JSON file."""
        names = ("name", "fingerprint", "is_resized", "left_out", "notes")
        facts = {name: getattr(self, name) for name in names}
        target = describe_target(self.target)
        return facts | {"target": target, "inputs": self.inputs._asdict()}


def new_index(
    name: str,
    target: Target,
    inputs: ImageSpec,
    source: Source,
    left_out: dict[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Index:
    """Make the index of a source whose columns include `sizes`, and add the others to them; see
    `Index` for the arguments."""
    columns = source.columns
    sizes = columns["sizes"] = columns["sizes"].astype(np.int32)
    codes = np.unique(sizes[:, 0].astype(np.int64) << 32 | sizes[:, 1])  # faster than of rows
    columns["distinct_sizes"] = np.stack([codes >> 32, codes & 0xFFFFFFFF], axis=1)
    if target.has_values:
        columns["values"] = target.values.astype(target.dtype, copy=False)
    facts = f"{name} {inputs} {target.spec(inputs)} {describe_target(target)}"
    hashed = hashlib.sha256(facts.encode())
    for key in sorted(columns):
        if key.startswith(IDENTITY):
            hashed.update(hashlib.sha256(columns[key].tobytes()).digest())
    fingerprint = hashed.hexdigest()[:16]
    return Index(
        name, target, inputs, source, fingerprint, left_out=left_out or {}, notes=tuple(notes)
    )


def read_index(source: Source) -> Index:
    """Read the index that was written with the columns of a source, which are in a folder."""
    facts = source.columns.facts
    return Index(
        facts["name"],
        target_of(facts["target"], source.columns.get("values")),
        ImageSpec(**facts["inputs"]),
        source,
        facts["fingerprint"],
        facts["is_resized"],
        facts["left_out"],
        tuple(facts["notes"]),
    )


def stored(folder: Path, new: Callable[[], Index]) -> Columns:
    """Return the columns in a folder in `data.cache_dir`, which are those of `new()` if there is no
    such folder yet."""
    with one_process_at_a_time(folder):
        if not folder.is_dir():
            index = new()
            replace_columns(index.source.columns, index.facts(), folder)
    return open_columns(folder)


def share(index: Index, data: DataConfig) -> None:
    """Move the columns of an index to a folder in `data.cache_dir`, where they may lie already:
    worker processes map them into memory."""
    columns = index.source.columns
    if columns.folder is not None:
        return
    content = 0  # of all columns: files of the same names may have other headers
    for column in columns.values():
        content = zlib.crc32(column.tobytes(), content)
    name = f"{index.name.replace('/', '-')}-{index.fingerprint}-{content:08x}-{FORMAT}"
    folder = Path(data.cache_dir, name).absolute()
    columns.update(stored(folder, lambda: index))
    columns.folder = folder
