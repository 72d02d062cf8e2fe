"""What samples there are: found and checked once, before any backend runs."""

import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock
from PIL import Image
from tqdm import tqdm

from loaders.decode import Header, decode, read_photo_header, read_tiff_header, reason_of

if TYPE_CHECKING:
    from conf.schema import DataConfig

log = logging.getLogger(__name__)

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")
VALIDATION_FOLDERS = ("val", "test")
NAMED_IN_ERRORS = 10
CALTECH256 = "caltech256/256_ObjectCategories"


class BadFileError(OSError):
    """A file that cannot be decoded; the message names it and the reason."""


class BadHeadersError(ValueError):
    """Files without a header that can be used; the message names the first ten."""


@dataclass(frozen=True)
class Index:
    """The samples of one split.

    `images` holds them all in memory, or `files` names them, or `packed` holds them.
    """

    name: str
    """Data set and split, for messages, such as `mnist_mini/train`."""

    sizes: np.ndarray
    """(N, 2) int32: height and width of each (input) image in pixels, upright."""

    channels: int
    """Channels of each image."""

    labels: np.ndarray | None = None
    """(N,) int64: class of each sample, in [0, num_classes); None where the targets are images."""

    num_classes: int | None = None
    """Number of classes; None where the targets are images."""

    images: np.ndarray | None = None
    """(N, height, width, channels) uint8."""

    packed: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    """For images and, for pairs, targets: flat pixels of `dtype`, and (N,) where each image starts."""

    files: tuple[list[str], ...] = ()
    """Paths of the samples' images; for pairs, also those of their targets."""

    headers: tuple[np.ndarray, ...] = ()
    """For each list of `files`, what the headers say: arrays of dtype `HEADER`."""

    scales: tuple[int, ...] = (1,)
    """Height and width of the images and, for pairs, of their targets, divided by those of the image."""

    dtype: str = "uint8"
    """`uint8` or `uint16`: type of the pixels."""

    resized: bool = False
    """Whether `data.resize` was applied already."""

    as_stored: bool = False
    """Whether the channels are those of the file; otherwise every image becomes 8-bit RGB."""

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, sample: int, side: int = 0, num_lines: int | None = None) -> np.ndarray:
        """(height, width, channels) of dtype `dtype`: a sample's image, or with `side=1` its target.

        With `num_lines`, lines below so many may be missing.

        Raises:
            BadFileError: the file cannot be decoded.
            OSError, MemoryError: there are no file handles or no memory left.
        """
        if self.images is not None:
            return self.images[sample]
        if self.packed:
            pixels, starts = self.packed[side]
            height, width = (self.scales[side] * int(size) for size in self.sizes[sample])
            image = pixels[starts[sample] : starts[sample] + height * width * self.channels]
            return image.reshape(height, width, self.channels)
        path, header = self.files[side][sample], self.headers[side][sample]
        try:
            return decode(path, header, self.as_stored, num_lines)
        except Exception as error:
            raise BadFileError(
                f"{path} cannot be decoded ({reason_of(error, path)}); repair or remove it"
            ) from error

    @property
    def is_raw(self) -> bool:
        """Whether every file holds its pixels uncompressed, interleaved and in one piece."""
        return self.as_stored and all((header["raw_offset"] >= 0).all() for header in self.headers)

    def read_raw(self, sample: int, image: np.ndarray) -> None:
        """Fill the contiguous `image` with the pixels of a raw file.

        Raises:
            BadFileError: the file is gone or cut short.
            OSError: there are no file handles left.
        """
        path = self.files[0][sample]
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(self.headers[0]["raw_offset"][sample])
                is_whole = file.readinto(image.data) == image.nbytes
        except OSError as error:
            raise BadFileError(
                f"{path} cannot be decoded ({reason_of(error, path)}); repair or remove it"
            ) from error
        if not is_whole:
            raise BadFileError(f"{path} cannot be decoded (it is cut short); repair or remove it")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all that the plan depends on and of the file names: 16 hexadecimal digits."""
        digest = hashlib.sha256(self.sizes.astype(np.int32).tobytes())
        digest.update(f"{self.name} {self.channels} {self.dtype} {self.scales}".encode())
        if self.labels is not None:
            digest.update(self.labels.astype(np.int64).tobytes())
        if self.images is not None:
            digest.update(self.images.tobytes())
        for names in self.files:
            root = _common_folder(names)
            digest.update("\n".join(name.removeprefix(root) for name in names).encode())
        return digest.hexdigest()[:16]


def build_index(data: "DataConfig") -> tuple[Index, Index]:
    """Index of the training and of the validation split.

    Raises:
        ValueError: `data.layout` is unknown, or the files do not have that layout.
        FileNotFoundError: the data is not there; the message says how to get it.
    """
    if data.layout not in LAYOUTS:
        raise ValueError(f"data.layout={data.layout} is unknown; use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[data.layout](data)


def _digits(name: str, images: np.ndarray, labels: np.ndarray) -> Index:
    return Index(
        name=name,
        sizes=np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1)),
        channels=1,
        labels=labels.astype(np.int64),
        num_classes=10,
        images=np.ascontiguousarray(images)[..., None],
    )


def _mnist_mini(data: "DataConfig") -> tuple[Index, Index]:
    path = Path(__file__).parents[1] / "data" / "mnist_mini.npz"
    with np.load(path) as arrays:
        return (
            _digits("mnist_mini/train", arrays["train_images"], arrays["train_labels"]),
            _digits("mnist_mini/val", arrays["val_images"], arrays["val_labels"]),
        )


def _mnist(data: "DataConfig") -> tuple[Index, Index]:
    from torchvision.datasets import MNIST

    try:
        with one_process_at_a_time(Path(data.root) / "download"):
            train, val = (MNIST(data.root, train=train, download=True) for train in (True, False))
    except (RuntimeError, OSError) as error:
        raise FileNotFoundError(
            f"MNIST is not in {data.root} and could not be downloaded ({error}); put "
            "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
            f"t10k-labels-idx1-ubyte.gz into {Path(data.root, 'MNIST', 'raw')}, or use "
            "data=mnist_mini, which needs no download"
        ) from error
    return (
        _digits("mnist/train", train.data.numpy(), train.targets.numpy()),
        _digits("mnist/val", val.data.numpy(), val.targets.numpy()),
    )


def _caltech256(data: "DataConfig") -> tuple[Index, Index]:
    folder = Path(data.root, CALTECH256)
    if not folder.is_dir():
        from torchvision.datasets import Caltech256

        try:
            with one_process_at_a_time(Path(data.root) / "download"):
                Caltech256(data.root, download=True)
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"Caltech-256 is not in {data.root} and could not be downloaded ({error}); unpack "
                f"256_ObjectCategories.tar into {folder.parent}, or make data of the same kind with "
                f"python -m loaders.generate caltech256 --root {folder} --size 3000"
            ) from error
    return _class_folders(data, folder)


def _imagefolder(data: "DataConfig") -> tuple[Index, Index]:
    return _class_folders(data, Path(data.root))


def _cells(data: "DataConfig") -> tuple[Index, Index]:
    return _class_folders(data, Path(data.root), as_stored=True)


def _class_folders(data: "DataConfig", root: Path, as_stored: bool = False) -> tuple[Index, Index]:
    """One folder per class, in `train` and `val` (or `test`) if these exist, else split by seed."""
    splits = _split_folders(root)
    classes = sorted(entry.name for entry in _folders(splits[0]))
    if not classes:
        raise ValueError(f"{splits[0]} has no class folders; expected {splits[0]}/<class>/<image>")
    files: list[list[str]] = []
    labels: list[np.ndarray] = []
    for split in splits:
        unknown = {entry.name for entry in _folders(split)} - set(classes)
        if unknown:
            raise ValueError(
                f"{split} has classes that {splits[0]} does not have: {_some(unknown)}; "
                "remove them or add training images"
            )
        by_class = [sorted(images_below(split / name)) for name in classes]
        empty = [name for name, found in zip(classes, by_class, strict=True) if not found]
        if empty and split == splits[0]:
            raise ValueError(
                f"{split} has {len(empty)} class folders without an image ({', '.join(IMAGE_ENDINGS)}): "
                f"{_some(empty)}; remove the folders or add images"
            )
        files.append([name for found in by_class for name in found])
        labels.append(np.repeat(np.arange(len(classes)), [len(found) for found in by_class]))
    headers = [read_headers(names, data, as_stored) for names in files]
    if len(splits) == 1:
        train, val = _split_by_seed(len(files[0]), data)
        files = [[files[0][i] for i in part] for part in (train, val)]
        headers = [headers[0][part] for part in (train, val)]
        labels = [labels[0][part] for part in (train, val)]
    name = root.name
    train_index, val_index = (
        _file_index(f"{name}/{split}", (paths,), (header,), as_stored, label, len(classes))
        for split, paths, header, label in zip(
            ("train", "val"), files, headers, labels, strict=True
        )
    )
    if (train_index.channels, train_index.dtype) != (val_index.channels, val_index.dtype):
        raise ValueError(
            f"{train_index.name} has {train_index.channels} channels of {train_index.dtype}, but "
            f"{val_index.name} {val_index.channels} of {val_index.dtype}; use images of one kind"
        )
    return train_index, val_index


def _pairs(data: "DataConfig") -> tuple[Index, Index]:
    """Two images that belong together: the same relative path below two folders."""
    root = Path(data.root)
    splits = _split_folders(root)
    pairs = [_pairs_below(split, data) for split in splits]
    headers = [
        [read_headers(list(side), data, as_stored=False) for side in zip(*split, strict=True)]
        for split in pairs
    ]
    if len(splits) == 1:
        parts = _split_by_seed(len(pairs[0]), data)
        headers = [[side[part] for side in headers[0]] for part in parts]
        pairs = [[pairs[0][i] for i in part] for part in parts]
    train, val = (
        _pair_index(f"{root.name}/{name}", split, inputs, targets)
        for name, split, (inputs, targets) in zip(("train", "val"), pairs, headers, strict=True)
    )
    if train.scales != val.scales:
        raise ValueError(
            f"targets of {train.name} are {train.scales[1]} times as large as their inputs, but "
            f"those of {val.name} {val.scales[1]} times; use one factor for both"
        )
    return train, val


def _pairs_below(folder: Path, data: "DataConfig") -> list[tuple[str, str]]:
    sides = []
    for name in (data.input_dir, data.target_dir):
        if not (folder / name).is_dir():
            raise FileNotFoundError(
                f"{folder / name} is not a folder; expected {folder}/{data.input_dir} and "
                f"{folder}/{data.target_dir} (data.input_dir and data.target_dir)"
            )
        # By path without the ending: an input may be a JPEG and its target a PNG.
        found = sorted(images_below(folder / name))
        by_stem = {
            os.path.splitext(os.path.relpath(path, folder / name))[0]: path for path in found
        }
        if len(by_stem) < len(found):
            raise ValueError(
                f"{folder / name} has images that differ in their ending only; a partner could not "
                "be told by its name: remove one of each"
            )
        sides.append(by_stem)
    inputs, targets = sides
    alone = sorted(
        [inputs[stem] for stem in inputs.keys() - targets.keys()]
        + [targets[stem] for stem in targets.keys() - inputs.keys()]
    )
    if alone:
        raise ValueError(
            f"{len(alone)} images in {folder} have no partner: {_some(alone)}; add the partners or "
            "remove these"
        )
    if not inputs:
        raise ValueError(
            f"{folder / data.input_dir} has no image; expected {', '.join(IMAGE_ENDINGS)}"
        )
    return [(inputs[stem], targets[stem]) for stem in sorted(inputs)]


def _pair_index(
    name: str, pairs: list[tuple[str, str]], inputs: np.ndarray, targets: np.ndarray
) -> Index:
    scale = int(targets["height"][0] // max(1, inputs["height"][0]))
    wrong = np.flatnonzero(
        (targets["height"] != scale * inputs["height"])
        | (targets["width"] != scale * inputs["width"])
    )
    if scale < 1:
        wrong = np.arange(len(pairs))
    if len(wrong):
        first = wrong[0]
        sizes = [
            f"{header['height'][first]}x{header['width'][first]}" for header in (inputs, targets)
        ]
        factor = f" times {scale}" if scale > 1 else ""
        raise ValueError(
            f"the images of {len(wrong)} pairs do not have the same size{factor}, such as "
            f"{pairs[first][0]} ({sizes[0]}) and {pairs[first][1]} ({sizes[1]}); a target must be as "
            "large as its input, or larger by one whole factor in all pairs"
        )
    files = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return replace(_file_index(name, files, (inputs, targets)), scales=(1, scale))


LAYOUTS: dict[str, Callable[["DataConfig"], tuple[Index, Index]]] = {
    "mnist_mini": _mnist_mini,
    "mnist": _mnist,
    "caltech256": _caltech256,
    "imagefolder": _imagefolder,
    "pairs": _pairs,
    "cells": _cells,
}


def image_folders(data: "DataConfig") -> list[Path]:
    """The folders below which the data set's images lie; none if it does not come as image files."""
    if data.layout in ("mnist_mini", "mnist"):
        return []
    splits = _split_folders(Path(data.root, CALTECH256 if data.layout == "caltech256" else ""))
    if data.layout == "pairs":
        return [split / side for split in splits for side in (data.input_dir, data.target_dir)]
    return [Path(entry.path) for split in splits for entry in _folders(split)]


