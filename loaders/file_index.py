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
from loaders.columns import Columns, one_process_at_a_time, open_columns, write_columns
from loaders.folders import IMAGE_ENDINGS
from loaders.images import HEADER, Header, decode, read_header, reason_of
from loaders.index import Index, complete
from loaders.limits import map_in_threads
from loaders.sources import Files, folder_of, path_below
from loaders.splits import check_no_split, split_by_seed
from loaders.targets import ImageSpec, Target

log = logging.getLogger(__name__)


def read_headers(
    files: Sequence[Sequence[str]], data: DataConfig, contents: Sequence[str] = ("rgb",)
) -> Columns:
    """Return, for each side, `names`, `headers` and `reasons` of its files. Headers are read unless
    they are cached and the files have not changed since; they are zeros where a file cannot be
    used, for which there is a reason, or is left out by `data.leave_out`.

    Args:
        files: of each side, their paths below `data.root`.
        data: the configuration.
        contents: kind of content of each side, see `ImageSpec.content`.

    Raises:
        UserError: some that are not in `data.leave_out` have no readable header or are too large,
            without `data.on_error=skip`; they differ in channels or bits; or `data.cache_dir`
            cannot be written to.
    """
    columns, folder = Columns(), folder_of(data.root)
    listed, matched = listed_names(data), set[bytes]()
    columns.facts = {"content": contents[0]}
    for side, (below, content) in enumerate(zip(files, contents, strict=True)):
        names = np.array([*map(os.fsencode, below)], np.bytes_)
        paths = [folder + name for name in below]
        headers, reasons = _headers_of(paths, names, data, content)
        if listed:
            is_listed = np.array([name in listed for name in names.tolist()], bool)
            headers[is_listed], reasons[is_listed] = np.zeros((), HEADER), ""
            matched |= {*names[is_listed].tolist()}
        _check(paths, headers, reasons, data, content)
        sides = {"names": names, "headers": headers, "reasons": reasons}
        columns.update({f"{name}-{side}": column for name, column in sides.items()})
    report_unmatched(data, len(listed), len(matched))
    return columns


def _headers_of(
    paths: list[str], names: np.ndarray, data: DataConfig, content: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the headers of a side's files, and (N,) texts why some cannot be used, else empty."""
    keys = data.root, data.max_pixels, data.ignore_index, data.background, data.exif
    hashed = hashlib.sha256(os.fsencode(f"{keys} {content} {HEADER}")).hexdigest()[:16]
    cache = Path(data.cache_dir, f"headers-{hashed}")
    headers, reasons = np.zeros(len(paths), HEADER), np.full(len(paths), "", object)
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
        read = partial(_header_or_reason, data=data, content=content)
        answers = map_in_threads(read, [paths[i] for i in unread], "reading headers")
        for i, answer in zip(unread, answers, strict=True):
            if isinstance(answer, Header):
                headers[i] = tuple(answer)
            else:
                reasons[i] = answer
        headers["num_bytes"], headers["modified_ns"] = num_bytes, modified_ns
        if np.count_nonzero(reasons) < len(unread):
            is_good = headers["height"] > 0
            found = Columns(  # of cached ones, those of other sides are kept
                names=np.concatenate([names[is_good], cached["names"]]),
                headers=np.concatenate([headers[is_good], cached["headers"]]),
            )
            write_columns(found.take(np.unique(found["names"], return_index=True)[1]), cache)
    return headers, reasons


def _check(
    paths: list[str], headers: np.ndarray, reasons: np.ndarray, data: DataConfig, content: str
) -> None:
    """Raise UserError if files of a side cannot be used, or differ in what they hold."""
    broken = np.flatnonzero(reasons)
    if len(broken) and data.on_error == "raise":
        named = first_few(f"{paths[i]} ({reasons[i]})" for i in broken)
        raise UserError(
            f"{len(broken)} of {len(paths)} files cannot be used: {named}; repair or remove them"
        )
    good = np.flatnonzero(headers["height"])
    kinds = headers[["channels", "bits"]][good]
    wrong = good[kinds != kinds[:1]]
    if len(wrong) and content != "indices":  # masks may differ
        raise UserError(
            f"{len(wrong)} of {len(good)} images, such as {paths[wrong[0]]}, differ in channels or "
            f"bits from {paths[good[0]]}; use images of one kind"
        )


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
        split: file_index(f"{name}/{split}", data, files.take(part), target.take(part), notes)
        for split, part in parts.items()
    }


def file_index(
    name: str, data: DataConfig, files: Columns, target: Target, notes: tuple[str, ...] = ()
) -> Index:
    """Build the index of image files but for those that are to be left out; raise UserError if
    there are none. See `index_splits` for the arguments."""
    is_good = np.all([headers["height"] > 0 for headers in files.of_sides("headers")], axis=0)
    left_out = {
        path_below(data.root, names[i]): str(reasons[i])
        for names, reasons in zip(files.of_sides("names"), files.of_sides("reasons"), strict=True)
        for i in np.flatnonzero(reasons)
    }
    if not is_good.any():
        bad = first_few(f"{path} ({reason})" for path, reason in left_out.items())
        raise UserError(
            f"{name} has no images{f' that can be used: {bad}' if bad else ''}; expected files "
            f"like {', '.join(IMAGE_ENDINGS)}"
        )
    columns = files.take(np.flatnonzero(is_good))
    for side in range(len(files.of_sides("reasons"))):
        del columns[f"reasons-{side}"]
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
    return Files(complete(columns, name, good_targets, specs, left_out, notes), data.root)


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
