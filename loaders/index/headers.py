"""Reading the headers of image files, and which files cannot be used."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from conf.schema import DataConfig
from loaders.images import HEADER, Header, decode, read_header, reason_of

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageFiles:
    """The files of one side of N samples."""

    paths: list[str]

    headers: np.ndarray
    """(N,) of dtype `HEADER`; zeros where a header cannot be used."""

    broken: dict[str, str]
    """Reasons why headers cannot be used, by path."""

    others: Counter[str]
    """Endings of the files beside them that are no images, and their numbers."""

    @property
    def sizes(self) -> np.ndarray:
        """(N, 2): height and width in pixels; (0, 0) where a header cannot be used."""
        return np.stack([self.headers["height"], self.headers["width"]], axis=1)

    def take(self, samples: np.ndarray) -> "ImageFiles":
        """Return the files of some samples, given as their positions."""
        return replace(self, paths=[self.paths[i] for i in samples], headers=self.headers[samples])


def scan_headers(
    files: list[str], data: DataConfig, content: str
) -> tuple[np.ndarray, dict[str, str]]:
    """Read the headers of files.

    Args:
        files: paths of the files.
        data: the configuration.
        content: kind of content, see `ImageSpec.content`.

    Returns:
        Headers and reasons as in `ImageFiles`.
    """
    headers, broken = np.zeros(len(files), HEADER), {}
    read = partial(_header_or_reason, data=data, content=content)
    for i, answer in enumerate(in_threads(read, files, "reading headers")):
        if isinstance(answer, Header):
            headers[i] = tuple(answer)
        else:
            broken[files[i]] = answer
    return headers, broken


def _header_or_reason(path: str, data: DataConfig, content: str) -> Header | str:
    """Return the header of a file, or the reason why it cannot be used."""
    max_pixels = data.max_pixels
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return "a device or a pipe"  # where reading would wait
        header = read_header(path, content)
        if content == "indices" and header.height * header.width <= max_pixels:
            header = _with_indices(path, header, getattr(data, "ignore_index", -100))
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, path)
    if header.height * header.width > max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels={max_pixels}; "
            "raise it if the file is meant"
        )
    return header._replace(num_bytes=found.st_size, modified_ns=found.st_mtime_ns)


def _with_indices(path: str, header: Header, ignore_index: int) -> Header:
    """Return the header of a mask with the facts that need its pixels."""
    indices = decode(Path(path).read_bytes(), np.array([tuple(header)], HEADER)[0], "indices")
    counted = indices[indices != ignore_index]
    highest = int(counted.max()) if counted.size else -1
    return header._replace(channels=1, bits=8 * indices.itemsize, highest=highest)


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """Return the results of a function, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "total": len(parts), "unit": "x256", "delay": 2, "leave": False}
    with ThreadPoolExecutor(32) as pool:
        answers = tqdm(pool.map(lambda part: list(map(answer, part)), parts), **bar)
        return list(chain.from_iterable(answers))
