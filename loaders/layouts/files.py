"""What the layouts that consist of image files share: finding, splitting and checking them."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.index import Index
from loaders.paths import paths_of
from loaders.targets import Labels, Numbers, SeveralLabels, Target

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")
VALIDATION_FOLDERS = ("val", "test")
GENERATOR = Path(__file__).parents[1] / "generate.py"


def or_generate(arguments: str) -> str:
    """The advice to make data of the same kind; empty in a project, which has no generator."""
    advice = f", or make data of the same kind: python -m loaders.generate {arguments}"
    return advice if GENERATOR.exists() else ""


def split_folders(root: Path) -> list[Path]:
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


def refuse_to_fill(root: Path, *own: str) -> None:
    """Raises ValueError if a download into `root` would come beside other files than the `own` ones."""
    others = (
        {path.name for path in root.iterdir()} - {*own, "download.lock"} if root.is_dir() else ()
    )
    if others:
        raise ValueError(
            f"data.root={root} holds other files ({min(others)}), and nothing is downloaded into "
            f"{root}; set data.root to the data set's folder, or to a new one"
        )


def split_by_seed(count: int, data: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Sorted positions of the training and of the validation samples."""
    num_val = data.val_count if data.val_count is not None else round(count * data.val_fraction)
    if not 0 < num_val < count:
        raise ValueError(
            f"a validation split of {num_val} of {count} samples leaves one split empty; set "
            "data.val_fraction or data.val_count"
        )
    order = np.random.Generator(np.random.Philox(key=data.split_seed)).permutation(count)
    return np.sort(order[num_val:]), np.sort(order[:num_val])


def folders_in(folder: Path) -> Iterator[str]:
    """Names of the folders in a folder; hidden ones are left out."""
    with os.scandir(folder) as entries:
        yield from (e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def images_below(folder: Path) -> list[str]:
    """Sorted paths of all images below a folder, if there is one; hidden ones are left out."""
    found: list[str] = []
    # Each folder with the places on disk of those around it, itself included.
    pending = [(str(folder), _places_around(folder))] if os.path.isdir(folder) else []
    while pending:
        current, around = pending.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    place = _place(entry.stat())
                    if place in around:
                        raise ValueError(
                            f"{entry.path} is one of its own parent folders, through a link; remove the link"
                        )
                    pending.append((entry.path, around | {place}))
                elif entry.name.lower().endswith(IMAGE_ENDINGS) and not _is_special(entry.path):
                    found.append(entry.path)
    return sorted(found)


def _places_around(folder: Path) -> frozenset[tuple[int, int]]:
    """Where a folder and its parents lie on disk."""
    resolved = folder.resolve()
    return frozenset(_place(path.stat()) for path in (resolved, *resolved.parents))


def _place(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _is_special(path: str) -> bool:
    """Whether it is a device or a pipe, which would be waited for; a link to nowhere is a broken image."""
    return os.path.exists(path) and not os.path.isfile(path)


def file_index(
    name: str,
    files: tuple[list[str], ...],
    headers: tuple[np.ndarray, ...],
    target: Target,
    as_stored: bool = False,
) -> Index:
    """Index of image files whose inputs all have the same kind of pixels.

    A sample with a file whose header is all zeros is left out (`data.on_error=skip`).
    """
    is_good = np.all([side["height"] > 0 for side in headers], axis=0)
    left_out = tuple(files[0][i] for i in np.flatnonzero(~is_good))
    if left_out:
        files = tuple([side[i] for i in np.flatnonzero(is_good)] for side in files)
        headers = tuple(side[is_good] for side in headers)
        if isinstance(target, Labels | SeveralLabels | Numbers):
            target = replace(target, values=target.values[is_good])
    if not files[0]:
        raise ValueError(f"{name} has no images; expected files like {', '.join(IMAGE_ENDINGS)}")
    kinds = headers[0][["channels", "bits"]]
    channels, bits = kinds[0].item()
    wrong = np.flatnonzero(kinds != kinds[0])
    if len(wrong):
        other = kinds[wrong[0]]
        raise ValueError(
            f"{len(wrong)} of {len(files[0])} images of {name} are of another kind than {files[0][0]} "
            f"with {channels} channels of {bits} bits, such as {files[0][wrong[0]]} with "
            f"{other['channels']} channels of {other['bits']} bits; use images of one kind"
        )
    return Index(
        name=name,
        sizes=np.stack([headers[0]["height"], headers[0]["width"]], axis=1),
        channels=channels,
        target=target,
        dtype=f"uint{bits}",
        files=tuple(map(paths_of, files)),
        headers=headers,
        as_stored=as_stored,
        left_out=left_out,
    )
