"""The index of the layouts that consist of image files, whose headers are read once and cached in
`data.cache_dir`."""

import hashlib
import logging
import os
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import Columns, one_process_at_a_time, open_columns, replace_columns
from loaders.folders import IMAGE_ENDINGS
from loaders.images import HEADER, Header, decode, read_header, reason_of
from loaders.index import Index, complete
from loaders.limits import map_in_threads
from loaders.sources import Files, names_below, path_below
from loaders.splits import check_no_split, split_by_seed
from loaders.targets import ImageSpec, Target

log = logging.getLogger(__name__)


def read_headers(paths: Sequence[list[str]], data: DataConfig, contents: Sequence[str]) -> Columns:
    """Return `names` and `headers` of the files of each side as columns of an index, with zeros in
    place of the headers of files that are to be left out. Headers are read unless they are cached
    and the files have not changed since.

    Args:
        paths: of the files of each side.
        data: the configuration.
        contents: kind of content of each side, see `ImageSpec.content`.

    Raises:
        UserError: some that are not in `data.leave_out` have no readable header or are too large,
            without `data.on_error=skip`; they differ in channels or bits; or `data.cache_dir`
            cannot be written to.
    """
    columns = Columns()
    columns.facts = {"content": contents[0], "left_out": {}}
    for side, (files, content) in enumerate(zip(paths, contents, strict=True)):
        names = columns[f"names-{side}"] = names_below(data.root, files)
        headers, broken = _read_side(files, names, data, content)
        columns[f"headers-{side}"] = headers
        columns.facts["left_out"] |= {path_below(data.root, names[i]): broken[i] for i in broken}
    return columns


def _read_side(
    files: list[str], names: np.ndarray, data: DataConfig, content: str
) -> tuple[np.ndarray, dict[int, str]]:
    """Return the headers of a side's files, and reasons by position why some cannot be used."""
    keys = data.root, data.max_pixels, data.ignore_index, data.background, data.exif
    hashed = hashlib.sha256(os.fsencode(f"{keys} {content} {HEADER}")).hexdigest()[:16]
    cache = Path(data.cache_dir, f"headers-{hashed}")
    with one_process_at_a_time(cache):
        headers, broken = _cached_or_read(cache, files, names, data, content)
    listed = listed_files(data)
    for number, path in enumerate(files if listed else []):
        if os.path.normpath(path) in listed:
            headers[number] = np.zeros((), HEADER)
            broken.pop(number, None)
    if broken and data.on_error == "raise":
        named = first_few(f"{files[number]} ({reason})" for number, reason in broken.items())
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
    return headers, broken


def _cached_or_read(
    cache: Path, files: list[str], names: np.ndarray, data: DataConfig, content: str
) -> tuple[np.ndarray, dict[int, str]]:
    """Return the same of all files, by way of columns in the folder `cache`."""
    headers = np.zeros(len(files), HEADER)
    cached = Columns(names=names[:0], headers=headers[:0])
    with suppress(UserError):  # there is none, or it is damaged
        cached = open_columns(cache)
    _, known, rows = np.intersect1d(names, cached["names"], return_indices=True)
    headers[known] = cached["headers"][rows]
    stamps = map_in_threads(_stamp_of, files, "looking at files")
    num_bytes, modified_ns = np.array(stamps, np.int64).reshape(-1, 2).T
    is_changed = (headers["num_bytes"] != num_bytes) | (headers["modified_ns"] != modified_ns)
    headers[is_changed] = np.zeros((), HEADER)
    unread = np.flatnonzero(headers["height"] == 0).tolist()
    read = partial(_header_or_reason, data=data, content=content)
    answers = map_in_threads(read, [files[i] for i in unread], "reading headers")
    broken: dict[int, str] = {}
    for i, answer in zip(unread, answers, strict=True):
        if isinstance(answer, Header):
            headers[i] = tuple(answer)
        else:
            broken[i] = answer
    headers["num_bytes"], headers["modified_ns"] = num_bytes, modified_ns
    if len(broken) < len(unread):
        is_good = headers["height"] > 0
        found = Columns(  # of cached ones, those of other sides are kept
            names=np.concatenate([names[is_good], cached["names"]]),
            headers=np.concatenate([headers[is_good], cached["headers"]]),
        )
        replace_columns(found.take(np.unique(found["names"], return_index=True)[1]), cache)
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


