"""Decode every file of a data set and list those that are broken.

    python -m loaders.check data=imagefolder data.root=photos out=bad.txt
    python train.py data=imagefolder data.root=photos data.leave_out=bad.txt

The exit code is 1 if any is broken. `out=FILE` also writes their paths, one a line.
"""

import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from conf.cli import load_config, parse_options, user_errors
from conf.errors import counted
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import BadFileError, Index, ReadError
from loaders.layouts import open_index
from loaders.limits import cpus_per_rank, map_in_threads


def check(data: DataConfig) -> tuple[int, dict[str, str]]:
    """Decode all images that training and validation read, compare the palettes of masks, and
    print `Index.notes`; return the number of files, and the reasons by place why some are broken.
    """
    indexes = [*open_index(replace(data, on_error="skip")).values()]
    for line in indexes[0].notes:
        print(line)
    problems = {path: reason for index in indexes for path, reason in index.left_out.items()}
    images = [
        (index, sample, side)
        for index in indexes
        for sample in range(len(index))
        for side in range(len(index.sides))
    ]
    num_files = len(problems) + len(images)
    reasons = map_in_threads(_reason_of, images, "decoding", cpus_per_rank())
    for (index, sample, side), reason in zip(images, reasons, strict=True):
        if reason:
            problems[index.place_of(sample, side)] = reason
    if indexes[0].target.kind == "masks":
        # A project without masks has nothing of them.
        problems |= import_module("loaders.layouts.masks").other_palettes(indexes, problems)
    return num_files, problems


def _reason_of(image: tuple[Index, int, int]) -> str:
    """Return why an image (index, sample, side) is broken, or nothing."""
    index, sample, side = image
    try:
        index.read(sample, side)
    except (BadFileError, ReadError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return reason_of(cause, index.place_of(sample, side))
    return ""


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=FILE`."""
    options, overrides = parse_options(__doc__, sys.argv[1:], out="")
    num_files, problems = check(load_config(overrides).data)
    if options["out"]:
        lines = "".join(f"{path}\n" for path in problems)
        Path(options["out"]).write_text(lines, errors="surrogateescape")
    for path, reason in problems.items():
        # Names that are not UTF-8 cannot be printed.
        print(os.fsencode(f"{path}: {reason}").decode(errors="backslashreplace"))
    print(f"decoded {counted(num_files, 'file')}, found {counted(len(problems), 'problem')}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    with user_errors():
        main()
