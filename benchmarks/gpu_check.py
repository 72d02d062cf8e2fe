"""Checks and measurements that need a GPU, in one command: `make gpu-check`.

Each result is appended to `checks.csv` at once; at the end, all files are archived. Without a GPU,
the same jobs run on the CPU with small sizes, as a dry run.
"""

import csv
import json
import os
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
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import REPOSITORY
from benchmarks.entry_points import merges_of_two, scripts, starts_with_torchrun
from benchmarks.fresh import run_limited
from benchmarks.generate import generate, link_often
from benchmarks.records import cores, machine, machine_name
from benchmarks.step import steps, timed
from benchmarks.template import endless, make_config, parts
from runtime.distributed import backend_name
from runtime.setup import NVIDIA_DRIVER, resolve_device
from runtime.timing import Timing

Job = tuple[str, Callable[[Path, str], None], int]  # name, function(results, name), ranks or 0
IS_DRY = not torch.cuda.is_available()
NUM_GPUS = 2 if IS_DRY else torch.cuda.device_count()
WARM_UP, MEASURED, NUM_STEPS = (1, 2, 3) if IS_DRY else (8, 32, 24)  # NUM_STEPS: of scripts
RESNET = "model.kwargs.width=4" if IS_DRY else "model.arch=resnet50"
LOADERS = {"synthetic": "loader=synthetic", "dali": "loader=dali", "threads": "loader=pytorch"}
LOADERS["processes"] = f"loader.num_workers={min(14, len(cores()))}"
SPEEDS = [(loader, "AMP", "model.channels_last=true") for loader in LOADERS]
SPEEDS += [("synthetic", dtype, "model.channels_last=false") for dtype in ("float32", "AMP")]
SPEEDS = SPEEDS[1:2] if IS_DRY else [*SPEEDS, ("synthetic", "AMP", "model.compile=true")]


def record(folder: Path, what: str, outcome: str, value: object = "", note: str = "") -> None:
    """Append a row to `checks.csv` and print it."""
    row = [" ".join(cell.split()) for cell in (what, outcome, str(value), note)]
    with (folder / "checks.csv").open("a", newline="") as file:
        csv.writer(file).writerow([datetime.now().isoformat(timespec="seconds"), *row])
    print(": ".join(filter(None, row)), file=sys.__stderr__, flush=True)


def versions(folder: Path, what: str) -> None:
    dist, backend = torch.distributed, "gloo" if IS_DRY else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    facts = machine() | {"CUDA": torch.version.cuda, "git": shutil.which("git") or "no merges"}
    facts["collectives"] = backend_name(resolve_device("auto"))
    if not IS_DRY:
        facts |= {"driver": NVIDIA_DRIVER.read_text(), "NCCL": torch.cuda.nccl.version()}
        facts |= {f"GPU {n}": torch.cuda.get_device_properties(n) for n in range(NUM_GPUS)}
    for name, value in facts.items():
        record(folder, f"{what}, {name}", "measured", value)
    dist.destroy_process_group()


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


def photos(folder: Path) -> list[str]:
    """Overrides for ResNet-50 on photographs, or for a small model in a dry run."""
    images, links = folder / "work" / "images", folder / "work" / "photos"
    generate("caltech256", images, 8 if IS_DRY else 256, num_classes=2)
    link_often(images, links, 2 if IS_DRY else 48)
    sizes = "model=torchvision data.random_crop=true data.val_count=256 global_batch_size=256"
    sizes = "data.resize=64 data.crop=48 data.val_count=2 global_batch_size=4" if IS_DRY else sizes
    return ["data=imagefolder", f"data.root={links}", f"data.cache_dir={links}.d", *sizes.split()]


def speed(name: str, precision: str, override: str, folder: Path, what: str) -> None:
    cfg, device = make_config(*photos(folder), LOADERS[name], override), resolve_device("auto")
    loader, *others = parts(cfg, device)
    batches = endless(loader)
    train = partial(steps, cfg, tuple(others), device, amp=precision == "AMP")
    list(islice(train(batches=batches), WARM_UP))
    timing = Timing(device)
    list(islice(train(batches=timed(batches, timing)), 1 + MEASURED))  # the first step is not timed
    host = f"{1000 * timing.seconds['compute'] / (MEASURED - 1):.1f} ms of the host a step"
    if not IS_DRY:
        host += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        torch.cuda.synchronize()
    timing.finished()
    waits = f"{timing.data_wait_share:.0%} waiting for data"
    record(folder, what, "measured", f"{timing.speed()}, {waits}, {host}")
    if name in ("dali", "threads"):  # after what is measured
        with torch.profiler.profile() as profiler:
            list(islice(train(batches=batches), 3))
        profiler.export_chrome_trace(f"{folder}/{what}.json.gz")


def script(path: Path, overrides: list[str], folder: Path, what: str) -> None:
    """Run a training script; record its speed, save time and the lines that wait for the GPU."""
    output = folder / "work" / what
    overrides = photos(folder) + overrides if RESNET in overrides else overrides
    sys.argv = [path.name, f"output_dir={output}", f"max_steps={NUM_STEPS}", *overrides]
    if not IS_DRY:
        torch.cuda.set_device(int(os.environ.get("RANK", 0)))
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True, action="always") as caught:
        runpy.run_path(str(path), run_name="__main__")
    if os.environ.get("RANK", "0") != "0":
        return
    counts = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    waits = ", ".join(place for place in counts if counts[place] > NUM_STEPS - 3) or "none"
    summary = json.loads((output / "summary.json").read_text())
    per_s, save_s = summary["perf/images_per_s"], summary["seconds"]["saving"]
    record(folder, what, "measured", f"{per_s:.0f} images/s, {save_s:.2f} s saving, waits: {waits}")


def parts_of(folder: Path) -> dict[str, tuple[int, int, Sequence[Job]]]:
    """Parts by name: time limit in seconds, number of parallel jobs, and jobs."""
    paths = [REPOSITORY / name for name in scripts()] + merges_of_two(folder / "work")
    paths = paths[:: len(paths) - 1] if IS_DRY else paths  # the first and the last one
    ranks = {path: int(starts_with_torchrun(str(path))) for path in paths}
    speeds = [(" ".join(one), partial(speed, *one), 0) for one in SPEEDS]
    waits = [(path.stem, partial(script, path, []), ranks[path]) for path in paths]
    saves = partial(script, REPOSITORY / "train.py", [RESNET, "checkpoint.every_steps=8"])
    batch = [f"global_batch_size={8 * NUM_GPUS}"]
    on_all = [(f"{p.stem}-on-all", partial(script, p, batch), NUM_GPUS) for p in paths if ranks[p]]
    last = NUM_GPUS * (not IS_DRY)
    for n, sync in sorted({(1, True), (2, True), (4, True), (last, True), (last, False)}):
        options = [RESNET, f"global_batch_size={256 * n}", f"distributed.sync_batchnorm={sync}"]
        run = partial(script, REPOSITORY / "train_ddp_amp.py", ["loader=synthetic", *options])
        on_all += [(f"resnet50-on-{n}-sync-{sync}", run, n)] * (0 < n <= last)
    return {
        "versions": (30, 1, [("versions", versions, 0)]),
        "tests": (130, 1, [("tests", tests, 0)]),
        "speeds": (200, 1, speeds),
        "waits": (80, len(cores()) // 3 + 1, waits),
        "checkpoints": (35, 1, [("resnet50-4-checkpoints", saves, 0)]),
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
