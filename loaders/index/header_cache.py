"""The headers of image files, read once and kept in `data.cache_dir`."""

import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from conf.files import write_atomically
from conf.schema import DataConfig
from loaders.images import HEADER
from loaders.index.headers import in_threads, scan_headers
from loaders.index.paths import paths_of
from loaders.index.store import one_process_at_a_time

log = logging.getLogger(__name__)

NOT_KEPT = "data.cache_dir=%s cannot be written to (%s): the headers are read again next time"


def kept_headers(
    files: list[str], data: DataConfig, content: str, at_once: int = 1 << 16
) -> tuple[np.ndarray, dict[str, str]]:
    """Return the headers of files: stored ones where a file did not change; else as `scan_headers`.

    They are stored after each `at_once` that were read, or after a 16th of them if that is more.
    """
    stamps = in_threads(_stamp_of, files, "looking at files") if data.check_files else []
    ignored = getattr(data, "ignore_index", -100)  # in masks
    kind = f"{data.root} {data.max_pixels} {content} {ignored} {HEADER}"
    kept = Path(data.cache_dir, f"headers-{hashlib.sha256(os.fsencode(kind)).hexdigest()[:16]}.npy")
    try:
        lock = one_process_at_a_time(kept).acquire()
    except (OSError, NotImplementedError) as error:  # such as a read-only or full folder
        log.warning(NOT_KEPT, kept.parent, error)
        return scan_headers(files, data, content)
    headers, names = np.zeros(len(files), HEADER), paths_of(files, data.root).names
    broken: dict[str, str] = {}
    with lock:
        stored = _stored(kept, names.dtype)
        row_of = {name: row for row, name in enumerate(stored["name"].tolist())}
        rows = np.array([row_of.get(name, -1) for name in names.tolist()], int)
        is_known = rows >= 0
        headers[is_known] = stored["header"][rows[is_known]]
        if stamps:
            num_bytes, modified_ns = np.array(stamps).T
            is_known &= headers["num_bytes"] == num_bytes
            is_known &= headers["modified_ns"] == modified_ns
        unread = np.flatnonzero(~is_known)
        for part in np.array_split(unread, min(16, 1 + len(unread) // at_once)):
            headers[part], reasons = scan_headers([files[i] for i in part], data, content)
            is_known[part] = headers[part]["height"] > 0
            broken |= reasons
            if is_known[part].any():  # if this is stopped, the next time starts here
                known = np.zeros(is_known.sum(), [("name", names.dtype), ("header", HEADER)])
                known["name"], known["header"] = names[is_known], headers[is_known]
                others = stored[~np.isin(stored["name"], names)]  # such as those of other sides
                try:
                    with write_atomically(kept) as unfinished:
                        np.save(unfinished, np.concatenate([others, known]))
                except OSError as error:  # a full disk
                    log.warning(NOT_KEPT, kept.parent, error)
    return headers, broken


def _stamp_of(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its time of change in ns since 1970."""
    try:
        found = os.stat(path)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _stored(kept: Path, name: np.dtype) -> np.ndarray:
    """Return the stored names and headers; without a file, or if it is damaged, an empty array."""
    try:
        return np.load(kept)
    except (OSError, EOFError, ValueError):
        return np.zeros(0, [("name", name), ("header", HEADER)])
