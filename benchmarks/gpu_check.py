"""Checks and measurements that need a GPU, in one command: `make gpu-check`.

Each result is appended to `checks.csv` at once; at the end, all files are archived. Without a GPU,
the same jobs run on the CPU with small sizes, as a dry run.
"""

import csv
import json
import os
import re
import runpy
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import REPOSITORY, gpu
from benchmarks.entry_points import merges_of_two, scripts, starts_with_torchrun
from benchmarks.fresh import run_limited
from benchmarks.gpu_loaders import ALONE, DRY, MODELS, Sizes, photos, prepare
from benchmarks.records import cores, machine, machine_name
from benchmarks.run import Run
from runtime.setup import NVIDIA_DRIVER

Job = tuple[str, Callable[[Path, str], None], int]  # name, function(results, name), ranks or 0
IS_DRY = not torch.cuda.is_available()
NUM_GPUS = 2 if IS_DRY else torch.cuda.device_count()
NUM_STEPS = 3 if IS_DRY else 24  # of scripts
RESNET = ["model=torchvision", "model.arch=resnet50"]
if IS_DRY:
    RESNET = ["model=small_cnn", "model.kwargs.width=4"]
ROWS = [
    f"{case}, {who}"
    for case in (f"{ALONE}, photos", *MODELS)
    for who in ("constant", "minimal", "loader")
]
"""Rows of `python -m benchmarks gpu` for which there is time."""

LOOP = re.compile(r"^( *)for inputs, targets in run\.batches\(.*\n", re.MULTILINE)
WATCH = "torch.cuda.set_sync_debug_mode({mode!r}) if torch.cuda.is_available() else None\n"


def record(folder: Path, what: str, outcome: str, value: object = "", note: str = "") -> None:
    """Append a row to `checks.csv` and print it."""
    row = [" ".join(cell.split()) for cell in (what, outcome, str(value), note)]
    with (folder / "checks.csv").open("a", newline="") as file:
        csv.writer(file).writerow([datetime.now().isoformat(timespec="seconds"), *row])
    print(": ".join(filter(None, row)), file=sys.__stderr__, flush=True)


def versions(folder: Path, what: str) -> None:
    facts = machine() | {"CUDA": torch.version.cuda, "git": shutil.which("git") or "no merges"}
    if not IS_DRY:
        facts |= {"driver": NVIDIA_DRIVER.read_text(), "NCCL": torch.cuda.nccl.version()}
        facts |= {f"GPU {n}": torch.cuda.get_device_properties(n) for n in range(NUM_GPUS)}
    for name, value in facts.items():
        record(folder, f"{what}, {name}", "measured", value)