def _split_folders(root: Path) -> list[Path]:
    """[train, validation], or [root] if there are no such folders."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"data.root={root} is not a folder; set data.root to the data set's folder"
        )
    if not (root / "train").is_dir():
        return [root]
    for name in VALIDATION_FOLDERS:
        if (root / name).is_dir():
            return [root / "train", root / name]
    raise FileNotFoundError(f"{root} has train but neither val nor test beside it; add one of them")


def _split_by_seed(count: int, data: "DataConfig") -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions of the training and of the validation samples."""
    num_val = data.val_count if data.val_count is not None else round(count * data.val_fraction)
    if not 0 < num_val < count:
        raise ValueError(
            f"a validation split of {num_val} of {count} samples leaves one split empty; set "
            "data.val_fraction or data.val_count"
        )
    order = np.random.Generator(np.random.Philox(key=data.split_seed)).permutation(count)
    return np.sort(order[num_val:]), np.sort(order[:num_val])


def _folders(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (e for e in entries if not e.name.startswith(".") and e.is_dir())


def images_below(folder: Path) -> list[str]:
    """Paths of all images below a folder, if there is one; hidden files and folders are left out."""
    found: list[str] = []
    pending = [str(folder)] if os.path.isdir(folder) else []
    while pending:
        current = pending.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if entry.is_symlink() and Path(current).resolve().is_relative_to(
                        Path(entry.path).resolve()
                    ):
                        raise ValueError(
                            f"{entry.path} is a link to one of its own parent folders; remove the link"
                        )
                    pending.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_ENDINGS):
                    found.append(entry.path)
    return found


