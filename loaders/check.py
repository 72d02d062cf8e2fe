"""Decode every file of a data set and list those that are broken.

    python -m loaders.check data=imagefolder data.root=photos out=broken.json

The exit code is 1 if any is broken. `out=FILE` also writes the list as JSON: `{"files": 3,
"broken": [{"path": "photos/a/2.jpg", "reason": "empty file"}]}`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from conf.cli import load_config, user_errors
from conf.credentials import masked
from conf.options import parse_options
from conf.schema import DataConfig
from loaders.images import HEADER, decode, reason_of
from loaders.index import (
    VALIDATION_FOLDERS,
    BadFileError,
    BadHeadersError,
    Index,
    header_or_reason,
    images_below,
    read_table,
)
from loaders.limits import cpus_per_rank
from loaders.open import open_splits
from loaders.read import read_image


def check(data: DataConfig) -> tuple[int, dict[str, str]]:
    """Return the number of files, and the reasons by path why files are broken.

    Errors of the index that do not concern single files, such as images without a partner, are
    listed under the path of the data set, and files in shards under their shard and number.
    """
    problems: dict[str, str] = {}
    files: list[str] | None = None
    try:
        indexes = open_splits(data)
        if indexes[0].shards is not None:
            images = [
                (index, sample, side)
                for index in indexes
                for sample in index.storage_order
                for side in range(len(index.sides))
            ]
            return _check_all(shard_problem, images)
        if not indexes[0].files:
            files = []  # no image files
    except BadHeadersError:
        pass  # these files are found again below
    except (ValueError, OSError) as error:
        if "://" not in data.root and not Path(data.root).is_dir():
            raise
        problems[masked(data.root)] = masked(str(error))
    if data.layout == "table" and not problems:  # part: table
        files = [os.path.join(data.root, path) for path in read_table(data).cells[data.path_column]]
    if files is None:
        files = images_below(Path(data.root))
    num_files, found = _check_all(partial(file_problem, data), files)
    return num_files, problems | found


def file_problem(data: DataConfig, path: str) -> tuple[str, str] | None:
    """Return the path of a broken file and the reason."""
    content = "stored" if data.layout == "cells" else "rgb"
    if data.layout == "masks":  # part: masks
        splits = ("", "train", *VALIDATION_FOLDERS)
        folders = [Path(data.root, split, data.target_dir) for split in splits]
        if any(map(Path(path).is_relative_to, folders)):
            content = "indices"
    header = header_or_reason(path, data, content)
    if isinstance(header, str):
        return path, header
    try:
        decode(Path(path).read_bytes(), np.array([tuple(header)], HEADER)[0], content)
    except Exception as error:  # damaged bytes make decoders raise errors of any type
        return path, reason_of(error, path)
    return None


def shard_problem(image: tuple[Index, int, int]) -> tuple[str, str] | None:
    """Return the shard and number of a broken image (index, sample, side) and the reason."""
    try:
        read_image(*image)
    except BadFileError as error:
        place, _, reason = str(error).partition(" cannot be decoded ")
        return place, reason
    return None


def _check_all(
    problem_of: Callable[[Any], tuple[str, str] | None], jobs: Sequence[Any]
) -> tuple[int, dict[str, str]]:
    with ThreadPoolExecutor(cpus_per_rank()) as pool:
        problems = tqdm(pool.map(problem_of, jobs), total=len(jobs), desc="decoding")
        return len(jobs), dict(filter(None, problems))


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=FILE`."""
    options, overrides = parse_options(__doc__, sys.argv[1:], out="")
    data = load_config(overrides).data
    num_files, problems = check(data)
    if options["out"]:
        broken = [{"path": path, "reason": reason} for path, reason in problems.items()]
        report = {"files": num_files, "broken": broken}
        Path(options["out"]).write_text(json.dumps(report, indent=2) + "\n")
    for path, reason in problems.items():
        # Names that are not UTF-8 cannot be printed.
        print(os.fsencode(f"{path}: {reason}").decode(errors="backslashreplace"))
    print(f"{num_files} files were decoded, {len(problems)} problems were found")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    with user_errors():
        main()
