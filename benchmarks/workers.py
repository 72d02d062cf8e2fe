"""Speed against the number of DataLoader workers and of DALI's threads, as the write-ups plot it.

A sweep from 0 to all CPUs of a device; then the mock data set whose items sleep.
"""

from functools import partial

from benchmarks.baselines.dataloader import sleeping_items
from benchmarks.cases import WHOLE_IMAGES, Case
from benchmarks.loaders import ALL, DECODE, WRITE_UPS
from benchmarks.records import Subject
from benchmarks.run import Builder, Draw, Run, draw_from
from benchmarks.template import chosen_parallelism, endless, train_loader
from benchmarks.ways import OURS

SLEEP_S = 0.01
SLEEPING_ITEMS = 10_000
SLEEPING_BATCH_SIZE = 4
MOST_SLEEPING_WORKERS = 8


def main(run: Run) -> None:
    for case in run.chosen("caltech256", "cells"):
        steps = [ALL] if case.name == "caltech256" else [DECODE, ALL]
        for step in steps if run.sizes.every_combination else steps[:1]:
            title = f"{case.name}, {step.removeprefix('step=')}"
            run.compare(
                *("workers", title, sweep(run, case, step)),
                unit=f"{case.unit}/s",
                epoch_size=case.published_size,
            )
    sleepers = {
        Subject("DataLoader", count, settings=f"sleep_ms={1000 * SLEEP_S:g}"): partial(
            sleeping, count
        )
        for count in counts(MOST_SLEEPING_WORKERS)
    }
    # A sleep goes on while its process is stopped.
    run.compare("workers", "sleeping items", sleepers, unit="items/s", turn_s=run.sizes.window_s)


def counts(most: int) -> list[int]:
    """0, 1, 2, 3, 4, then in steps of about a half, up to `most`."""
    chosen = [0, 1, 2, 3, 4]
    while chosen[-1] < most:
        chosen.append(max(chosen[-1] + 1, chosen[-1] * 3 // 2))
    return sorted({min(count, most) for count in chosen})


def sweep(run: Run, case: Case, step: str) -> dict[Subject, Builder]:
    """The write-up's DataLoader and ours by workers, then ours and DALI by threads."""
    extra = WHOLE_IMAGES if step == DECODE else ()
    builders: dict[Subject, Builder] = {}
    [plain] = WRITE_UPS[case.name]
    for count in counts(run.num_cores):
        builders[plain.subject(run, step, count)] = partial(plain.draw, run, case, extra, count)
    for count in counts(run.num_cores)[1:]:
        processes = Subject("loader=pytorch, processes", count, 1, settings=step)
        options = ("loader=pytorch", f"loader.num_workers={count}", "loader.num_threads=1")
        builders[processes] = partial(configured, run, case, *options, *extra)
        for way in OURS[:2]:
            builders[way.subject(run, step, count)] = partial(way.draw, run, case, extra, count)
    for way in OURS[:2]:
        auto = (way.name, "loader.num_workers=auto", *extra)
        chosen = chosen_parallelism(run.config(case.name, *auto), run.device)
        subject = Subject(f"{way.name}, auto", *chosen, settings=step)
        builders[subject] = partial(configured, run, case, *auto)
    return builders


def configured(run: Run, case: Case, *overrides: str) -> Draw:
    return draw_from(endless(train_loader(run.config(case.name, *overrides), run.device)))


def sleeping(num_workers: int) -> Draw:
    """Workers overlap sleep perfectly, whatever the number of CPUs."""
    return draw_from(sleeping_items(SLEEPING_ITEMS, SLEEP_S, SLEEPING_BATCH_SIZE, num_workers))