def _some(names: "set[str] | list[str]") -> str:
    """Up to ten of the names, sorted."""
    listed = ", ".join(sorted(names)[:NAMED_IN_ERRORS])
    return (
        f"{listed} and {len(names) - NAMED_IN_ERRORS} more"
        if len(names) > NAMED_IN_ERRORS
        else listed
    )


T = TypeVar("T")
R = TypeVar("R")

HEADER = np.dtype(
    [
        ("height", "i4"),
        ("width", "i4"),
        ("channels", "i4"),
        ("bits", "i4"),
        ("orientation", "i4"),
        ("raw_offset", "i8"),
        ("dali_reads", "?"),
        ("ends", "?"),
    ]
)


def read_headers(files: list[str], data: "DataConfig", as_stored: bool) -> np.ndarray:
    """What the headers of the files say, as an array of dtype `HEADER`.

    They are kept in `data.cache_dir`; next time, only files that were added or changed are read.

    Raises:
        BadHeadersError: files have no readable header or are too large.
    """
    headers = np.zeros(len(files), HEADER)
    if not files:
        return headers
    stamps = np.array(_in_threads(_stamp, files, "looking at files"))
    kind = f"{_common_folder(files)} {data.max_pixels} {as_stored} {HEADER}"
    kept = Path(data.cache_dir, f"index-{hashlib.sha256(kind.encode()).hexdigest()[:16]}.npz")
    with one_process_at_a_time(kept):
        is_known = _fill_with_kept(headers, kept, files, stamps)
        unread = np.flatnonzero(~is_known).tolist()
        if not unread:
            return headers
        answers = _in_threads(
            lambda i: header_or_reason(files[i], data.max_pixels, as_stored),
            unread,
            "reading headers",
        )
        broken = []
        for i, answer in zip(unread, answers, strict=True):
            if isinstance(answer, Header):
                headers[i], is_known[i] = tuple(answer), True
            else:
                broken.append(f"{files[i]} ({answer})")
        if is_known.any():
            names = "\0".join(files[i] for i in np.flatnonzero(is_known))
            unfinished = kept.with_suffix(f".{os.getpid()}.tmp")
            with unfinished.open("wb") as file:
                np.savez(
                    file,
                    names=np.frombuffer(os.fsencode(names), np.uint8),
                    stamps=stamps[is_known],
                    headers=headers[is_known],
                )
            unfinished.rename(kept)
    if broken:
        raise BadHeadersError(
            f"{len(broken)} of {len(files)} files cannot be used: {_some(broken)}; repair or remove them"
        )
    return headers


