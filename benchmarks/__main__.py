"""Measure on this machine, and append the rows to a CSV file.

    python -m benchmarks compare            the loaders beside PIL, torchvision, DALI and others
    python -m benchmarks loop_overhead      the training loop beside a bare one and Lightning's
    python -m benchmarks gpu                loaders and models on one GPU; without one, a dry run
    python -m benchmarks                    the first two

Options: `out=FILE` (default: benchmarks/results/new-cpu.csv or new-gpu.csv), `repeats=3` (9 give
95 % intervals), `seconds=1` (measured time of each figure), `cases=caltech256,cells` (of
`compare`), `rows=dali,alone` (words in the names of the rows of `gpu`). All else are overrides of
the configuration, for `loop_overhead` and `gpu`. `python -m benchmarks.tables FILE` prints tables.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from conf.cli import user_errors
from conf.errors import UserError

NAMES = ("compare", "loop_overhead", "gpu")


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    names = [argument for argument in arguments if "=" not in argument]
    options = {"out": "", "repeats": "3", "seconds": "1", "cases": "", "rows": ""}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key in options and equals:
            options[key] = value
        elif equals:
            overrides.append(argument)
    for name in names:
        if name not in NAMES:
            raise UserError(f"{name} is no benchmark; use one of {', '.join(NAMES)}")
    try:
        repeats, seconds = int(options["repeats"]), float(options["seconds"])
    except ValueError as error:
        raise UserError(f"{error}; use repeats=9 and seconds=5, for example") from error
    for name in names or NAMES[:2]:
        kind = "gpu" if name == "gpu" else "cpu"
        default = REPOSITORY / "benchmarks" / "results" / f"new-{kind}.csv"
        path = Path(options["out"] or default)
        # Each imports what it needs, which takes long.
        module: Any = importlib.import_module(f"benchmarks.{name}")
        if advice := peers(module.PEERS):
            print(advice, flush=True)
        if name == "compare":
            cases = [case for case in options["cases"].split(",") if case] or [*module.CASES]
            for case in cases:
                if case not in module.CASES:
                    raise UserError(f"cases={case}: use some of {', '.join(module.CASES)}")
            module.main(path, REPOSITORY / "data" / "bench", cases, repeats, seconds)
        elif name == "gpu":
            module.main(path, options["rows"].split(","), seconds, overrides)
        else:
            module.main(path, repeats, seconds, overrides)
        print(f"rows: {path}")


def peers(packages: dict[str, str]) -> str:
    """Say which packages of other programs are not installed, and the command that installs them
    in an environment of its own; empty if all are."""
    missing = []
    for module, package in packages.items():
        parent = module.partition(".")[0]
        if find_spec(parent) is None or find_spec(module) is None:
            missing.append(package)
    if not missing:
        return ""
    return (
        f"not installed, and so not measured: {', '.join(missing)}. To measure them, too:\n"
        "  python3 -m venv .venv-peers && .venv-peers/bin/pip install -r requirements.txt "
        f"{' '.join(missing)} && .venv-peers/bin/python -m benchmarks"
    )


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
