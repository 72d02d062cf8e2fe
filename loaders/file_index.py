"""The index of the layouts that consist of image files, whose headers are read once and cached in
`data.cache_dir`."""

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import Columns, one_process_at_a_time, open_columns, write_columns
from loaders.folders import IMAGE_ENDINGS
from loaders.images import HEADER, read_header, reason_of
from loaders.index import Files, Index, complete, folder_of, path_below
from loaders.limits import map_in_threads
from loaders.splits import check_no_split, split_by_seed
from loaders.targets import ImageSpec, Target

log = logging.getLogger(__name__)


def read_headers(
    files: Sequence[Sequence[str]],
    data: DataConfig,
    contents: Sequence[str] = ("rgb",),
    notes: Sequence[str] = (),
) -> Columns:
    """Return, for each side, `names` and `headers` of its files, with the facts that `file_index`
    needs. Headers are read unless they are cached and the files have not changed since;
    they are zeros where a file cannot be used, for which there is a reason, or is left out by
    `data.leave_out`.

    Args:
        files: of each side, their paths below `data.root`.
        data: the configuration.
        contents: kind of content of each side, see `ImageSpec.content`.
        notes: see `Index`.

    Raises:
        UserError: some that are not in `data.leave_out` have no readable header or are too large,
            without `data.on_error=skip`; they differ in channels or bits; or `data.cache_dir`
            cannot be written to.
    """
    columns, folder = Columns(), folder_of(data.root)
    listed, matched, reasons = listed_names(data), set[bytes](), dict[str, str]()
    for side, (below, content) in enumerate(zip(files, contents, strict=True)):
        names = np.array([*map(os.fsencode, below)], np.bytes_)
        used = np.flatnonzero([name not in listed for name in names.tolist()])
        headers, paths = np.zeros(len(names), HEADER), [folder + below[i] for i in used.tolist()]
        headers[used] = _headers_of(paths, names[used], data, content, reasons)
        columns |= {f"names-{side}": names, f"headers-{side}": headers}
        matched |= listed.intersection(names.tolist())
    if reasons and data.on_error == "raise":
        few = first_few(f"{path} ({reason})" for path, reason in sorted(reasons.items()))
        raise UserError(
            f"{len(reasons)} of {sum(map(len, files))} files cannot be used: {few}; repair or "
            "remove them"
        )
    inputs = columns["headers-0"]
    good = np.flatnonzero(inputs["height"])
    kinds = inputs[["channels", "bits"]][good]
    wrong = good[kinds != kinds[:1]]
    if len(wrong):
        raise UserError(
            f"{len(wrong)} of {len(good)} images, such as {folder}{files[0][wrong[0]]}, differ in "
            f"channels or bits from {folder}{files[0][good[0]]}; use images of one kind"
        )
    report_unmatched(data, len(listed), len(matched))
    columns.facts = {"contents": contents, "reasons": reasons, "notes": notes}
    return columns


def _headers_of(
    paths: list[str], names: np.ndarray, data: DataConfig, content: str, reasons: dict[str, str]
) -> np.ndarray:
    """Return the headers of files of a side, and add to the `reasons` by path why some cannot be
    used."""
    keys = data.root, data.max_pixels, data.ignore_index, data.background, data.exif
    hashed = hashlib.sha256(os.fsencode(f"{keys} {content} {HEADER}")).hexdigest()[:16]
    cache = Path(data.cache_dir, f"headers-{hashed}")
    headers = np.zeros(len(paths), HEADER)

    def read(i: int) -> None:
        try:
            headers[i] = tuple(read_header(paths[i], content, data))
        except Exception as error:  # damaged bytes make the libraries raise errors of any type
            reasons[paths[i]] = reason_of(error, paths[i])

    with one_process_at_a_time(cache):
        cached = Columns(names=names[:0], headers=headers[:0])
        with suppress(UserError):  # there is none, or it is damaged
            cached = open_columns(cache)
        _, known, rows = np.intersect1d(names, cached["names"], return_indices=True)
        headers[known] = cached["headers"][rows]
        stamps = map_in_threads(_stamp_of, paths, "looking at files")
        num_bytes, modified_ns = np.array(stamps, np.int64).reshape(-1, 2).T
        is_changed = (headers["num_bytes"] != num_bytes) | (headers["modified_ns"] != modified_ns)
        headers[is_changed] = np.zeros((), HEADER)
        unread = np.flatnonzero(headers["height"] == 0).tolist()
        map_in_threads(read, unread, "reading headers")
        headers["num_bytes"], headers["modified_ns"] = num_bytes, modified_ns
        is_good = headers["height"] > 0
        if is_good[unread].any():
            found = Columns(  # of cached ones, those of other sides are kept
                names=np.concatenate([names[is_good], cached["names"]]),
                headers=np.concatenate([headers[is_good], cached["headers"]]),
            )
            write_columns(found.take(np.unique(found["names"], return_index=True)[1]), cache)
    return headers