def tests(folder: Path, what: str) -> None:
    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or not report.passed:
                record(folder, report.nodeid, report.outcome, note=f"{report.longrepr}"[-500:])

    chosen = ["-k", "nan and sgd and float32", "tests/test_gpu.py"]
    if not IS_DRY:  # in parallel with pytest-xdist: these tests measure no speed
        files = [str(p) for p in Path("tests").glob("test_*.py") if "DEVICES" in p.read_text()]
        chosen = ["-m", "gpu", "-n", str(min(8, len(cores()) // 2)), *files]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *chosen], plugins=[Reporter()]))


def run_in(folder: Path) -> Run:
    """Where the photos of all jobs are."""
    return Run(folder, rows=tuple(ROWS), seconds=2, data_dir=folder / "work")


def images(folder: Path, what: str) -> None:
    prepare(run_in(folder), DRY if IS_DRY else Sizes(), "photos")


def speeds(folder: Path, what: str) -> None:
    gpu.main(run_in(folder), limit_s=140)


def watched(path: Path, copy: Path) -> Path:
    """Copy a training script; its copy warns of what waits for the GPU in a training step."""
    text = path.read_text()
    (loop,) = LOOP.finditer(text)
    step = " " * 4 + loop[1]
    before, after = text[: loop.end()], text[loop.end() :]
    steps, validation, rest = after.partition(f"{loop[1]}# validation\n")
    lines = [step + WATCH.format(mode="warn"), loop[1] + WATCH.format(mode="default")]
    copy.write_text(f"import torch\n{before}{lines[0]}{steps}{lines[1]}{validation}{rest}")
    return copy


def script(
    path: Path, overrides: list[str], folder: Path, what: str, on_photos: bool = False
) -> None:
    """Run a training script; record its speed, save time and the lines that wait for the GPU."""
    output, rank = folder / "work" / what, os.environ.get("RANK", "0")
    if on_photos:
        sizes = DRY if IS_DRY else Sizes()
        overrides = photos(run_in(folder), sizes, "photos", *RESNET, *overrides)
    sys.argv = [path.name, f"output_dir={output}", f"max_steps={NUM_STEPS}", *overrides]
    if not IS_DRY:
        torch.cuda.set_device(int(rank))
    copy = watched(path, folder / "work" / f"{what}-{rank}.py")
    with warnings.catch_warnings(record=True, action="always") as caught:
        runpy.run_path(str(copy), run_name="__main__")
    if rank != "0":
        return
    waits = [w for w in caught if "called a synchroniz" in str(w.message)]
    counts = Counter(f"{w.filename}:{w.lineno}" for w in waits)
    places = ", ".join(place for place in counts if counts[place] > NUM_STEPS - 3) or "none"
    summary = json.loads((output / "summary.json").read_text())
    per_s, save_s = summary["perf/images_per_s"], summary["seconds"]["saving"]
    record(
        folder, what, "measured", f"{per_s:.0f} images/s, {save_s:.2f} s saving, waits: {places}"
    )


def parts_of(folder: Path) -> dict[str, tuple[int, int, Sequence[Job]]]:
    """Parts by name: time limit in seconds, number of parallel jobs, and jobs."""
    paths = [REPOSITORY / name for name in scripts()] + merges_of_two(folder / "work")
    paths = paths[:: len(paths) - 1] if IS_DRY else paths  # the first and the last one
    ranks = {path: int(starts_with_torchrun(str(path))) for path in paths}
    waits = [(path.stem, partial(script, path, []), ranks[path]) for path in paths]
    saves = partial(script, REPOSITORY / "train.py", ["checkpoint.every_steps=8"], on_photos=True)
    batch = [f"global_batch_size={8 * NUM_GPUS}"]
    on_all = [(f"{p.stem}-on-all", partial(script, p, batch), NUM_GPUS) for p in paths if ranks[p]]
    last = NUM_GPUS * (not IS_DRY)
    for n, sync in sorted({(1, True), (2, True), (4, True), (last, True), (last, False)}):
        options = [f"global_batch_size={256 * n}", f"distributed.sync_batchnorm={sync}"]
        run = partial(
            script, REPOSITORY / "train_ddp_amp.py", ["loader=synthetic", *options], on_photos=True
        )
        on_all += [(f"resnet50-on-{n}-sync-{sync}", run, n)] * (0 < n <= last)
    return {
        "versions": (40, 2, [("versions", versions, 0), ("images", images, 0)]),
        "tests": (170, 1, [("tests", tests, 0)]),
        "speeds": (160, 1, [("speeds", speeds, 0)]),
        "waits": (60, len(cores()) // 3 + 1, waits),
        "checkpoints": (50, 1, [("resnet50-4-checkpoints", saves, 0)]),
        **({"all GPUs": (300, 1, on_all)} if NUM_GPUS > 1 else {}),
    }


def run_part(folder: Path, limit_s: float, at_once: int, jobs: Sequence[Job], context: Any) -> None:
    """Run jobs in processes of their own, within a time limit for all of them."""
    end = time.monotonic() + limit_s

    def run(job: Job) -> None:
        what, function, num_ranks = job
        log, program = folder / f"{what}.txt", partial(function, folder, what)
        codes = run_limited(program, num_ranks, log, end - time.monotonic(), context)
        text = log.read_text()[-500:] if log.exists() else ""
        reason = "" if set(codes) == {0} else f"exit codes {codes}, None: time limit. {text}"
        record(folder, what, "failed" if reason else "passed", note=reason)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, jobs))


def main(folder: Path, context: Any = None, patience: float = 1) -> int:
    """Run all parts, with results in a new folder; return 1 if any job failed, otherwise 0.

    Args:
        context: `multiprocessing` context that starts the jobs.
        patience: factor of the time limits.
    """
    folder.mkdir(parents=True)  # fails if it exists, to keep earlier results
    os.chdir(REPOSITORY)
    chosen = parts_of(folder)
    limits = {name: part[0] for name, part in chosen.items()}
    print(f"at most {sum(limits.values())} s: {limits}")
    try:
        for limit_s, at_once, jobs in chosen.values():
            run_part(folder, limit_s * patience, at_once, jobs, context)
    finally:
        shutil.rmtree(folder / "work", ignore_errors=True)
        print(shutil.make_archive(str(folder), "gztar", folder.parent, folder.name))
    rows = list(csv.reader((folder / "checks.csv").read_text().splitlines()))
    print(*(": ".join(filter(None, row[1:])) for row in rows if row[2] != "passed"), sep="\n")
    return int(any(row[2] == "failed" for row in rows))


if __name__ == "__main__":
    name = f"gpu-check-{machine_name()}-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    sys.exit(main(REPOSITORY / "benchmarks" / "results" / name))
