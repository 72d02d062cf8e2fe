"""The headers of image files, read once and kept in `data.cache_dir`."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from conf.errors import UserError, first_few
from conf.files import write_atomically
from conf.schema import DataConfig
from loaders.files import paths_of
from loaders.images import HEADER, Header, decode, read_header, reason_of

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageFiles:
    """The files of one side of N samples."""

    paths: list[str]

    content: str
    """Kind of content, see `ImageSpec.content`."""

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


def read_headers(
    files: list[str],
    data: DataConfig,
    content: str,
    others: Counter[str] | None = None,
    at_once: int = 1 << 16,
) -> ImageFiles:
    """Read the headers of files, unless they are kept and the files have not changed since.

    Args:
        files: paths of the files, all different.
        data: the configuration.
        content: see `ImageFiles`.
        others: what `images_below` counted.
        at_once: number of headers that are read before they are kept, or a 16th if that is more.

    Raises:
        UserError: some have no readable header or are too large, without `data.on_error=skip`; or
            `data.cache_dir` cannot be written to.
    """
    ignored = getattr(data, "ignore_index", -100)  # in masks
    changes = f"{ignored} {data.background} {data.exif}"
    kind = f"{data.root} {data.max_pixels} {content} {changes} {HEADER}"
    kept = Path(data.cache_dir, f"headers-{hashlib.sha256(os.fsencode(kind)).hexdigest()[:16]}.npy")
    lock: AbstractContextManager[object]
    try:
        lock = one_process_at_a_time(kept).acquire()
    except (OSError, NotImplementedError):  # of a folder that is only read, no lock is needed
        lock = nullcontext()
    try:
        with lock:
            headers, broken = _kept_or_read(kept, files, data, content, at_once)
    except OSError as error:
        raise UserError(
            f"data.cache_dir={data.cache_dir} cannot be written to ({error}); use another folder"
        ) from error
    named = [f"{path} ({reason})" for path, reason in broken.items()]
    if named and data.on_error == "raise":
        raise UserError(
            f"{len(named)} of {len(files)} files cannot be used: {first_few(named)}; repair or "
            "remove them"
        )
    return ImageFiles(files, content, headers, broken, others or Counter())


def _kept_or_read(
    kept: Path, files: list[str], data: DataConfig, content: str, at_once: int
) -> tuple[np.ndarray, dict[str, str]]:
    """Return headers and reasons as in `ImageFiles`, by way of the file `kept`."""
    headers, names = np.zeros(len(files), HEADER), paths_of(files, data.root).names
    broken: dict[str, str] = {}
    dtype = np.dtype([("name", names.dtype), ("header", HEADER)])
    try:
        stored = np.load(kept)
    except (OSError, EOFError, ValueError):  # there is none, or it is damaged
        stored = np.zeros(0, dtype)
    _, known, rows = np.intersect1d(names, stored["name"], return_indices=True)
    headers[known] = stored["header"][rows]
    stamps = np.array(in_threads(_stamp_of, files, "looking at files"), np.int64).reshape(-1, 2)
    is_changed = (headers["num_bytes"] != stamps[:, 0]) | (headers["modified_ns"] != stamps[:, 1])
    headers[is_changed] = np.zeros((), HEADER)
    others = stored[~np.isin(stored["name"], names)]  # such as those of other sides
    read = partial(_header_or_reason, data=data, content=content)
    unread = np.flatnonzero(headers["height"] == 0)
    for part in np.array_split(unread, min(16, 1 + len(unread) // at_once)):
        answers = in_threads(read, [files[i] for i in part], "reading headers")
        for i, answer in zip(part, answers, strict=True):
            if isinstance(answer, Header):
                headers[i] = tuple(answer)
            else:
                broken[files[i]] = answer
        is_good = headers["height"] > 0
        if is_good[part].any():  # if this is stopped, the next time starts here
            good = np.zeros(is_good.sum(), dtype)
            good["name"], good["header"] = names[is_good], headers[is_good]
            with write_atomically(kept) as unfinished:
                np.save(unfinished, np.concatenate([others, good]))
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
        num_bytes, modified_ns = _stamp_of(path)
        background = int.from_bytes(bytes(data.background))
        header = read_header(path, content, background, turns=data.exif is not False)
        num_pixels = header.height * header.width
        if content == "indices" and num_pixels <= data.max_pixels:
            header = _with_indices(path, header, getattr(data, "ignore_index", -100))
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, path)
    if num_pixels > data.max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels="
            f"{data.max_pixels}; raise it if the file is meant"
        )
    return header._replace(num_bytes=num_bytes, modified_ns=modified_ns)


def _with_indices(path: str, header: Header, ignore_index: int) -> Header:
    """Return the header of a mask with the facts that need its pixels."""
    indices = decode(Path(path).read_bytes(), np.array([tuple(header)], HEADER)[0], "indices")
    counted = indices[indices != ignore_index]
    if counted.size and counted.min() < 0:
        raise ValueError(
            f"holds {counted.min()}, which is no class; set data.ignore_index={counted.min()} if "
            "it means none"
        )
    highest = int(counted.max()) if counted.size else -1
    return header._replace(channels=1, bits=8 * indices.itemsize, highest=highest)


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """Return the results of a function, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "total": len(parts), "unit": "x256", "delay": 2, "leave": False}
    with ThreadPoolExecutor(32) as pool:
        answers = tqdm(pool.map(lambda part: list(map(answer, part)), parts), **bar)
        return list(chain.from_iterable(answers))


def one_process_at_a_time(path: Path) -> FileLock:
    """Lock out other processes of this machine; the empty file `path`.lock stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")
