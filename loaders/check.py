"""Decode every file of a data set and list those that are broken.

    python -m loaders.check data=imagefolder data.root=photos out=broken.json

Ends with exit code 1 if anything is broken. `out=FILE` also writes the list as JSON: `{"files": 3,
"broken": [{"path": "photos/a/2.jpg", "reason": "empty file"}]}`.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from conf.schema import DataConfig
from loaders.decode import decode, reason_of
from loaders.headers import HEADER, BadHeadersError, header_or_reason
from loaders.index import BadFileError, Index
from loaders.layouts import build_index
from loaders.layouts.files import VALIDATION_FOLDERS, images_below
from loaders.layouts.table import read_table
from loaders.limits import cpus_per_rank
from loaders.pack import command_line


def check(data: DataConfig) -> tuple[int, dict[str, str]]:
    """The number of files, and for each broken one its path and the reason.

    What the index refuses for another reason than single files, such as images without a partner,
    stands under the path of the data set.
    """

    def problem_of(path: str) -> str | None:
        content = "stored" if data.layout == "cells" else "rgb"
        splits = ("", "train", *VALIDATION_FOLDERS)
        folders = [Path(data.root, split, data.target_dir) for split in splits]
        if data.layout == "masks" and any(map(Path(path).is_relative_to, folders)):
            content = "indices"
        header = header_or_reason(path, data, content)
        if isinstance(header, str):
            return header
        try:
            decode(Path(path).read_bytes(), np.array([tuple(header)], HEADER)[0], content)
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            return reason_of(error, path)
        return None

    problems: dict[str, str] = {}
    files: list[str] | None = None
    try:
        indexes = build_index(data)
        if indexes[0].shards is not None:
            return check_shards(indexes)
        if not indexes[0].files:
            files = []  # they do not come as image files
    except BadHeadersError:
        pass  # the first ten of what is found below
    except (ValueError, OSError) as error:
        problems[data.root] = str(error)
    if data.layout == "table" and not problems:
        files = [os.path.join(data.root, path) for path in read_table(data).paths]
    if files is None:
        files = images_below(Path(data.root))
    with ThreadPoolExecutor(cpus_per_rank()) as pool:
        reasons = tqdm(pool.map(problem_of, files), total=len(files), desc="decoding")
        for path, reason in zip(files, reasons, strict=True):
            if reason is not None:
                problems[path] = reason
    return len(files), problems


def check_shards(indexes: tuple[Index, Index]) -> tuple[int, dict[str, str]]:
    """As `check`, for the files in shards; broken ones stand under their shard and number."""
    jobs = [
        (index, sample, side)
        for index in indexes
        for sample in range(len(index))
        for side in range(len(index.sides))
    ]

    def problem_of(job: tuple[Index, int, int]) -> str | None:
        index, sample, side = job
        try:
            index.read(sample, side)
        except BadFileError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(indexes[0].num_readers) as pool:
        found = tqdm(pool.map(problem_of, jobs), total=len(jobs), desc="decoding")
        messages = [message for message in found if message is not None]
    return len(jobs), dict(message.split(" cannot be decoded ", 1) for message in messages)


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=FILE`."""
    options: dict[str, str | None] = {"out": None}
    data = command_line(options).data
    num_files, problems = check(data)
    if options["out"] is not None:
        broken = [{"path": path, "reason": reason} for path, reason in problems.items()]
        report = {"files": num_files, "broken": broken}
        Path(options["out"]).write_text(json.dumps(report, indent=2) + "\n")
    for path, reason in problems.items():
        # A terminal need not take the bytes of a name that is no UTF-8.
        print(os.fsencode(f"{path}: {reason}").decode(errors="backslashreplace"))
    print(f"{num_files} files were decoded, {len(problems)} problems were found")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
