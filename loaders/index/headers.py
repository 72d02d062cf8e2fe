"""Reading the headers of image files, and which files cannot be used."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.images import HEADER, Header, read_header, read_mask, reason_of

Scan = Callable[[list[str]], tuple[np.ndarray, dict[str, str]]]
"""Returns the headers of files, and reasons why some cannot be used, as `scan_headers` does."""

T = TypeVar("T")
R = TypeVar("R")


class BadHeadersError(UserError):
    """Files without a header that can be used; the message names the first ten.

    Attributes:
        reasons: reasons by path.
    """

    def __init__(self, reasons: dict[str, str], num_files: int) -> None:
        named = first_few([f"{path} ({reason})" for path, reason in reasons.items()])
        super().__init__(
            f"{len(reasons)} of {num_files} files cannot be used: {named}; repair or remove them"
        )
        self.reasons = reasons


def scan_headers(
    data: DataConfig, content: str, files: list[str]
) -> tuple[np.ndarray, dict[str, str]]:
    """Read the headers of files.

    Args:
        data: the configuration.
        content: kind of content, see `ImageSpec.content`.
        files: paths of the files.

    Returns:
        (N,) of dtype `HEADER`, zeros where a header cannot be used; and the reasons why, by path.
    """
    headers, broken = np.zeros(len(files), HEADER), {}
    read = partial(header_or_reason, data=data, content=content)
    for i, answer in enumerate(in_threads(read, files, "reading headers")):
        if isinstance(answer, Header):
            headers[i] = tuple(answer)
        else:
            broken[files[i]] = answer
    return headers, broken


def header_or_reason(path: str, data: DataConfig, content: str) -> Header | str:
    """Return the header of a file, or the reason why it cannot be used."""
    max_pixels = data.max_pixels
    num_bytes, modified_ns = stamp_of(path)
    if os.path.exists(path) and not os.path.isfile(path):  # where reading would wait
        return "a device or a pipe"
    try:
        header = read_header(path, content)
        if content == "indices" and header.height * header.width <= max_pixels:  # part: masks
            header = read_mask(path, header, data.ignore_index)
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, path)
    if header.height * header.width > max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels={max_pixels}; "
            "raise it if the file is meant"
        )
    return header._replace(num_bytes=num_bytes, modified_ns=modified_ns)


def stamp_of(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its time of change in ns since 1970."""
    try:
        found = os.stat(path)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """Return the results of a function, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "total": len(parts), "unit": "x256", "delay": 2, "leave": False}
    with ThreadPoolExecutor(32) as pool:
        answers = tqdm(pool.map(lambda part: list(map(answer, part)), parts), **bar)
        return list(chain.from_iterable(answers))
