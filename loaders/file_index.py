"""The index of the layouts that consist of image files."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.columns import Columns
from loaders.files import Files, names_below
from loaders.folders import IMAGE_ENDINGS, describe_others
from loaders.headers import ImageFiles
from loaders.index import Index, new_index
from loaders.splits import parts_of
from loaders.targets import ImageSpec, Target


def index_splits(
    name: str,
    data: DataConfig,
    splits: Collection[str],
    sides: tuple[ImageFiles, ...],
    target: Target,
    counts: dict[str, int],
    labels: np.ndarray | None = None,
) -> dict[str, Index]:
    """Build the index of the training samples and of those that are held out, by split.

    Args:
        name: name of the data set, for messages.
        data: the configuration.
        splits: those that are wanted besides `train`.
        sides, target: files and targets of all samples, those of `train` first.
        counts: number of samples of each split that there is; without `val`, if it is wanted, those
            of `train` are split by seed.
        labels: see `split_by_seed`.
    """
    listed = listed_files(data)
    indexes = {}
    for split, part in parts_of(counts, data, splits, labels).items():
        files = tuple(side.take(part) for side in sides)
        indexes[split] = file_index(f"{name}/{split}", data.root, files, target.take(part), listed)
    train = indexes["train"]
    notes = (*train.notes, *_spellings(target.classes))
    return indexes | {"train": replace(train, notes=notes)}


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


def file_index(
    name: str,
    root: str,
    sides: tuple[ImageFiles, ...],
    target: Target,
    listed: Collection[str] = (),
) -> Index:
    """Build the index of image files, all of which lie below `root`, but for those `listed` and
    those whose headers cannot be used; raise UserError if there are none."""
    is_good = np.all([side.headers["height"] > 0 for side in sides], axis=0)
    left_out = {
        path: side.broken[path] for side in sides for path in side.paths if path in side.broken
    }
    if listed:
        for side in sides:
            is_good &= [os.path.normpath(path) not in listed for path in side.paths]
    good = np.flatnonzero(is_good)
    if not len(good):
        bad = first_few(f"{path} ({reason})" for path, reason in left_out.items())
        raise UserError(
            f"{name} has no images{f' that can be used: {bad}' if bad else ''}; expected files "
            f"like {', '.join(IMAGE_ENDINGS)}"
        )
    first = sides[0].take(good)
    columns, notes = Columns(sizes=first.sizes), describe_others(first.others)
    for number, side in enumerate(sides):
        columns[f"names-{number}"] = names_below(root, side.take(good).paths)
        columns[f"headers-{number}"] = side.headers[good]
    backgrounds = np.concatenate([each["background"] for each in columns.of_sides("headers")])
    clear = backgrounds[backgrounds >= 0]
    if len(clear):
        colour = [*int(clear[0]).to_bytes(3)]
        notes += (f"{len(clear):,} images may be transparent: data.background={colour} shows",)
    channels, bits = first.headers[["channels", "bits"]][0].item()
    inputs = ImageSpec(channels, f"uint{bits}", content=first.content)
    return new_index(name, target.take(good), inputs, Files(columns, root), left_out, notes)
