"""The shards of a split, each a tar file in WebDataset's format, and their pieces of the index."""

import json
import os
import tarfile
import zlib
from io import BytesIO
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from conf.credentials import without_credentials
from conf.errors import UserError
from conf.schema import DataConfig
from loaders.epoch import random_permutation, stream_key
from loaders.images import HEADER, Header, read_header
from loaders.index import Index
from loaders.plan import resized_sizes
from loaders.shards.files import SPAN, key_in_shard
from loaders.targets import ImageSpec

PIECE = np.dtype([("span", SPAN), ("header", HEADER)])
LOSSLESS = "lossless"
SIDE_NAMES = (".input", ".target")

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
        resizes: True if images are resized by `data.resize`.
    """

    def __init__(
        self, name: str, index: Index, data: DataConfig, shard_mb: float, quality: str | None
    ) -> None:
        if not (index.files and index.by_path):
            raise UserError(
                f"data={data.layout} data.root={without_credentials(data.root)} has no image files "
                "to pack; set data.root to a folder of images"
            )
        self.name, self.index, self.data, self.quality = name, index, data, quality
        self.resizes = quality is not None and data.resize is not None
        self.sizes = index.sizes if quality is None else resized_sizes(data, index.sizes)
        self.order = np.arange(len(index))
        if name == "train":
            key = stream_key("shard", data.split_seed)
            self.order = random_permutation(self.order, len(index), key)
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
        sizes = np.stack([side["num_bytes"] for side in self.index.headers])
        return {"fingerprint": self.index.fingerprint, "sizes_crc32": zlib.crc32(sizes.tobytes())}

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
                    start = tar.offset + tarfile.BLOCKSIZE
                    _add(tar, key + SIDE_NAMES[side] * (len(row) > 1) + ending, content)
                    place["span"] = number, start, len(content), zlib.crc32(content)
                    place["header"] = header
                    place["header"]["num_bytes"], place["header"]["modified_ns"] = len(content), 0
                for ending, text in self._labels(sample).items():
                    _add(tar, key + ending, text.encode())
        return piece

    def _encoded(self, sample: int, side: int) -> Encoded:
        if self.quality is not None:
            size, reduces = self.sizes[sample], self.data.reduced_decoding
            image = self.index.read_whole(sample, side, size, reduces)
            return encode(image, self.index.sides[side], self.quality)
        ending = os.path.splitext(self.index.files[side][sample])[1].lower()
        content = self.index.read_bytes(sample, side)
        return (content, self.index.headers[side][sample], ending)

    def _labels(self, sample: int) -> dict[str, str]:
        """Return labels for users of WebDataset: the ending of the file's name, and its text."""
        target: Any = self.index.target
        if target.kind == "labels":
            return {".cls": str(int(target.values[sample]))}
        if target.kind == "several labels":
            names = list(compress(target.classes, target.values[sample] > 0))
            return {".json": json.dumps(names)}
        if target.kind == "numbers":
            numbers = zip(target.names, target.values[sample].tolist(), strict=True)
            return {".json": json.dumps(dict(numbers))}
        return {}


def encode(image: np.ndarray, side: ImageSpec, quality: str) -> Encoded:
    """Encode an image of shape (H, W, C)."""
    height, width, channels = image.shape
    file = BytesIO()
    if side.content == "stored":
        from tifffile import imwrite

        pixels, planar = (image[..., 0], None) if channels == 1 else (image, "contig")
        imwrite(file, pixels, photometric="minisblack", planarconfig=planar)
        file.seek(0)
        return (file.getvalue(), read_header(file, "stored"), ".tif")
    is_photo = side.content == "rgb"
    header = Header(height, width, 1, 8 * image.itemsize)
    if is_photo:
        header = header._replace(channels=3, dali=2)
    if is_photo and quality != LOSSLESS:
        jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(image), int(quality))
        return (jpeg, header, ".jpg")
    Image.fromarray(image if is_photo else image[..., 0]).save(file, "PNG")
    return (file.getvalue(), header, ".png")


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    facts = tarfile.TarInfo(name)  # no times and users: the same samples give the same bytes
    facts.size = len(content)
    tar.addfile(facts, BytesIO(content))
