"""Run benchmarks and write their report.

    python -m benchmarks                                  all benchmarks but `gpu`, small sizes
    python -m benchmarks alternatives workers             two benchmarks
    python -m benchmarks full=true                        the published data set sizes
    python -m benchmarks bottleneck experiment=caltech256 data.root=photos

Further arguments: `results=DIR` (default: benchmarks/results/<machine>-<date>), `cases=mnist,cells`
(data sets; default: all), `repeats=12` (samples per measurement), `samples=1e9` (number of samples
for `scale`), `rows=dali,alone` and `seconds=5` (words in the names of the rows of `gpu`, and time
of each), and any Hydra override of the training configuration, such as `data=...`. A run with the
results directory of an interrupted run at the same commit continues it.
"""

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# Benchmarks in the order in which they run, with their descriptions.
BENCHMARKS = {
    "alternatives": "the template's loaders against others, on each experiment's data",
    "workers": "images/s by number of workers and threads",
    "worker_costs": "start, memory and speed of worker processes, and how operations wait for them",
    "out_of_band": "training from images that were decoded in advance",
    "entry_points": "every training script with every loader on 1 to N devices",
    "bottleneck": "time of a training step by part, and settings that make it faster",
    "loop_overhead": "time per step of the training loop compared with a minimal loop",
    "scale": "time to the first batch and memory with up to a billion samples",
    "shuffle": "randomness of the sample order when reading shards",
    "remote": "speed and memory when reading shards from a server",
    "augmentations": "speed of batch augmentations compared with torchvision's transforms",
    "agreement": "cost of exchanging stop and save flags between ranks in each step",
    "gpu": "loaders on one GPU beside plain code, and what decoded; a dry run without a GPU",
    "simulate": "efficiency of 8, 64 and 1024 ranks, from a model checked with 2 to 8",
}
SETTINGS = ("full", "results", "cases", "repeats", "samples", "rows", "seconds")
LOADING = ("alternatives", "workers", "out_of_band")


def main(arguments: list[str]) -> int:
    """Run the command line `arguments`; return the exit status, 1 if a benchmark failed."""
    names, settings, overrides = split(arguments)
    from benchmarks import report
    from benchmarks.cases import CASES
    from benchmarks.run import SIZES_FULL, SIZES_SMALL, Run, default_results_dir, log

    sizes = SIZES_FULL if settings.get("full", "false").lower() in ("true", "1") else SIZES_SMALL
    if repeats := settings.get("repeats"):
        if not repeats.isdecimal() or int(repeats) < 1:
            sys.exit(f"repeats={repeats} is not a positive integer; use repeats=9, for example")
        sizes = replace(sizes, repeats=int(repeats), run_repeats=int(repeats))
    if counts := settings.get("samples"):
        try:
            sizes = replace(sizes, samples=tuple(int(float(count)) for count in counts.split(",")))
        except (ValueError, OverflowError):
            sys.exit(f"samples={counts} is not a number of samples; use samples=1e9, for example")
    try:
        seconds = float(settings["seconds"]) if "seconds" in settings else None
    except ValueError:
        sys.exit(f"seconds={settings['seconds']} is not a number; use seconds=3, for example")
    cases = settings["cases"].split(",") if "cases" in settings else list(CASES)
    if unknown := [name for name in cases if name not in CASES]:
        sys.exit(
            f"cases={settings['cases']}: {', '.join(unknown)} unknown; pick from {', '.join(CASES)}"
        )

    folder = Path(settings["results"]) if "results" in settings else default_results_dir()
    rows = tuple(filter(None, settings.get("rows", "").split(",")))
    run = Run(folder, sizes, tuple(overrides), tuple(cases), rows=rows, seconds=seconds)
    failed = []
    for number, name in enumerate(names, start=1):
        log(f"[{number} of {len(names)}] {name}: {BENCHMARKS[name]}")
        try:
            function_of(name)(run)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"report: {report.draw(folder)}", file=sys.stderr)
    if failed:
        log(f"failed: {', '.join(failed)}; run the same command again to repeat only these")
    return int(bool(failed))


def function_of(name: str) -> Callable[..., None]:
    """Function that runs a benchmark: one in `loading`, or `main()` of the module with its name."""
    if name in LOADING:
        return getattr(importlib.import_module("benchmarks.loading"), name)
    return importlib.import_module(f"benchmarks.{name}").main


def split(arguments: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Benchmark names (all if none is given), settings of this module, and Hydra overrides."""
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
            sys.exit(f"unknown benchmark {argument!r}; use one of {', '.join(BENCHMARKS)}")
    everywhere = [name for name in BENCHMARKS if name != "gpu"]
    return names or everywhere, settings, overrides


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