def listed_files(data: DataConfig) -> frozenset[str]:
    """Return the paths in the file `data.leave_out`, one a line."""
    if data.leave_out is None:
        return frozenset()
    try:
        text = Path(data.leave_out).read_text(errors="surrogateescape")
    except OSError as error:
        raise UserError(
            f"data.leave_out={data.leave_out} cannot be read ({error.strerror}); give a file with "
            "a path in each line, as python -m loaders.check ... out=FILE writes it"
        ) from error
    return frozenset(os.path.normpath(line) for line in text.splitlines() if line.strip())


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
    splits: Collection[str],
    files: Columns,
    target: Target,
    counts: dict[str, int],
    notes: tuple[str, ...] = (),
) -> dict[str, Index]:
    """Build the index of the training samples and of those that are held out, by split.

    Args:
        name: name of the data set, for messages.
        data: the configuration.
        splits: those that are wanted besides `train`.
        files, target: files, as `read_headers` returns them, and targets of all samples, those of
            `train` first.
        counts: number of samples of each split that there is; without `val`, if it is wanted, those
            of `train` are split by seed.
        notes: see `Index`.
    """
    if listed := listed_files(data):
        names = [name for side in files.of_sides("names") for name in side]
        matched = listed.intersection(path_below(data.root, name) for name in names)
        report_unmatched(data, len(listed), len(matched))
    ends = np.cumsum([*counts.values()])
    parts = dict(zip(counts, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
    if "val" in counts:
        check_no_split(data)
    elif "val" in splits:
        labels = None
        if data.fold is not None and target.values is not None and target.kind != "numbers":
            # Folds share out each combination of labels.
            of_train = target.values[parts["train"]]
            labels = np.unique(of_train, axis=0, return_inverse=True)[1].ravel()
        parts["train"], parts["val"] = split_by_seed(counts["train"], data, labels)
    return {
        split: file_index(f"{name}/{split}", data.root, files.take(part), target.take(part), notes)
        for split, part in parts.items()
    }


def file_index(
    name: str, root: str, files: Columns, target: Target, notes: tuple[str, ...] = ()
) -> Index:
    """Build the index of image files, all of which lie below `root`, but for those that are to be
    left out; raise UserError if there are none. See `index_splits` for the arguments."""
    is_good = np.all([headers["height"] > 0 for headers in files.of_sides("headers")], axis=0)
    paths = [path_below(root, name) for side in files.of_sides("names") for name in side[~is_good]]
    reasons = files.facts["left_out"]
    left_out = {path: reasons[path] for path in paths if path in reasons}
    if not is_good.any():
        bad = first_few(f"{path} ({reason})" for path, reason in left_out.items())
        raise UserError(
            f"{name} has no images{f' that can be used: {bad}' if bad else ''}; expected files "
            f"like {', '.join(IMAGE_ENDINGS)}"
        )
    columns = files.take(np.flatnonzero(is_good))
    headers = columns.of_sides("headers")
    columns["sizes"] = sizes_of(headers[0])
    backgrounds = np.concatenate([each["background"] for each in headers])
    clear = backgrounds[backgrounds >= 0]
    notes += tuple(_spellings(target.classes))
    if len(clear):
        colour = [*int(clear[0]).to_bytes(3)]
        notes += (f"{len(clear):,} images may be transparent: data.background={colour} shows",)
    channels, bits = headers[0][["channels", "bits"]][0].item()
    specs = [ImageSpec(channels, f"uint{bits}", content=files.facts["content"])]
    if target.kind == "images":
        specs.append(specs[0]._replace(size_factor=target.size_factor))
    elif target.kind == "masks":
        bits = headers[1]["bits"].max()
        dtype = "int32" if bits == 32 else f"uint{bits}"
        specs.append(ImageSpec(1, dtype, 1, target.interpolation, "indices"))
    good_targets = target.take(np.flatnonzero(is_good))
    return Files(complete(columns, name, good_targets, specs, left_out, notes), root)


def sizes_of(headers: np.ndarray) -> np.ndarray:
    """Return (N, 2): height and width in pixels; (0, 0) where a file is to be left out."""
    return np.stack([headers["height"], headers["width"]], axis=1)


def _spellings(classes: tuple[str, ...]) -> list[str]:
    """Return a line on classes whose names may be spellings of one, such as `Cat` and `cat`, or `1`
    and `1.0`, if there are any."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        try:
            meaning = str(float(name))
        except ValueError:
            meaning = unicodedata.normalize("NFC", name).casefold()
        alike[meaning].append(name)
    groups = [", ".join(names) for names in alike.values() if len(names) > 1]
    return [f"spellings of one name that are classes each: {first_few(groups)}"] if groups else []
