"""Make the index of a data set and write it as columns.

    python -m loaders.index data=imagefolder data.root=photos out=data/index
    python train.py data=imagefolder data.root=photos \\
        data.index=data/index

If the first command was stopped, start it again: it reads only the headers that are still missing.
"""

import sys
from dataclasses import replace
from pathlib import Path

from conf.cli import load_config, user_errors
from conf.errors import counted
from conf.options import parse_options
from loaders.index.build import SPLITS, open_splits, write_index


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=DIR`."""
    options, overrides = parse_options(__doc__, sys.argv[1:], out=None)
    data = load_config(overrides).data
    splits = open_splits(replace(data, index=None))
    write_index(dict(zip(SPLITS, splits, strict=True)), data, Path(options["out"]))
    for line in splits[0].notes:
        print(line)
    print(", ".join(f"{counted(len(index), 'sample')} of {index.name}" for index in splits))


if __name__ == "__main__":
    with user_errors():
        main()