def _stamp_of(path: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its time of change in ns since 1970."""
    try:
        found = os.stat(path)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return found.st_size, found.st_mtime_ns


def listed_names(data: DataConfig) -> set[bytes]:
    """Return the files in `data.leave_out`, a path a line, by their names below `data.root`; of
    shards, by those that follow the shard."""
    if data.leave_out is None:
        return set()
    try:
        text = Path(data.leave_out).read_text(errors="surrogateescape")
    except OSError as error:
        raise UserError(
            f"data.leave_out={data.leave_out} cannot be read ({error.strerror}); give a file with "
            "a path in each line, as python -m loaders.check ... out=FILE writes it"
        ) from error
    folder, lines = folder_of(data.root), filter(str.strip, text.splitlines())
    paths = [os.path.normpath(line.rpartition(".tar: ")[2]) for line in lines]
    return {os.fsencode(path.removeprefix(folder)) for path in paths}


def report_unmatched(data: DataConfig, num_lines: int, num_matched: int) -> None:
    """Log how many lines of `data.leave_out` do nothing, if there are any."""
    if num_matched < num_lines:
        log.info(
            "%d of %s of data.leave_out=%s name no file that is read here",
            *(num_lines - num_matched, counted(num_lines, "line"), data.leave_out),
        )


def index_splits(
    name: str,
    data: DataConfig,
    files: Columns,
    target: Target,
    counts: dict[str, int],
) -> dict[str, Index]:
    """Build the index of the training samples and of those that are held out, by split.

    Args:
        name: name of the data set, for messages.
        data: the configuration.
        files, target: files, as `read_headers` returns them, and targets of all samples, those of
            `train` first.
        counts: number of samples of each split that there is; without `val`, those of `train` are
            split by seed.
    """
    ends = np.cumsum([*counts.values()])
    parts = dict(zip(counts, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    if "val" in counts:
        check_no_split(data)
    else:
        labels = None
        if data.fold is not None and target.values is not None and target.kind != "numbers":
            # Folds share out each combination of labels.
            of_train = target.values[parts["train"]]
            labels = np.unique(of_train, axis=0, return_inverse=True)[1].ravel()
        parts["train"], parts["val"] = split_by_seed(counts["train"], data, labels)
    return {
        split: file_index(f"{name}/{split}", data, files.take(part), target.take(part))
        for split, part in parts.items()
    }


def file_index(name: str, data: DataConfig, files: Columns, target: Target) -> Index:
    """Build the index of image files but for those that are to be left out; raise UserError if
    there are none. See `index_splits` for the arguments."""
    is_good = np.all([headers["height"] > 0 for headers in files.of_sides("headers")], axis=0)
    reasons: dict[str, str] = files.facts["reasons"]
    unused = np.concatenate([names[~is_good] for names in files.of_sides("names")])
    paths = [path_below(data.root, name) for name in unused]
    left_out = {path: reasons[path] for path in paths if path in reasons}
    good = np.flatnonzero(is_good)
    if not len(good):
        bad = first_few(f"{path} ({reason})" for path, reason in left_out.items())
        raise UserError(
            f"{name} has no images{f' that can be used: {bad}' if bad else ''}; expected files "
            f"like {', '.join(IMAGE_ENDINGS)}"
        )
    columns = files.take(good)
    headers = columns.of_sides("headers")
    columns["sizes"] = sizes_of(headers[0])
    notes = [*files.facts["notes"]]
    if num_clear := sum(np.count_nonzero(side["background"] >= 0) for side in headers):
        shown = f"data.background={[*data.background]} shows"
        notes.append(f"{num_clear:,} images may be transparent: {shown}")
    specs = []
    for side, (content, header) in enumerate(zip(files.facts["contents"], headers, strict=True)):
        bits = header["bits"].max()
        dtype = "int32" if bits == 32 else f"uint{bits}"
        factor = target.size_factor if side else 1
        specs.append(ImageSpec(int(header["channels"][0]), dtype, factor, content))
    columns = complete(columns, name, target.take(good), specs, left_out, notes)
    return Files(columns, data.root)


def sizes_of(headers: np.ndarray) -> np.ndarray:
    """Return (N, 2): height and width in pixels; (0, 0) where a file is to be left out."""
    return np.stack([headers["height"], headers["width"]], axis=1)
