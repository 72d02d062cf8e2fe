"""The headers of image files, read once and kept as columns in `data.cache_dir`."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm.contrib.concurrent import thread_map

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.images import HEADER, Header, read_header, read_mask, reason_of
from loaders.index.paths import paths_of
from loaders.index.store import one_process_at_a_time, open_column, replaced_folder, save_columns

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

NOT_KEPT = "data.cache_dir=%s cannot be written to (%s): the headers are read again next time"


class BadHeadersError(UserError):
    """Files without a header that can be used; the message names the first ten.

    Attributes:
        reasons: why, by path.
    """

    def __init__(self, reasons: dict[str, str], num_files: int) -> None:
        named = first_few([f"{path} ({reason})" for path, reason in reasons.items()])
        super().__init__(
            f"{len(reasons)} of {num_files} files cannot be used: {named}; repair or remove them"
        )
        self.reasons = reasons


def read_headers(
    files: list[str], data: DataConfig, content: str, at_once: int = 1 << 20
) -> np.ndarray:
    """(N,) of dtype `HEADER`: the headers of the files.

    They are kept in `data.cache_dir`; the next time, only files that were added or changed are read.

    Args:
        files: paths.
        data: the configuration. With `data.on_error=skip`, headers that cannot be used are zeros.
        content: as `ImageSpec.content`.
        at_once: headers that are read before they are kept; a scan that is stopped loses some minutes.

    Raises:
        BadHeadersError: files have no readable header or are too large.
    """
    headers = np.zeros(len(files), HEADER)
    if not files:
        return headers
    stamps = in_threads(_stamp, files, "looking at files") if data.check_files else None
    paths, broken = paths_of(files), {}
    names = paths.names
    kind = f"{paths.folder} {data.max_pixels} {content} {data.ignore_index} {HEADER}"
    kept = Path(data.cache_dir, f"headers-{hashlib.sha256(os.fsencode(kind)).hexdigest()[:16]}")
    with ExitStack() as lock:
        try:
            lock.enter_context(one_process_at_a_time(kept))
            can_keep = True
        except (
            OSError,
            NotImplementedError,
        ) as error:  # such as a folder that is read-only or full
            log.warning(NOT_KEPT, kept.parent, error)
            can_keep = False
        is_known = _fill_with_kept(headers, kept, names, stamps)
        unread = np.flatnonzero(~is_known)
        for part in np.split(unread, range(at_once, len(unread), at_once)):
            answers = in_threads(
                lambda path: header_or_reason(path, data, content),
                [files[i] for i in part],
                "reading headers",
            )
            for i, answer in zip(part, answers, strict=True):
                if isinstance(answer, Header):
                    headers[i], is_known[i] = tuple(answer), True
                else:
                    broken[files[i]] = answer
            if can_keep and is_known[part].any():  # if this is stopped, the next time starts here
                try:
                    with replaced_folder(kept) as folder:
                        columns = {"names": names[is_known], "headers": headers[is_known]}
                        save_columns(folder, columns)
                except OSError as error:  # a full disk
                    log.warning(NOT_KEPT, kept.parent, error)
                    can_keep = False
    if broken and data.on_error != "skip":
        raise BadHeadersError(broken, len(files))
    return headers


def header_or_reason(path: str, data: DataConfig, content: str) -> Header | str:
    """The header of a file, or the reason why it cannot be used."""
    max_pixels = data.max_pixels
    num_bytes, modified_ns = _stamp(path)
    if os.path.exists(path) and not os.path.isfile(path):  # where reading would wait
        return "a device or a pipe"
    try:
        header = read_header(path, content)
        if content == "indices" and header.height * header.width <= max_pixels:
            header = read_mask(path, header, data.ignore_index)
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, path)
    if header.height * header.width > max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels={max_pixels}; "
            "raise it if the file is meant"
        )
    return header._replace(num_bytes=num_bytes, modified_ns=modified_ns)


def _fill_with_kept(
    headers: np.ndarray, kept: Path, names: np.ndarray, stamps: list[tuple[int, int]] | None
) -> np.ndarray:
    """Fill in the kept headers of files that did not change; (N,) bool: which these are."""
    try:
        kept_names = open_column(kept / "names.npy", np.bytes_, (None,))
        kept_headers = open_column(kept / "headers.npy", HEADER, kept_names.shape)
    except UserError:  # there is none, or it was damaged when the machine went down
        return np.zeros(len(names), bool)
    row_of = {name: row for row, name in enumerate(kept_names.tolist())}
    rows = np.array([row_of.get(name, -1) for name in names.tolist()])
    known, is_known = kept_headers[rows], rows >= 0
    if stamps is not None:
        now = np.array(stamps)
        is_known &= (known["num_bytes"] == now[:, 0]) & (known["modified_ns"] == now[:, 1])
    headers[is_known] = known[is_known]
    return is_known


def _stamp(path: str) -> tuple[int, int]:
    """Size of a file in bytes, and its time of change in ns since 1970."""
    try:
        found = os.stat(path)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """The answers, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "unit": "x256", "delay": 2, "leave": False}
    answers = thread_map(lambda part: list(map(answer, part)), parts, max_workers=32, **bar)
    return list(chain.from_iterable(answers))
