"""Make the index of a data set and write it as columns.

    python -m loaders.index data=imagefolder data.root=photos out=data/index
    python train.py data=imagefolder data.root=photos data.index=data/index

Started again after it was stopped, the first command goes on with the headers that it has not read yet.
"""

from pathlib import Path

from conf.mistakes import Mistake
from loaders.columns import SPLITS, write_index
from loaders.layouts import LAYOUTS
from loaders.pack import command_line


def main() -> None:
    """Command line: Hydra overrides of the data, and `out=DIR`."""
    options: dict[str, str | None] = {"out": None}
    data = command_line(options).data
    if options["out"] is None:
        raise Mistake("out=DIR is missing: the folder that the index is written to")
    splits = LAYOUTS[data.layout](data)
    write_index(dict(zip(SPLITS, splits, strict=True)), data, Path(options["out"]))
    print(", ".join(f"{len(index):,} samples of {index.name}" for index in splits))


if __name__ == "__main__":
    main()
