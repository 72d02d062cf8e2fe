"""The headers of image files, read once and kept as columns in `data.cache_dir`."""

import hashlib
import logging
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.images import HEADER
from loaders.index.headers import Scan, in_threads, stamp_of
from loaders.index.paths import paths_of
from loaders.index.store import one_process_at_a_time, open_column, replaced_folder, save_columns

log = logging.getLogger(__name__)

NOT_KEPT = "data.cache_dir=%s cannot be written to (%s): the headers are read again next time"


def kept_headers(
    scan: Scan, data: DataConfig, content: str, files: list[str], at_once: int = 1 << 20
) -> tuple[np.ndarray, dict[str, str]]:
    """Return the headers of files: stored ones where a file did not change, others from `scan`.

    Args:
        scan: function that reads headers.
        data: the configuration.
        content: kind of content, see `ImageSpec.content`.
        files: paths of the files.
        at_once: number of headers that are read before they are stored.
    """
    headers = np.zeros(len(files), HEADER)
    stamps = in_threads(stamp_of, files, "looking at files") if data.check_files else None
    names, broken = paths_of(files, data.root).names, dict[str, str]()
    kind = f"{data.root} {data.max_pixels} {content} {data.ignore_index} {HEADER}"
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
            headers[part], reasons = scan([files[i] for i in part])
            is_known[part] = headers[part]["height"] > 0
            broken |= reasons
            if can_keep and is_known[part].any():  # if this is stopped, the next time starts here
                try:
                    with replaced_folder(kept) as folder:
                        columns = {"names": names[is_known], "headers": headers[is_known]}
                        save_columns(folder, columns)
                except OSError as error:  # a full disk
                    log.warning(NOT_KEPT, kept.parent, error)
                    can_keep = False
    return headers, broken


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
