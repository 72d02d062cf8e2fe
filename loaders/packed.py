"""Images that were decoded and resized ahead of time by `python -m loaders.pack`.

A pack is a folder of NumPy files: the pixels of all images of a split one behind another, mapped into
memory, so that reading an image costs a memory copy.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import Config
from loaders import columns
from loaders.columns import SPLITS, differences
from loaders.index import Index
from loaders.layouts import build_index
from loaders.shared import mapped
from loaders.targets import describe_target, target_of

SETTINGS = (*columns.SETTINGS, "resize", "reduced_decoding")
"""Keys of `data` that decide the content of a pack; all others only choose what is done with it."""
FORMAT = 5  # changes when what a pack holds does


def open_pack(cfg: Config) -> tuple[Index, Index]:
    """Index of the training and of the validation split of the pack `loader.pack`.

    Raises:
        FileNotFoundError: there is no finished pack.
        ValueError: the pack was made with other settings, or from data that has changed since.
    """
    assert cfg.loader.pack is not None
    folder = Path(cfg.loader.pack)
    if not (folder / "pack.json").is_file():
        raise FileNotFoundError(
            f"loader.pack={folder} is no finished pack; make it with python -m loaders.pack "
            f"data={cfg.data.layout} data.root={cfg.data.root} out={folder}, or run that again to finish it"
        )
    made = json.loads((folder / "pack.json").read_text())
    if made["format"] != FORMAT:
        raise ValueError(f"{folder} was packed by another version; pack again into another folder")
    if differing := differences(cfg.data, made["settings"]):
        raise ValueError(
            f"{folder} was packed with other settings: {differing}; use those of the pack, or pack again "
            "into another folder"
        )
    if Path(
        cfg.data.root
    ).exists():  # the originals may be gone, but if they are there they must fit
        for index, split in zip(build_index(cfg.data), SPLITS, strict=True):
            if index.fingerprint != made["splits"][split]["fingerprint"]:
                raise ValueError(
                    f"{cfg.data.root} is not what {folder} was made from: the files of {split} differ; "
                    "pack again into another folder"
                )
    return _open_split(folder, made, "train"), _open_split(folder, made, "val")


def describe_split(index: Index) -> dict[str, Any]:
    """What `pack.json` says of a split."""
    return {
        "name": index.name,
        "fingerprint": index.fingerprint,
        "channels": index.channels,
        "dtype": index.dtype,
        "target": describe_target(index.target),
    }


def _open_split(folder: Path, made: dict[str, Any], split: str) -> Index:
    facts = made["splits"][split]
    with np.load(folder / f"{split}.npz") as arrays:
        sizes, offsets = arrays["sizes"], arrays["offsets"]
        target = target_of(facts["target"], arrays.get("values"))
    index = Index(
        name=facts["name"],
        sizes=sizes,
        channels=facts["channels"],
        target=target,
        dtype=facts["dtype"],
        resized=True,
    )
    pixels = [mapped(folder / f"{split}-{side}.npy") for side in range(len(index.sides))]
    starts = [offsets * side.per_pixel for side in index.sides]
    return replace(index, packed=tuple(zip(pixels, starts, strict=True)))
