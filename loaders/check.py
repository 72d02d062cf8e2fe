"""Decode every file of a data set and list those that are broken.

    python -m loaders.check data=imagefolder data.root=photos out=bad.txt
    python train.py data=imagefolder data.root=photos data.leave_out=bad.txt

The exit code is 1 if any is broken. `out=FILE` also writes their paths, one a line.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from conf.cli import load_config, user_errors
from conf.errors import UserError, counted
from conf.options import parse_options
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import BadFileError, Index, ReadError
from loaders.limits import cpus_per_rank
from loaders.open_index import open_index


def check(data: DataConfig) -> tuple[int, dict[str, str]]:
    """Decode all images that training and validation read, compare the palettes of masks, and
    print `Index.notes`.

    Returns:
        The number of files, and the reasons by place why files are broken.

    Raises:
        UserError: as `open_index`, for what does not concern single files.
    """
    indexes = [*open_index(replace(data, on_error="skip")).values()]
    for line in indexes[0].notes:
        print(line)
    problems = {path: reason for index in indexes for path, reason in index.left_out.items()}
    images = [
        (index, sample, side)
        for index in indexes
        for sample in index.source.storage_order(len(index))
        for side in range(len(index.sides))
    ]
    num_files = len(problems) + len(images)
    with ThreadPoolExecutor(cpus_per_rank()) as pool:
        found = tqdm(pool.map(_problem_of, images), total=len(images), desc="decoding")
        problems |= dict(filter(None, found))
    return num_files, _other_colours(indexes, data) | problems


def _problem_of(image: tuple[Index, int, int]) -> tuple[str, str] | None:
    """Return the place of a broken image (index, sample, side) and the reason."""
    index, sample, side = image
    try:
        index.read(sample, side)
    except (BadFileError, ReadError) as error:
        place = index.source.place(sample, side)
        return place, reason_of(error.__cause__ or error, place)  # type: ignore[arg-type]
    return None


def _other_colours(indexes: list[Index], data: DataConfig) -> dict[str, str]:
    """Return the places of masks whose palettes give an index another colour than a mask before,
    and the reasons: if each has a palette of its own colours, the indices mean different things."""
    colours: dict[int, tuple[tuple[int, ...], str]] = {}
    problems = {}
    for index in indexes:
        is_mask = index.sides[-1].content == "indices"
        for sample in index.source.storage_order(len(index)) if is_mask else ():
            place = index.source.place(sample, 1)
            for number, colour in enumerate(_palette_of(index, sample)):
                other, where = colours.setdefault(number, (colour, place))
                if colour != other and number != vars(data)["ignore_index"]:
                    problems[place] = (
                        f"the index {number} has the colour {colour}, but {other} in {where}; "
                        "store the masks with one palette, or without any"
                    )
    return problems


def _palette_of(index: Index, sample: int) -> list[tuple[int, ...]]:
    """Return the colours of a mask's indices, if it is a PNG with a palette, which may hold
    anything above the highest index."""
    palette, num_used = b"", 0
    with suppress(UserError, OSError):  # decoding names them
        content = BytesIO(index.source.content(sample, 1))
        with Image.open(content, formats=["PNG"]) as image:
            if image.palette:
                palette = bytes(image.palette.palette)
                num_used = 1 + int(index.read(sample, 1).max())
    size = min(len(palette) // 3, num_used)
    return [tuple(palette[3 * number :][:3]) for number in range(size)]


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=FILE`."""
    options, overrides = parse_options(__doc__, sys.argv[1:], out="")
    data = load_config(overrides).data
    num_files, problems = check(data)
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
