"""The headers of image files, read once and cached in `data.cache_dir`."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.columns import Columns, one_process_at_a_time, open_columns, replace_columns
from loaders.files import names_below
from loaders.images import HEADER, Header, decode, read_header, reason_of

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageFiles:
    """The files of one side of N samples.

    Attributes:
        content: kind of content, see `ImageSpec.content`.
        headers: (N,) of dtype `HEADER`; zeros where a header cannot be used.
        broken: reasons why headers cannot be used, by path.
        others: what `images_below` counted.
    """

    paths: list[str]
    content: str
    headers: np.ndarray
    broken: dict[str, str]
    others: Counter[str]

    @property
    def sizes(self) -> np.ndarray:
        """(N, 2): height and width in pixels; (0, 0) where a header cannot be used."""
        return np.stack([self.headers["height"], self.headers["width"]], axis=1)

    def take(self, samples: np.ndarray) -> "ImageFiles":
        """Return the files of some samples, given as their positions."""
        return replace(self, paths=[self.paths[i] for i in samples], headers=self.headers[samples])


def read_headers(
    files: list[str], data: DataConfig, content: str, others: Counter[str] | None = None
) -> ImageFiles:
    """Read the headers of files, unless they are cached and the files have not changed since; see
    `ImageFiles` for the arguments.

    Raises:
        UserError: some have no readable header or are too large, without `data.on_error=skip`; they
            differ in channels or bits; or `data.cache_dir` cannot be written to.
    """
    keys = data.root, data.max_pixels, data.ignore_index, data.background, data.exif
    hashed = hashlib.sha256(os.fsencode(f"{keys} {content} {HEADER}")).hexdigest()[:16]
    cache = Path(data.cache_dir, f"headers-{hashed}")
    with one_process_at_a_time(cache):
        headers, broken = _cached_or_read(cache, files, data, content)
    if broken and data.on_error == "raise":
        named = first_few(f"{path} ({reason})" for path, reason in broken.items())
        raise UserError(
            f"{len(broken)} of {len(files)} files cannot be used: {named}; repair or remove them"
        )
    good = np.flatnonzero(headers["height"])
    kinds = headers[["channels", "bits"]][good]
    wrong = good[kinds != kinds[:1]]
    if len(wrong) and content != "indices":  # masks may differ
        raise UserError(
            f"{len(wrong)} of {len(good)} images, such as {files[wrong[0]]}, differ in channels or "
            f"bits from {files[good[0]]}; use images of one kind"
        )
    return ImageFiles(files, content, headers, broken, others or Counter())


def _cached_or_read(
    cache: Path, files: list[str], data: DataConfig, content: str
) -> tuple[np.ndarray, dict[str, str]]:
    """Return headers and reasons as in `ImageFiles`, by way of columns in the folder `cache`."""
    headers, names = np.zeros(len(files), HEADER), names_below(data.root, files)
    cached = Columns(names=names[:0], headers=headers[:0])
    with suppress(UserError):  # there is none, or it is damaged
        cached = open_columns(cache)
    _, known, rows = np.intersect1d(names, cached["names"], return_indices=True)
    headers[known] = cached["headers"][rows]
    stamps = np.array(in_threads(_stamp_of, files, "looking at files"), np.int64).reshape(-1, 2)
    is_changed = (headers["num_bytes"] != stamps[:, 0]) | (headers["modified_ns"] != stamps[:, 1])
    headers[is_changed] = np.zeros((), HEADER)
    unread = np.flatnonzero(headers["height"] == 0)
    read = partial(_header_or_reason, data=data, content=content)
    answers = in_threads(read, [files[i] for i in unread], "reading headers")
    broken: dict[str, str] = {}
    for i, answer in zip(unread, answers, strict=True):
        if isinstance(answer, Header):
            headers[i] = tuple(answer)
        else:
            broken[files[i]] = answer
    headers["num_bytes"], headers["modified_ns"] = stamps.T
    if len(broken) < len(unread):
        is_good = headers["height"] > 0
        is_other = ~np.isin(cached["names"], names)  # such as those of other sides
        found = Columns(
            names=np.concatenate([cached["names"][is_other], names[is_good]]),
            headers=np.concatenate([cached["headers"][is_other], headers[is_good]]),
        )
        replace_columns(found, {}, cache)
    return headers, broken


def _stamp_of(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its time of change in ns since 1970."""
    try:
        found = os.stat(path)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _header_or_reason(path: str, data: DataConfig, content: str) -> Header | str:
    """Return the header of a file, or the reason why it cannot be used."""
    try:
        background = int.from_bytes(bytes(data.background))
        header = read_header(path, content, background, turns=data.exif is not False)
        num_pixels = header.height * header.width
        if content == "indices" and num_pixels <= data.max_pixels:
            header = _with_indices(path, header, data.ignore_index)
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, path)
    if num_pixels > data.max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels="
            f"{data.max_pixels}; raise it if the file is meant"
        )
    return header


def _with_indices(path: str, header: Header, ignore_index: int) -> Header:
    """Return the header of a mask with the facts that need its pixels."""
    indices = decode(Path(path).read_bytes(), np.array([tuple(header)], HEADER)[0], "indices")
    counts = indices[indices != ignore_index]
    if counts.size and counts.min() < 0:
        raise ValueError(
            f"holds {counts.min()}, which is no class; set data.ignore_index={counts.min()} if "
            "it means none"
        )
    highest = int(counts.max()) if counts.size else -1
    return header._replace(channels=1, bits=8 * indices.itemsize, highest=highest)


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """Return the results of a function, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "total": len(parts), "unit": "x256", "delay": 2, "leave": False}
    with ThreadPoolExecutor(32) as pool:
        answers = tqdm(pool.map(lambda part: list(map(answer, part)), parts), **bar)
        return list(chain.from_iterable(answers))