def _fill_with_kept(
    headers: np.ndarray, kept: Path, files: list[str], stamps: np.ndarray
) -> np.ndarray:
    """Fill in the kept headers of files that did not change; (N,) bool: which these are."""
    try:
        with np.load(kept) as arrays:
            names, kept_stamps, kept_headers = (
                arrays[key] for key in ("names", "stamps", "headers")
            )
    except (OSError, EOFError, ValueError, BadZipFile):
        # There is none, or the machine went down before it was on the disk.
        return np.zeros(len(files), bool)
    row_of = {name: row for row, name in enumerate(os.fsdecode(names.tobytes()).split("\0"))}
    rows = np.array([row_of.get(name, -1) for name in files])
    is_known = (rows >= 0) & (kept_stamps[rows] == stamps).all(axis=1)
    headers[is_known] = kept_headers[rows[is_known]]
    return is_known


def _in_threads(answer: Callable[[T], R], questions: list[T], what: str) -> list[R]:
    """The answers, with a progress bar once it takes more than two seconds."""
    answers: list[R] = []
    parts = [questions[start : start + 256] for start in range(0, len(questions), 256)]
    with (
        ThreadPoolExecutor(32) as pool,
        tqdm(total=len(questions), desc=what, delay=2, leave=False) as progress,
    ):
        for part in pool.map(lambda part: [answer(question) for question in part], parts):
            answers += part
            progress.update(len(part))
    return answers


