"""What the headers of image files say, read once and kept in `data.cache_dir`."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar
from zipfile import BadZipFile

import numpy as np
import simplejpeg
from filelock import FileLock
from PIL import Image
from tqdm.contrib.concurrent import thread_map

from conf.schema import DataConfig
from loaders import jpeg, png
from loaders.decode import decode_mask, reason_of
from loaders.paths import common_folder
from loaders.stamps import Stamp, stamp_of

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

ORIENTATION = 0x0112  # the EXIF tag
TIFF_SIZE = (256, 257)  # tags of the width and height as stored
JPEG_TAGS, JPEG_END = b"\xff\xe1", b"\xff\xd9"
JPEG_HEADER_BYTES = 1 << 14  # enough for most
NAMED_IN_ERRORS = 10
AT_ONCE = 1 << 16  # headers that are kept together while there are further ones to read
PART = ".part.npz"
NOT_KEPT = "data.cache_dir=%s cannot be written to (%s): the headers are read again next time"


class BadHeadersError(ValueError):
    """Files without a header that can be used; the message names the first ten.

    Attributes:
        reasons: of each of them, by path, why.
    """

    def __init__(self, reasons: dict[str, str], num_files: int) -> None:
        named = some([f"{path} ({reason})" for path, reason in reasons.items()])
        super().__init__(
            f"{len(reasons)} of {num_files} files cannot be used: {named}; repair or remove them"
        )
        self.reasons = reasons


class Header(NamedTuple):
    """What a file's header says of its image."""

    height: int
    """Pixels, upright."""
    width: int
    """Pixels, upright."""
    channels: int
    bits: int
    """Per channel: 8 or 16."""
    orientation: int = 1
    """How the stored image is to be turned upright, as EXIF numbers it; 1: not at all."""
    raw_offset: int = -1
    """First byte of the pixels if they are uncompressed, interleaved and in one piece, else -1."""
    dali_reads: bool = True
    """Whether DALI's decoder returns these channels and bits correctly."""
    ends: bool = True
    """False for a JPEG without the marker at its end: it may be cut short, which a decoder that only
    needs the upper lines would not notice."""
    highest: int = -1
    """Masks: the highest index but for `data.ignore_index`."""
    num_bytes: int = -1
    """Size of the file."""
    modified_ns: int = -1
    """When the file was changed last, in ns since 1970."""


HEADER = np.dtype([(name, kind) for name, kind in Header.__annotations__.items()])


def read_headers(files: list[str], data: DataConfig, content: str) -> np.ndarray:
    """What the headers of the files say, as an array of dtype `HEADER`; `content` as in `Side`.

    They are kept in `data.cache_dir`; next time, only files that were added or changed are read.

    With `data.on_error=skip`, the headers of files without a usable one are zeros.

    Raises:
        BadHeadersError: files have no readable header or are too large.
    """
    headers = np.zeros(len(files), HEADER)
    if not files:
        return headers
    stamps = in_threads(_stamp, files, "looking at files") if data.check_files else None
    kind = f"{common_folder(files)} {data.max_pixels} {content} {data.ignore_index} {HEADER}"
    kept = Path(data.cache_dir, f"index-{hashlib.sha256(os.fsencode(kind)).hexdigest()[:16]}.npz")
    broken = {}
    with one_process_if_possible(kept) as reason:
        can_keep = reason is None
        if reason:
            log.warning(NOT_KEPT, kept.parent, reason)
        parts = _parts_of(kept)
        is_known = np.zeros(len(files), bool)
        for part in (kept, *parts):
            is_known |= _fill_with_kept(headers, part, files, stamps)
        unread = np.flatnonzero(~is_known)
        if not len(unread):
            return headers
        for some_unread in np.split(unread, range(AT_ONCE, len(unread), AT_ONCE)):
            named = [files[i] for i in some_unread]
            answers = in_threads(
                lambda path: header_or_reason(path, data, content), named, "reading headers"
            )
            for i, answer in zip(some_unread, answers, strict=True):
                if isinstance(answer, Header):
                    headers[i], is_known[i] = tuple(answer), True
                else:
                    broken[files[i]] = answer
            now_known = some_unread[is_known[some_unread]]
            # If this is stopped, it goes on from here.
            if can_keep and len(unread) > AT_ONCE and len(now_known):
                parts.append(kept.with_suffix(f".{len(parts)}{PART}"))
                can_keep = _keep(parts[-1], files, headers, now_known)
        if can_keep and is_known.any() and _keep(kept, files, headers, np.flatnonzero(is_known)):
            for part in parts:
                part.unlink(missing_ok=True)
    if broken and data.on_error != "skip":
        raise BadHeadersError(broken, len(files))
    return headers


def _parts_of(kept: Path) -> list[Path]:
    """Those that a reading of headers that was stopped has left."""
    return sorted(kept.parent.glob(f"{kept.stem}.*{PART}"))


