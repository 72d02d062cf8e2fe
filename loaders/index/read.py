"""Reads the images of an index, from memory or from the content of files."""

import math
from collections.abc import Sequence

import numpy as np

from loaders.images import decode, decode_resized, resize
from loaders.index.index import Index, read_unchanged


def read_image(index: Index, sample: int, side: int = 0) -> np.ndarray:
    """Read an image, upright, (height, width, channels) of dtype `index.sides[side].dtype`.

    Raises:
        BadFileError: the file cannot be decoded.
        OSError, MemoryError: there are no file handles or no memory left.
    """
    spec = index.sides[side]
    if index.offsets is not None:
        height, width = (spec.size_factor * int(length) for length in index.sizes[sample])
        start = spec.per_pixel * int(index.offsets[sample])
        image = index.pixels[side][start : start + height * width * spec.channels]
        return image.reshape(height, width, spec.channels)
    content = index.read_bytes(sample, side)
    try:
        return decode(content, index.headers[side][sample], spec.content)
    except Exception as error:  # damaged bytes make decoders raise errors of any type
        raise index.bad_file(sample, side, error) from error


def read_resized(
    index: Index,
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
    spec = index.sides[side]
    y, x, height, width = (spec.size_factor * length for length in rectangle)
    if index.pixels:
        image = read_image(index, sample, side)[y : y + height, x : x + width]
        return resize(image, size, spec.interpolation)
    content, header = index.read_bytes(sample, side), index.headers[side][sample]
    try:
        return decode_resized(
            content, header, spec.content, (y, x, height, width), size, spec.interpolation, reduces
        )
    except Exception as error:  # as above
        raise index.bad_file(sample, side, error) from error


def read_whole(index: Index, sample: int, side: int, size: np.ndarray, reduces: bool) -> np.ndarray:
    """Read an image in the size for an input of (2,) `size`; see `read_resized` for the rest."""
    factor, whole = index.sides[side].size_factor, (0, 0, *index.sizes[sample].tolist())
    new_size = factor * int(size[0]), factor * int(size[1])
    return read_resized(index, sample, side, whole, new_size, reduces)


def read_raw_batch(index: Index, samples: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
    """Read whole inputs of an index that `is_raw`, (B, height, width, channels); return them, and
    the reasons by sample why samples are bad.

    One thread that fills a batch is faster than several that share images of a few KB, and reading
    the pixels alone 1.9 times as fast as whole files and `decode` (5 channels of 50x50).
    """
    shape = *index.distinct_sizes[0].tolist(), index.channels
    if index.offsets is not None:
        pixels, length = index.pixels[0], math.prod(shape)
        images = pixels[: len(pixels) // length * length].reshape(-1, *shape)
        return images[index.offsets[samples] // math.prod(shape[:2])], {}
    images, bad = np.empty((len(samples), *shape), index.dtype), {}
    starts = index.headers[0]["raw_offset"][samples].tolist()
    for sample, start, image in zip(samples.tolist(), starts, images, strict=True):
        try:
            if index.by_path:
                read_unchanged(index.files[0][sample], index.headers[0][sample], start, image)
            else:
                image[:] = read_image(index, sample)
        except OSError as error:
            bad[sample] = str(index.bad_file(sample, 0, error))
    return images, bad
