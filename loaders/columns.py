"""The index of a data set as columns in files, which `python -m loaders.index` writes once.

A start maps the columns into memory, shared by all processes of the machine, and reads of them what it
needs. What is known of whole columns is written beside them.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import DataConfig
from loaders.headers import in_threads, some
from loaders.index import Index
from loaders.paths import Paths
from loaders.shards import Shards
from loaders.shared import mapped
from loaders.targets import describe_target, target_of

SPLITS = ("train", "val")
SETTINGS = (
    "layout",
    "input_dir",
    "target_dir",
    "table",
    "path_column",
    "label_columns",
    "label_kind",
    "num_classes",
    "ignore_index",
    "val_fraction",
    "val_count",
    "split_seed",
)
"""Keys of `data` that decide which samples there are, and what is known of them."""
FORMAT = 1  # changes when what an index on disk holds does


def settings_of(data: DataConfig, keys: tuple[str, ...] = SETTINGS) -> dict[str, Any]:
    return {key: getattr(data, key) for key in keys}


def differences(data: DataConfig, settings: dict[str, Any]) -> str:
    """`data.val_count=5 (there: 6)` for each of the settings that `data` has otherwise."""
    wanted = settings_of(data, tuple(settings))
    return ", ".join(
        f"data.{key}={wanted[key]} (there: {there})"
        for key, there in settings.items()
        if wanted[key] != there
    )


def write_index(indexes: dict[str, Index], data: DataConfig, out: Path) -> None:
    """Write the index of each split into the folder `out`; what is there of an older one is replaced.

    Raises:
        ValueError: `out` holds something else, or the data set is not made of image files.
    """
    if out.exists() and not (out / "index.json").exists():
        raise ValueError(f"{out} holds no index; choose another out=DIR")
    unfinished, old = (out.with_name(f"{out.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    try:
        for split, index in indexes.items():
            if not index.files:
                raise ValueError(
                    f"data={data.layout} is not made of image files and needs no index"
                )
            write_columns(index, unfinished / split, data.root)
        about = {"format": FORMAT, "settings": settings_of(data)}
        (unfinished / "index.json").write_text(json.dumps(about, indent=2, default=list) + "\n")
        if out.exists():  # whoever has mapped its columns keeps them
            out.rename(old)
        unfinished.rename(out)
    finally:
        for folder in (unfinished, old):
            shutil.rmtree(folder, ignore_errors=True)


def open_index(data: DataConfig) -> tuple[Index, Index]:
    """Index of the training and of the validation split from the folder `data.index`.

    Raises:
        FileNotFoundError: there is no finished index.
        ValueError: it was made with other settings, or (unless `data.check_files` is off) files have
            changed since.
    """
    folder = Path(str(data.index))
    again = f"python -m loaders.index data={data.layout} data.root={data.root} out={folder}"
    if not (folder / "index.json").is_file():
        raise FileNotFoundError(f"data.index={folder} is no index; make it: {again}")
    about = json.loads((folder / "index.json").read_text())
    if about["format"] != FORMAT:
        raise ValueError(f"data.index={folder} was made by another version; make it again: {again}")
    if differing := differences(data, about["settings"]):
        raise ValueError(
            f"data.index={folder} was made with other settings: {differing}; use those, or make "
            "another one"
        )
    train, val = (open_columns(folder / split, data.root) for split in SPLITS)
    for index in (train, val) if data.check_files else ():
        parts = np.array_split(np.arange(len(index)), -(-len(index) // 256))
        found = in_threads(index.changed, parts, "looking at files")
        changed = [why for reasons in found for why in reasons.values()]
        if changed and data.on_error == "raise":
            raise ValueError(
                f"{len(changed)} samples of {index.name} are not what data.index={folder} knows: "
                f"{some(changed)}; make it again: {again}"
            )
    return train, val


def write_columns(index: Index, folder: Path, root: str) -> None:
    """Write an index of files, which lie below `root`, and what is known of its columns."""
    folder.mkdir(parents=True)
    columns = {"sizes": index.sizes.astype(np.int32), "distinct_sizes": index.distinct_sizes}
    columns["doubtful"] = index.doubtful
    if (values := getattr(index.target, "values", None)) is not None:
        columns["values"] = values
    for number, (paths, headers) in enumerate(zip(index.files, index.headers, strict=True)):
        columns |= {f"names-{number}": paths.names, f"ends-{number}": paths.ends}
        columns[f"headers-{number}"] = headers
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
    facts = {
        "name": index.name,
        "channels": index.channels,
        "dtype": index.dtype,
        "as_stored": index.as_stored,
        "resized": index.resized,
        "left_out": index.left_out,
        "target": describe_target(index.target),
        "folders": [os.path.relpath(paths.folder or ".", root) for paths in index.files],
        "known": {name: getattr(index, name) for name in ("can_copy", "dali_reads", "fingerprint")},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def open_columns(folder: Path, root: str, shards: Shards | None = None) -> Index:
    """The index that `write_columns` wrote; its files may lie below another `root` by now, or in shards."""
    facts = json.loads((folder / "facts.json").read_text())
    columns = {path.stem: mapped(path) for path in folder.glob("*.npy")}
    index = Index(
        name=facts["name"],
        sizes=columns["sizes"],
        channels=facts["channels"],
        target=target_of(facts["target"], columns.get("values")),
        dtype=facts["dtype"],
        files=tuple(
            Paths(
                os.path.join(os.path.normpath(os.path.join(root, below)), ""),
                columns[f"names-{side}"],
                columns[f"ends-{side}"],
            )
            for side, below in enumerate(facts["folders"])
        ),
        headers=tuple(columns[f"headers-{side}"] for side in range(len(facts["folders"]))),
        as_stored=facts["as_stored"],
        resized=facts["resized"],
        shards=shards,
        left_out=tuple(facts["left_out"]),
    )
    # Not to be worked out again from whole columns.
    vars(index).update(facts["known"], **{k: columns[k] for k in ("distinct_sizes", "doubtful")})
    return index