def _keep(kept: Path, files: list[str], headers: np.ndarray, rows: np.ndarray) -> bool:
    """Write these files' headers; whether there was room for them."""
    names = "\0".join(files[i] for i in rows)
    unfinished = kept.with_suffix(f".{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, names=np.frombuffer(os.fsencode(names), np.uint8), headers=headers[rows])
        unfinished.rename(kept)
    except OSError as error:  # a full disk
        log.warning(NOT_KEPT, kept.parent, error)
        unfinished.unlink(missing_ok=True)
        return False
    return True


def header_or_reason(path: str, data: DataConfig, content: str) -> Header | str:
    """What the header says, or why it cannot be used."""
    max_pixels = data.max_pixels
    num_bytes, modified_ns = _stamp(path)
    try:
        header = read_tiff_header(path) if content == "stored" else read_photo_header(path)
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


def read_photo_header(path: str) -> Header:
    """Header of a file that shall become 8-bit RGB, whatever it holds.

    Raises:
        OSError: the file cannot be read or is no image.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(JPEG_HEADER_BYTES)
        if not start:
            raise OSError("empty file")
        if not start.startswith(jpeg.START):
            return _header_by_pillow(path)
        file.seek(-len(JPEG_END), os.SEEK_END)
        ends = file.read() == JPEG_END
    if JPEG_TAGS not in start:  # which may hold an orientation
        with suppress(ValueError, KeyError):  # damaged or longer than what was read
            height, width, *_ = simplejpeg.decode_jpeg_header(start, strict=False)
            return Header(height, width, 3, 8, ends=ends)
    return _header_by_pillow(path)._replace(ends=ends)


def _header_by_pillow(path: str) -> Header:
    """Of an image in any format; ten times slower."""
    with open(path, "rb") as file, Image.open(file) as image:
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags = Image.Image.getexif(image)
        if image.format == "PNG" and ORIENTATION not in tags:
            tags.load(png.exif(file))
        orientation = tags.get(ORIENTATION, 1)
        if orientation not in range(1, 9):
            orientation = 1  # as decoders see it
        size = image.size
        if image.format == "TIFF":  # whose size Pillow may have turned already
            size = tuple(image.tag_v2[tag] for tag in TIFF_SIZE)  # type: ignore[attr-defined]
        height, width = size if orientation >= 5 else reversed(size)
        return Header(height, width, 3, 8, orientation)


def read_tiff_header(path: str | BinaryIO) -> Header:
    """Header of a TIFF whose channels shall be kept as they are.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no TIFF, or holds something else than one image of 8 or 16 bits.
    """
    from tifffile import TiffFile

    with TiffFile(path) as tiff:
        page = tiff.pages.first
        if len(tiff.pages) != 1:
            raise ValueError(f"has {len(tiff.pages)} pages; split it into files of one page")
        if page.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
        planar = page.planarconfig == 2 and page.samplesperpixel > 1
        is_native = page.dtype == np.uint8 or tiff.byteorder == "<"
        return Header(
            height=page.imagelength,
            width=page.imagewidth,
            channels=page.samplesperpixel,
            bits=8 * page.dtype.itemsize,
            raw_offset=page.dataoffsets[0]
            if page.is_contiguous and not planar and is_native
            else -1,
            dali_reads=not planar,
        )


def read_mask(path: str, header: Header, ignore_index: int) -> Header:
    """The header with what only the pixels of a mask tell."""
    indices = decode_mask(Path(path).read_bytes(), header.orientation)
    height, width, _ = indices.shape
    counted = indices[indices != ignore_index]
    return header._replace(
        height=height,
        width=width,
        channels=1,
        bits=8 * indices.itemsize,
        highest=int(counted.max()) if counted.size else -1,
    )


def one_process_at_a_time(path: Path) -> FileLock:
    """Lock among the processes of this machine; the empty file `path`.lock stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


@contextmanager
def one_process_if_possible(path: Path) -> Iterator[Exception | None]:
    """Lock as above, or why there is none, such as a folder that is read-only or full."""
    with ExitStack() as stack:
        try:
            stack.enter_context(one_process_at_a_time(path))
        except (OSError, NotImplementedError) as error:
            yield error
        else:
            yield None


def some(names: "set[str] | list[str]") -> str:
    """Up to ten of the names, sorted."""
    more = len(names) - NAMED_IN_ERRORS
    return ", ".join(sorted(names)[:NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _fill_with_kept(
    headers: np.ndarray, kept: Path, files: list[str], stamps: list[Stamp] | None
) -> np.ndarray:
    """Fill in the kept headers of files that did not change; (N,) bool: which these are."""
    try:
        with np.load(kept) as arrays:
            names, kept_headers = arrays["names"], arrays["headers"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        # There is none, or the machine went down before it was whole on the disk.
        return np.zeros(len(files), bool)
    if not len(kept_headers):
        return np.zeros(len(files), bool)
    row_of = {name: row for row, name in enumerate(os.fsdecode(names.tobytes()).split("\0"))}
    rows = np.array([row_of.get(name, -1) for name in files])
    known, is_known = kept_headers[rows], rows >= 0
    if stamps is not None:
        now = np.array(stamps)
        is_known &= (known["num_bytes"] == now[:, 0]) & (known["modified_ns"] == now[:, 1])
    headers[is_known] = known[is_known]
    return is_known


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(os.stat(path))
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0


def in_threads(answer: Callable[[T], R], questions: Sequence[T], what: str) -> list[R]:
    """The answers, with a progress bar once it takes more than two seconds."""
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    bar = {"desc": what, "unit": "x256", "delay": 2, "leave": False}
    answers = thread_map(lambda part: list(map(answer, part)), parts, max_workers=32, **bar)
    return list(chain.from_iterable(answers))
