"""Speed against the number of DataLoader workers and of DALI's threads, as the write-ups plot it."""

from collections.abc import Callable
from functools import partial

from benchmarks.cases import WHOLE_IMAGES, Case, endless, train_loader
from benchmarks.loaders import ALL, DECODE, plain
from benchmarks.run import Draw, Run, Subject, draw_from

AUTO = ", auto"
"""After the name of a loader that chose its numbers itself."""

SLEEP_S = 0.01
SLEEPING_ITEMS = 10_000
SLEEPING_BATCH_SIZE = 4
MOST_SLEEPING_WORKERS = 8


def main(run: Run) -> None:
    """Sweep 0 to all CPUs of a device; then the mock data set whose items sleep."""
    for case in run.chosen("caltech256", "cells"):
        steps = [ALL] if case.name == "caltech256" else [DECODE, ALL]
        for step in steps if run.sizes.every_combination else steps[:1]:
            run.compare(
                "workers",
                f"{case.name}, {step.removeprefix('step=')}",
                sweep(run, case, step),
                unit=f"{case.unit}/s",
                epoch_size=case.published_size,
            )
    settings = f"sleep_ms={1000 * SLEEP_S:g}"
    run.compare(
        "workers",
        "sleeping items",
        {
            Subject("DataLoader", num_workers=count, settings=settings): partial(sleeping, count)
            for count in counts(MOST_SLEEPING_WORKERS)
        },
        unit="items/s",
        turn_s=run.sizes.window_s,  # a sleep goes on while its process is stopped
    )


def counts(most: int) -> list[int]:
    """0, 1, 2, 3, 4, then in steps of about a half, up to `most`."""
    chosen = [0, 1, 2, 3, 4]
    while chosen[-1] < most:
        chosen.append(max(chosen[-1] + 1, chosen[-1] * 3 // 2))
    return sorted({min(count, most) for count in chosen})


def sweep(run: Run, case: Case, step: str) -> dict[Subject, Callable[[], Draw]]:
    """The write-up's DataLoader and ours by workers, then ours and DALI by threads."""
    extra = WHOLE_IMAGES if step == DECODE else ()
    name, module = {
        "caltech256": ("PIL + DataLoader", "pil_imagefolder"),
        "cells": ("tifffile + DataLoader", "tifffile_cells"),
    }[case.name]
    plain_ones, processes, threads = {}, {}, {}
    for count in counts(run.num_cores):
        subject = Subject(name, num_workers=count, settings=step)
        plain_ones[subject] = partial(plain, run, case, module, {"num_workers": count}, *extra)
    for count in counts(run.num_cores)[1:]:
        subject = Subject("loader=pytorch, processes", count, 1, settings=step)
        options = ("loader=pytorch", f"loader.num_workers={count}", "loader.num_threads=1")
        processes[subject] = partial(configured, run, case, *options, *extra)
        for loader in ("loader=pytorch", "loader=dali"):
            subject = Subject(loader, num_threads=count, settings=step)
            options = (loader, "loader.num_workers=0", f"loader.num_threads={count}")
            threads[subject] = partial(configured, run, case, *options, *extra)
    for loader in ("loader=pytorch", "loader=dali"):
        auto = (loader, "loader.num_workers=auto", *extra)
        chosen = train_loader(run.config(case.name, *auto), run.device).cfg.loader
        numbers = (chosen.num_workers, chosen.num_threads)
        threads[Subject(f"{loader}{AUTO}", *numbers, settings=step)] = partial(
            configured, run, case, *auto
        )
    return {**plain_ones, **processes, **threads}


def configured(run: Run, case: Case, *overrides: str) -> Draw:
    return draw_from(endless(train_loader(run.config(case.name, *overrides), run.device)))


def sleeping(num_workers: int) -> Draw:
    """Workers overlap sleep perfectly, whatever the number of CPUs."""
    from benchmarks.baselines.sleeping import batches

    return draw_from(batches(SLEEPING_ITEMS, SLEEP_S, SLEEPING_BATCH_SIZE, num_workers))
