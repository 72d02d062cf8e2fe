"""Run benchmarks and draw the report.

    python -m benchmarks                                  all, small sizes
    python -m benchmarks alternatives workers             these two
    python -m benchmarks full=true                        published sizes
    python -m benchmarks bottleneck experiment=caltech256 data.root=photos

Other arguments: `results=DIR` (default: benchmarks/results/<machine>-<date>), `cases=mnist,cells`
(default: all data sets), `repeats=12` (samples of each figure), `samples=1e9` (in the index that `scale`
measures), `data=...` and any other Hydra override of the training configuration. Started again with the same
results folder, it goes on where it was stopped.
"""

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# benchmark -> what it answers, in the order in which they run
BENCHMARKS = {
    "alternatives": "our loaders beside all others, on each experiment's data",
    "workers": "images/s by number of workers and threads",
    "out_of_band": "training from files that were decoded ahead of time",
    "entry_points": "every script with every loader on 1 to N devices",
    "bottleneck": "where a step's time goes, and what to change",
    "loop_overhead": "what the training loop costs beside forward, backward and step",
    "scale": "what a billion samples cost before the first batch",
    "shuffle": "how random an epoch is that goes through shards",
    "remote": "what it costs that shards lie on a server",
    "augmentations": "what augmenting a batch costs beside torchvision's transforms",
    "agreement": "what it costs that ranks agree on signals and the clock in each step",
    "simulate": "what 8, 64 and 1024 ranks would do, by a model that is checked with 2 to 8",
}
SETTINGS = ("full", "results", "cases", "repeats", "samples")
LOADING = ("alternatives", "workers", "out_of_band")


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status: 1 if a benchmark failed."""
    names, settings, overrides = split(arguments)
    from benchmarks import report
    from benchmarks.cases import CASES
    from benchmarks.run import SIZES_FULL, SIZES_SMALL, Run, results_folder, say

    sizes = SIZES_FULL if settings.get("full", "false").lower() in ("true", "1") else SIZES_SMALL
    if repeats := settings.get("repeats"):
        if not repeats.isdecimal() or int(repeats) < 1:
            sys.exit(f"repeats={repeats} is no count; use a number from 1 on")
        sizes = replace(sizes, repeats=int(repeats), run_repeats=int(repeats))
    if counts := settings.get("samples"):
        try:
            sizes = replace(sizes, samples=tuple(int(float(count)) for count in counts.split(",")))
        except (ValueError, OverflowError):
            sys.exit(f"samples={counts} is no number of samples; use samples=1e9, for example")
    cases = settings["cases"].split(",") if "cases" in settings else list(CASES)
    if unknown := [name for name in cases if name not in CASES]:
        sys.exit(f"cases={settings['cases']}: {', '.join(unknown)} unknown; use {', '.join(CASES)}")

    folder = Path(settings["results"]) if "results" in settings else results_folder()
    run = Run(folder, sizes, tuple(overrides), tuple(cases))
    failed = []
    for number, name in enumerate(names, start=1):
        say(f"[{number} of {len(names)}] {name}: {BENCHMARKS[name]}")
        try:
            function_of(name)(run)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"report: {report.draw(folder)}", file=sys.stderr)
    if failed:
        say(f"failed: {', '.join(failed)}; started again, only these are measured again")
    return int(bool(failed))


def function_of(name: str) -> Callable[..., None]:
    """What runs a benchmark: a function in `loading`, or `main` in the module of that name."""
    if name in LOADING:
        return getattr(importlib.import_module("benchmarks.loading"), name)
    return importlib.import_module(f"benchmarks.{name}").main


def split(arguments: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Names of benchmarks (all if there are none), our settings, and Hydra's overrides."""
    names: list[str] = []
    settings: dict[str, str] = {}
    overrides: list[str] = []
    for argument in arguments:
        key, is_setting, value = argument.partition("=")
        if key in ("-h", "--help"):
            lines = [f"    {name:<15} {text}" for name, text in BENCHMARKS.items()]
            print("\n".join([__doc__ or "", "Benchmarks:", *lines]))
            sys.exit()
        if is_setting and key in SETTINGS:
            settings[key] = value
        elif is_setting:
            overrides.append(argument)
        elif argument in BENCHMARKS:
            names.append(argument)
        else:
            sys.exit(f"{argument} is no benchmark; use one of {', '.join(BENCHMARKS)}")
    return names or list(BENCHMARKS), settings, overrides


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