def _common_folder(files: list[str]) -> str:
    """The longest path below which all files lie; the first and the last in order tell it."""
    return os.path.commonpath([min(files), max(files)])


def _stamp(name: str) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        stat = os.stat(name)
    except OSError:  # such as a link to nowhere; reading its header will say so
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def header_or_reason(name: str, max_pixels: int, as_stored: bool) -> Header | str:
    """What the header says, or why it cannot be used."""
    try:
        header = read_tiff_header(name) if as_stored else read_photo_header(name)
    except Exception as error:  # damaged bytes make the libraries raise errors of any type
        return reason_of(error, name)
    if header.height * header.width > max_pixels:
        return (
            f"{header.height}x{header.width} pixels are more than data.max_pixels={max_pixels}; "
            "raise it if the file is meant"
        )
    return header


def _file_index(
    name: str,
    files: tuple[list[str], ...],
    headers: tuple[np.ndarray, ...],
    as_stored: bool = False,
    labels: np.ndarray | None = None,
    num_classes: int | None = None,
) -> Index:
    """Index of image files that all have the same kind of pixels."""
    if not files[0]:
        raise ValueError(f"{name} has no images; expected files like {', '.join(IMAGE_ENDINGS)}")
    channels, bits = (int(headers[0][key][0]) for key in ("channels", "bits"))
    wrong = np.flatnonzero((headers[0]["channels"] != channels) | (headers[0]["bits"] != bits))
    if len(wrong):
        other = headers[0][wrong[0]]
        raise ValueError(
            f"{len(wrong)} of {len(files[0])} images of {name} are of another kind than {files[0][0]} "
            f"with {channels} channels of {bits} bits, such as {files[0][wrong[0]]} with "
            f"{other['channels']} channels of {other['bits']} bits; use images of one kind"
        )
    return Index(
        name=name,
        sizes=np.stack([headers[0]["height"], headers[0]["width"]], axis=1),
        channels=channels,
        dtype=f"uint{bits}",
        labels=labels,
        num_classes=num_classes,
        files=files,
        headers=headers,
        as_stored=as_stored,
    )


def one_process_at_a_time(path: Path) -> FileLock:
    """Lock among the processes of this machine; the empty file `path`.lock stays behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{path}.lock")


def as_image_tree(index: Index, cache_dir: str) -> Index:
    """The same samples as PNG files, for backends that read files; written once, then reused.

    The tree is `cache_dir/<name>-<hash of the content>/<class>/<sample>.png`. Of several processes
    that ask at once, one writes and the others wait; a tree that was not finished is never used.
    """
    if index.images is None or index.labels is None:
        return index
    tree = Path(cache_dir, f"{index.name.replace('/', '-')}-{index.fingerprint}").absolute()
    names = [f"{label}/{sample:05d}.png" for sample, label in enumerate(index.labels)]
    with one_process_at_a_time(tree):
        if not tree.exists():
            unfinished = Path(tempfile.mkdtemp(prefix=f"{tree.name}.", dir=tree.parent))
            try:
                for label in np.unique(index.labels):
                    (unfinished / str(label)).mkdir()
                for image, name in zip(index.images, names, strict=True):
                    Image.fromarray(image.squeeze(-1)).save(unfinished / name)
                unfinished.rename(tree)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    headers = np.zeros(len(index), HEADER)
    headers["height"], headers["width"] = index.sizes.T
    headers["channels"], headers["bits"], headers["orientation"] = index.channels, 8, 1
    headers["raw_offset"], headers["dali_reads"], headers["ends"] = -1, True, True
    return replace(index, images=None, files=([str(tree / n) for n in names],), headers=(headers,))
