"""The benchmarks' harness: that it measures, keeps and draws what is there. Speeds are not tested."""

import csv
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
import tifffile
import torch
import torch.distributed as dist
from PIL import Image
from torchvision.transforms import v2

from benchmarks import (
    agreement,
    augmentations,
    bottleneck,
    entry_points,
    fresh,
    loading,
    readme,
    records,
    report,
    scale,
    shuffle,
    simulate,
    turns,
)
from benchmarks.__main__ import BENCHMARKS, function_of, main, split
from benchmarks.agreement import AGREEMENTS
from benchmarks.baselines import Job, Recipe, dataloader, limits
from benchmarks.loading import difference, first_images
from benchmarks.records import Measurement, Subject, Summary, ratio, summarise
from benchmarks.remote import PEAK
from benchmarks.run import Run, Sizes
from benchmarks.server import serve
from benchmarks.template import make_config
from benchmarks.turns import Program, measure
from runtime.timing import verdict
from tests import busy
from tests.helpers import PRELOAD, REPOSITORY

turns.PRELOAD[:] = PRELOAD  # the first test that forks starts the one server of them all

TINY = Sizes(
    data={"caltech256": 24, "cells": 80, "deblur": 6, "lowlight": 20},
    warmup_s=0.01,
    window_s=0.01,
    repeats=2,
    max_steps=2,
)
BATCH = "global_batch_size=2"
LIGHT = ("model.kwargs.width=2", "global_batch_size=16")


def row(subject: str = "loader=pytorch", samples: str = "90;100;110", **changes) -> Measurement:
    values = [float(sample) for sample in samples.split(";") if sample]
    summary = summarise(values)
    columns = {
        **{"benchmark": "loaders", "case": "caltech256", "subject": subject, "quantity": "speed"},
        **{"num_workers": 0, "num_threads": 2, "num_devices": 1, "settings": "step=resize+crop"},
        **{"unit": "images/s", "median": summary.median, "low": summary.low, "high": summary.high},
        **{"repeats": len(values), "samples": samples, "epoch_size": 30_607, "note": ""},
        **{"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "gpu": "", "versions": "python 3.11"},
        **{"commit": "0123abcd", "date": "2025-01-31T12:00:00+00:00"},
    }
    return Measurement(**{**columns, **changes})


# Timing


def test_a_known_sleep_is_measured_as_such_in_every_round() -> None:
    rounds: list[str] = []
    programs = {"slow": partial(busy.sleep, 0.02, 1), "fast": partial(busy.sleep, 0.02, 2)}
    speeds = measure(programs, 0, 0.2, 3, after_round=lambda: rounds.append("round"))
    assert len(rounds) == len(speeds["slow"]) == len(speeds["fast"]) == 3
    fast, slow = np.median(np.array([speeds["fast"], speeds["slow"]]), axis=1)
    assert slow == pytest.approx(47, rel=0.15)
    assert fast / slow == pytest.approx(2, rel=0.15)


def test_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent() -> None:
    assert summarise([3.0]) == Summary(3, 3, 3)
    assert summarise([4.0, 1, 3, 2]) == Summary(2.5, 1, 4)
    assert summarise(list(range(1, 9))) == Summary(4.5, 1, 8)  # 99.2 %; 2 to 7 would be 93.0 %
    assert summarise(list(range(1, 10))) == Summary(5, 2, 8)  # 96.1 %
    random = np.random.default_rng(0)
    inside = [
        low <= 0 <= high
        for _, low, high in (summarise(list(random.standard_cauchy(20))) for _ in range(1000))
    ]
    assert 0.94 < np.mean(inside) < 0.98  # exactly 95.9 %


def test_a_ratio_is_that_of_rounds_and_needs_both_side_by_side() -> None:
    assert ratio(row(samples="2;8;3"), row(samples="1;2;3")) == Summary(2, 1, 4)
    assert ratio(row(samples="2;8;3"), row(samples="1;2;3", date="2025-02-01")) is None
    assert ratio(row(samples="2;8;3"), row(samples="1;2")) is None
    assert ratio(row(samples=""), row(samples="")) is None


def test_programs_take_turns_and_only_one_of_them_works(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    programs = {name: partial(busy.note_when, tmp_path / name) for name in names}
    measure(programs, warmup_s=0, window_s=0.3, repeats=3, turn_s=0.1)
    for process in ("main", "worker"):
        bins = [{int(line) for line in (tmp_path / n / process).open()} for n in names]
        assert all(len(own) * busy.BIN_S > 0.2 for own in bins), "did not get its turns"
        shared = {
            moment for own, other in itertools.combinations(bins, 2) for moment in own & other
        }
        assert len(shared) < 0.2 * len(set.union(*bins))


def test_what_a_program_cannot_begin_or_finish_is_told_apart() -> None:
    good = partial(busy.sleep, 0.01, 1)
    found = measure({"SPDL": busy.refuse, "good": good}, 0, 0.02, 2, (ModuleNotFoundError,))
    assert found["SPDL"] == "spdl is not installed"
    assert len(found["good"]) == 2
    with pytest.raises(RuntimeError, match=r"(?s)bad failed:.*in refuse\n.*spdl is not installed"):
        measure({"good": good, "bad": busy.refuse}, 0, 0.02, 1)
    with pytest.raises(RuntimeError, match=r"(?s)bad failed:.*one.py"):
        measure({"bad": busy.fail_later}, 0, 0.02, 1, refusals=(ModuleNotFoundError,))
    with pytest.raises(RuntimeError, match="bad: its process ended with exit code 3"):
        measure({"good": good, "bad": busy.die}, 0, 0.02, 1)
    with pytest.raises(RuntimeError, match="bad: its process ended with exit code 1"):
        measure({"bad": busy.Unreadable()}, 0, 0.02, 1)


MEASURE = """
import sys
from functools import partial
from pathlib import Path
from benchmarks import turns
from tests import busy
if __name__ == "__main__":
    turns.PRELOAD.clear()  # these programs need nothing of it
    programs = {name: partial(busy.note_when, Path(sys.argv[1], name)) for name in ("a", "b")}
    turns.measure(programs, 0, 60, 9)
"""


def test_no_stopped_process_outlives_a_killed_measurement(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    while not all((tmp_path / name / "worker").exists() for name in ("a", "b")):
        assert process.poll() is None
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    # The fork server, its tracker, and two programs, each with a worker and a guardian.
    assert len(children) == 2 + 2 * 3
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(is_alive(child) for child in children):
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Records


def test_rows_are_read_as_they_were_written_and_the_newest_counts(tmp_path: Path) -> None:
    path = tmp_path / "loaders.csv"
    written = [row(), row("PIL + DataLoader", note='a "quoted", note'), row("none", samples="")]
    newer = row(samples="2", commit="other")
    records.append(path, written[:1])
    records.append(path, [*written[1:], newer])
    found = records.read(path)
    assert found[:2] == written[:2]
    assert found[0].values == [90, 100, 110]
    assert np.isnan(found[2].median)
    assert records.latest(path)[:2] == [newer, written[1]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("median", "mean", "'mean'. are unknown.*'median'. missing; rename"),
        ("subject,", "", "'subject'. missing"),
        ("\n", ",extra\n", "'extra'. are unknown"),
        (",8.0,", ",eight,", "line 2: could not convert string to float: 'eight'"),
        (",30607,", ",3.5,", "line 2: invalid literal for int.*'3.5'"),
    ],
)
def test_wrong_columns_and_types_are_refused(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "loaders.csv"
    records.append(path, [row()])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        records.read(path)
    assert str(path) in str(caught.value)


def test_a_crash_while_a_row_is_written_leaves_the_rows_before_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "loaders.csv"
    records.append(path, [row()])
    with monkeypatch.context() as crash:
        crash.setattr(os, "fsync", busy.refuse)
        with pytest.raises(ModuleNotFoundError):
            records.append(path, [row("second")])
    assert [file.name for file in tmp_path.iterdir()] == ["loaders.csv"]
    records.append(path, [row("third")])
    assert [found.subject for found in records.read(path)] == ["loader=pytorch", "third"]


# Runs


def test_an_interrupted_run_goes_on_and_lists_what_cannot_be_had(tmp_path: Path) -> None:
    started = tmp_path / "started.txt"
    once = partial(busy.note_start, started)

    def measure_both(last: Program) -> None:
        run = Run(tmp_path, TINY)
        run.compare("loaders", "one", {Subject("a"): once, Subject("b"): busy.refuse}, unit="s")
        run.compare("loaders", "two", {Subject("c"): once, Subject("d"): last}, unit="s")

    with pytest.raises(RuntimeError, match="d: its process ended with exit code 1"):
        measure_both(busy.interrupt)
    assert len(started.read_text().split()) == 2
    measure_both(once)
    measure_both(once)
    assert len(started.read_text().split()) == 4
    rows = records.read(tmp_path / "loaders.csv")
    assert [(found.case, found.subject, found.repeats) for found in rows] == [
        *(("one", "a", 2), ("one", "b", 0), ("two", "c", 2), ("two", "d", 2))
    ]
    assert rows[1].note == "not measured: spdl is not installed"


def test_help_names_every_benchmark_and_is_no_failure(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert not stopped.value.code
    assert set(BENCHMARKS) <= set(capsys.readouterr().out.split("Benchmarks:")[1].split())


def test_command_line_tells_benchmarks_settings_and_overrides_apart() -> None:
    names, settings, overrides = split(
        ["workers", "full=true", "experiment=cells", "results=x", "+a=b"]
    )
    assert names == ["workers"]
    assert settings == {"full": "true", "results": "x"}
    assert overrides == ["experiment=cells", "+a=b"]
    assert split([])[0] == list(BENCHMARKS)
    with pytest.raises(SystemExit, match="repeats=0 is no count"):
        main(["repeats=0"])
    with pytest.raises(SystemExit, match="loader is no benchmark; use one of alternatives, "):
        split(["loader"])


# Ways of loading


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Smooth JPEGs of different sizes, so that a shift by a fraction of a pixel changes little."""
    folder = tmp_path_factory.mktemp("photos")
    for number, (height, width) in enumerate([(300, 400), (280, 280), (400, 310), (270, 450)] * 2):
        y, x = np.mgrid[:height, :width] / 60 + number
        pixels = np.stack([np.sin(y), np.cos(x + 1), np.sin(x + y)], axis=2)
        image = Image.fromarray((127 * pixels + 128).astype(np.uint8))
        image.save(folder / f"{number}.jpg", quality=95, subsampling=0)
    return sorted(str(path) for path in folder.iterdir())


def batches_of(function: str, recipe: Recipe, files: list[str], **options):
    module, _, name = function.partition(".")
    load = getattr(importlib.import_module(f"benchmarks.baselines.{module}"), name)
    threads = 0 if module in ("dataloader", "webdataset_shards", "litdata_chunks") else 2
    return load(
        Job(recipe, files, **{"targets": [], "batch_size": 3, "parallel": threads, **options})
    )


PHOTO_WAYS = [
    ("dataloader.pil_images", None),
    ("dataloader.pil_draft_images", None),
    ("dataloader.torchvision_images", None),
    ("dataloader.torchvision_uint8", None),
    ("dali.minimal", "nvidia.dali"),
    ("spdl_threads.batches", "spdl.pipeline"),
    ("webdataset_shards.batches", "webdataset"),
    ("litdata_chunks.batches", "litdata"),
]


@pytest.mark.parametrize(("function", "package"), PHOTO_WAYS)
def test_ways_of_loading_photos_give_the_pixels_of_pil(
    photos: list[str], tmp_path: Path, function: str, package: str | None
) -> None:
    if package:
        pytest.importorskip(package, exc_type=ImportError)
    recipe = Recipe()
    folder = tmp_path / "own format"
    evaluation = replace(recipe, train=False)
    images = first_images(batches_of(function, evaluation, photos, folder=folder))
    assert images.shape == (8, 3, 224, 224)
    assert images.dtype == torch.float32
    expected = torch.stack([pil_reference(path, recipe) for path in photos])
    assert difference(images, expected, recipe) < 2.5  # of 255
    assert difference(images.flip(3), expected, recipe) > 20
    assert difference(images.flip(1), expected, recipe) > 20

    first = next(iter(batches_of(function, recipe, photos, folder=folder)))
    assert first.shape == (3, 3, 224, 224)
    assert first.dtype == torch.float32


def pil_reference(path: str, recipe: Recipe) -> torch.Tensor:
    image: Image.Image = Image.open(path)
    scale = 256 / min(image.size)
    width, height = (int(scale * side) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
    return torch.from_numpy(normalised).permute(2, 0, 1).float()


@pytest.mark.parametrize("function", ["dataloader.pil_pairs", "dali.external_source"])
def test_pairs_are_cut_and_flipped_alike(photos: list[str], function: str) -> None:
    if function.startswith("dali"):
        pytest.importorskip("nvidia.dali")
    recipe = Recipe(256, (224, 224), vflip=0.5, mean=(0.5,), std=(0.5,))
    loader = batches_of(function, recipe, photos, targets=photos, batch_size=4)
    pairs = list(itertools.islice(itertools.chain(loader, loader), 4))
    assert len(pairs) == 4
    for inputs, targets in pairs:
        assert inputs.shape == (4, 3, 224, 224)
        assert inputs.dtype == torch.float32
        assert -1 <= inputs.min() < -0.5
        assert 0.5 < inputs.max() <= 1
        assert torch.equal(inputs, targets)
    assert not torch.equal(pairs[0][0], pairs[2][0])  # another order, other crops in each epoch
    evaluated, expected = (
        first_images(batches_of(name, replace(recipe, train=False), photos, targets=photos))
        for name in (function, "dataloader.pil_pairs")
    )
    assert difference(evaluated, expected, recipe) < 2.5


@pytest.mark.parametrize("function", ["dataloader.tifffile_images", "dali.minimal"])
def test_cells_are_read_with_all_channels(tmp_path: Path, function: str) -> None:
    if function.startswith("dali"):
        pytest.importorskip("nvidia.dali")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 50, 50, 5), np.uint8)
    files = [str(tmp_path / f"{number}.tif") for number in range(4)]
    for path, image in zip(files, pixels, strict=True):
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    reading = Recipe(None, None, train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(function, reading, files, batch_size=4)
    expected = torch.from_numpy((pixels / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    resized = Recipe((220, 224), (220, 220), train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(function, resized, files, batch_size=4)
    assert images.shape == (4, 5, 220, 220)
    assert images.dtype == torch.float32


def test_a_gpu_gets_pinned_memory(photos: list[str]) -> None:
    job = Job(Recipe(), photos, photos, 2, 2, torch.device("cuda", 1))
    for load in (dataloader.pil_images, dataloader.tifffile_images, dataloader.pil_pairs):
        assert getattr(load(job), "pin_memory", False)


def test_limits_touch_every_file(photos: list[str]) -> None:
    job = Job(Recipe(crop=(224, 192)), photos, photos, batch_size=4, parallel=2)

    def all_of(load) -> list[np.ndarray]:
        inputs, targets = zip(*itertools.islice(load(job), 2), strict=True)
        for pair in zip(itertools.chain(*inputs), itertools.chain(*targets), strict=True):
            np.testing.assert_array_equal(*pair)
        return list(itertools.chain(*inputs))

    assert [len(data) for data in all_of(limits.read)] == [Path(p).stat().st_size for p in photos]
    assert [image.shape[:2] for image in all_of(limits.decode)[:2]] == [(300, 400), (280, 280)]
    for image, path in zip(all_of(limits.resize), photos, strict=True):
        other = v2.functional.resize(Image.open(path), [256])
        crop = np.asarray(v2.functional.center_crop(other, [224, 192]))
        assert np.abs(image.astype(int) - crop).mean() < 3


def test_recipe_is_that_of_the_configuration() -> None:
    recipe = Recipe.of(
        make_config("data.value_range=[-1,1]", "data.mean=null", "data.std=null").data
    )
    assert (recipe.mean, recipe.std) == ((0.5,), (0.5,))
    with pytest.raises(ValueError, match="data.random_resized_crop: not part of"):
        Recipe.of(make_config("data.random_resized_crop=[0.1,1]").data)


# Every benchmark, as small as it gets


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


def run_tiny(name: str, folder: Path, data_dir: Path, *overrides: str, cases=(), sizes=TINY):
    run = Run(folder, sizes, overrides, cases, data_dir)
    function_of(name)(run)
    rows = records.read(folder / f"{name}.csv")
    assert report.draw(folder).read_text().count("\n## ") == 1
    assert (folder / f"{name}.png").stat().st_size > 5000
    function_of(name)(run)
    assert len(records.read(folder / f"{name}.csv")) == len(rows), "measured again"
    return {(found.case, found.subject, found.quantity): found for found in rows}


def test_alternatives_runs(tmp_path: Path, data_dir: Path) -> None:
    rows = run_tiny("alternatives", tmp_path, data_dir, BATCH, cases=("pairs", "cells"))
    for case, subjects in {
        "pairs of JPEGs, resize 256, random crop 224": (
            "PIL pairs + DataLoader",
            "DALI external source",
        ),
        "5-channel TIFFs, reading only": ("tifffile + DataLoader", "minimal DALI"),
        "5-channel TIFFs, resize and crop": ("tifffile + DataLoader", "loader=packed"),
    }.items():
        for subject in (*subjects, "loader=pytorch", "loader=dali"):
            assert rows[case, subject, "speed"].median > 0, rows[case, subject, "speed"].note
            assert rows[case, subject, "pixel difference"].median < 10


def test_workers_runs_and_finds_that_workers_overlap_sleep(
    tmp_path: Path, data_dir: Path, monkeypatch
) -> None:
    monkeypatch.setattr(loading, "counts", lambda most: [0, 4])
    run_tiny("workers", tmp_path, data_dir, sizes=replace(TINY, window_s=0.5, repeats=3))
    none, four = records.read(tmp_path / "workers.csv")
    assert (none.num_workers, four.num_workers) == (0, 4)
    assert 60 < none.median <= 105
    gain = ratio(four, none)
    assert gain
    assert 2 < gain.median < 5


def test_out_of_band_runs(tmp_path: Path, data_dir: Path) -> None:
    small = (BATCH, "data.resize=[32,32]")
    rows = run_tiny("out_of_band", tmp_path, data_dir, *small, cases=("lowlight",))
    assert rows["lowlight, loading only", "loader=pytorch", "speed"].median > 0
    assert rows["lowlight, training", "loader=packed", "speed"].median > 0
    assert rows["lowlight", "python -m loaders.pack", "packing"].median > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [("true", "it ended after its first step, which measures no speed"), ("false", "out of luck")],
)
def test_a_run_that_failed_or_was_too_short_has_no_speed(
    tmp_path: Path, monkeypatch, command: str, message: str
) -> None:
    def start(run, script, settings, num_devices, folder: Path):
        folder.mkdir()
        (folder / "summary.json").write_text('{"perf/images_per_s": null}')
        Path(f"{folder}.txt").write_text("out\nof luck")
        return subprocess.Popen([command])

    monkeypatch.setattr(entry_points, "start", start)
    monkeypatch.setattr(entry_points, "scripts", lambda: ["train.py"])
    entry_points.main(Run(tmp_path, replace(TINY, run_repeats=2), LIGHT))
    found, *_ = records.read(tmp_path / "entry_points.csv")
    assert (found.subject, found.repeats) == ("train.py", 0)
    assert found.note == f"not measured: {message}"


def test_entry_points_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(entry_points, "scripts", lambda: ["train.py"])
    rows = run_tiny("entry_points", tmp_path, data_dir, *LIGHT)
    found = {quantity: row for (_, script, quantity), row in rows.items() if script == "train.py"}
    assert found["speed"].median > 0
    assert 0 <= found["data wait"].median <= 100
    assert found["final metric"].unit == "top1"


def test_bottleneck_measures_changes_and_what_two_ranks_cost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bottleneck, "changes", lambda *_: [("model.channels_last=true",)])
    run = Run(tmp_path, TINY, LIGHT)
    assert bottleneck.measure(run, num_devices=2)[1] > 0
    given, changed = bottleneck.rows_of(run), bottleneck.rows_of(run, f"{run.title}: changes")
    assert list(given) == [bottleneck.GIVEN, bottleneck.SYNTHETIC, bottleneck.ALONE]
    assert [line.num_devices for line in given.values()] == [2, 2, 1]
    assert list(changed) == [bottleneck.GIVEN, "model.channels_last=true"]
    assert all(line.median > 0 for line in [*given.values(), *changed.values()])


def test_agreement_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(agreement, "WORLD_SIZES", (2,))
    rows = run_tiny("agreement", tmp_path, data_dir)
    assert [name for _, name, _ in rows] == list(AGREEMENTS)
    assert all(line.median > 0 for line in rows.values())


def test_augmentations_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    kinds = ("data.randaugment=[2,9]", "data.mixup=0.2")
    monkeypatch.setattr(augmentations, "KINDS", {k: augmentations.KINDS[k] for k in kinds})
    rows = run_tiny("augmentations", tmp_path, data_dir)
    assert [kind for kind, _, _ in rows] == [kinds[0]] * 3 + [kinds[1]] * 2
    assert all(line.median > 0 for line in rows.values())


@pytest.mark.parametrize("name", AGREEMENTS)
def test_ranks_act_on_the_wishes_of_the_step_that_the_way_promises(
    name: str, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        agree = AGREEMENTS[name]()
        seen = [any(agree([wish, False])) for wish in (True, False, True)]
    finally:
        dist.destroy_process_group()
    is_later = name == list(AGREEMENTS)[-1]
    assert seen == ([False, True, False] if is_later else [True, False, True])


def test_a_billion_samples_start_as_soon_as_ten_thousand(tmp_path: Path, capsys) -> None:
    run = Run(tmp_path, replace(TINY, samples=(10**4, 10**9)))
    scale.main(run)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["samples"] == 10**9
    assert 0 < found["rss_growth_mb"] < 200
    assert found["first_batch_s"] > 0 < found["resume_s"]
    assert len(records.read(tmp_path / "scale.csv")) == 9


def test_the_server_answers_late_with_ranges_and_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "bucket" / "a b").mkdir(parents=True)
    (tmp_path / "bucket" / "a b" / "c").write_bytes(b"0123456789")
    with serve(tmp_path, 0.2, set(records.cores())) as address:

        def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str]:
            start = time.perf_counter()
            with urlopen(
                Request(f"{address}/bucket{path}", method=method, headers=headers)
            ) as answer:
                found = answer.status, answer.read(), answer.headers["Content-Length"]
            assert time.perf_counter() - start >= 0.2
            return found

        assert ask("/a%20b/c") == (200, b"0123456789", "10")
        assert ask("/a%20b/c", Range="bytes=2-4") == (206, b"234", "3")
        assert ask("/a%20b/c", Range="bytes=8-40") == (206, b"89", "2")
        assert ask("/a%20b/c", method="HEAD") == (200, b"", "10")
        listed = ask("?list-type=2&prefix=a%20b/")[1]
        assert b"<Key>a b/c</Key><Size>10</Size>" in listed
        with pytest.raises(HTTPError, match="404"):
            ask("/d")


def _hold(count: int) -> str:
    held = bytearray(b"x") * count
    time.sleep(3 * fresh.SAMPLING_S)
    if count == 0:
        raise ValueError("nothing to hold")
    return str(len(held))


def test_a_program_in_a_fresh_process_is_measured_with_its_memory() -> None:
    answer, peak_mb = fresh.run_fresh(partial(_hold, 300_000_000), records.cores())
    assert answer == "300000000"
    assert 300 < peak_mb < 2000
    with pytest.raises(RuntimeError, match="ValueError: nothing to hold"):
        fresh.run_fresh(partial(_hold, 0), records.cores())


def test_a_window_is_about_as_random_as_a_buffer_of_its_size(tmp_path: Path) -> None:
    shuffle.main(Run(tmp_path, TINY))
    found = {
        (row.case, str(row.who), row.quantity): row.median
        for row in records.read(tmp_path / "shuffle.csv")
    }
    for case, is_mixed in shuffle.CASES.items():
        full, one, few, many, buffer = (
            found[case, subject, shuffle.CLASSES]
            for c, subject, q in found
            if (c, q) == (case, shuffle.CLASSES)
        )
        assert full == pytest.approx(100 * (1 - 0.99**256), abs=0.5)
        if is_mixed:
            assert min(one, few, many, buffer) > 0.98 * full
        else:
            assert one < few < many < full
            assert few < buffer < 5 * few


def test_loop_overhead_runs(tmp_path: Path, data_dir: Path) -> None:
    rows = run_tiny("loop_overhead", tmp_path, data_dir, *LIGHT)
    for subject in ("bare loop", "train.py"):
        assert rows[" ".join(LIGHT), subject, "time per step"].median > 0


@pytest.mark.slow
def test_simulate_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(simulate, "MEASURED_RANKS", (2,))
    monkeypatch.setattr(simulate, "FITTED_RANKS", 2)
    monkeypatch.setattr(simulate, "KIB", (4, 4096))
    rows = run_tiny("simulate", tmp_path, data_dir, *LIGHT)
    for kib in (4, 4096):  # two points, two constants
        assert abs(rows[f"all-reduce of {kib} KiB", "2 ranks", simulate.ERROR].median) < 1
    here = [line for (case, *_, what), line in rows.items() if case.startswith(LIGHT[0])]
    assert [line.subject for line in here if line.quantity == simulate.EFFICIENCY] == [
        *("8 ranks", "64 ranks", "1,024 ranks")
    ]


IDEAL = simulate.Cluster(
    *(0.1, [0.9, 1.0, 1.1], 1e8, 1e-5, 1e10, 0.0, 0.0, 10.0, 0.0), restart_s=0.0, mtbf_s=1e6
)


def test_the_simulated_parts_of_a_step_are_those_of_the_formulas() -> None:
    ring_s, tree_s = 2 * 3 * (1e-5 + 2.5e7 / 1e10), 2 * 2 * (1e-5 + 4 / 1e10)
    assert simulate.all_reduce_s(IDEAL, 4, 1e8) == pytest.approx(ring_s)
    assert simulate.all_reduce_s(IDEAL, 4, 4) == pytest.approx(tree_s)
    assert simulate.all_reduce_s(replace(IDEAL, cores=2), 4, 1e8) == pytest.approx(2 * ring_s)
    two = simulate.parts_of_step(replace(IDEAL, hidden_s=0.004), 2)
    # The slower of two: 1.1 in five of nine pairs, 1.0 in three, 0.9 in one.
    assert two["slowest rank"] == pytest.approx(0.1 * (9.4 / 9 - 1))
    assert two["all-reduce"] == pytest.approx(2 * (1e-5 + 5e7 / 1e10) - 0.004)
    late = simulate.parts_of_step(replace(IDEAL, batch_bytes=1e9, storage=1e9), 2)
    assert sum(late.values()) == pytest.approx(2)


def test_the_best_interval_is_near_youngs_and_keeps_what_theory_says() -> None:
    for count in (1, 16, 64):
        best, young = simulate.best_interval_s(IDEAL, count), simulate.young_s(IDEAL, count)
        assert 0.5 < best / young < 2
        lost = 1 - simulate.kept(IDEAL, count, young)
        mtbf_s = IDEAL.mtbf_s / count
        assert lost == pytest.approx(10 / young + young / 2 / mtbf_s, rel=0.1)


# The report


IN_MS = {"quantity": "time per step", "unit": "ms", "epoch_size": 0}
ON_TWO = {"settings": "loader=pytorch", "num_devices": 2, "num_threads": 0}
ON_ONE = {**ON_TWO, "num_devices": 1}
LOADING, TRAINING = ({"case": f"caltech256, {mode}"} for mode in ("loading only", "training"))
# benchmark -> its rows; then by case and column what the table shows, line by line
FIXED: dict[str, tuple[list[Measurement], dict[str, dict[str, list[str]]]]] = {
    "alternatives": (
        [
            row("PIL + DataLoader", "50;40;50"),
            row("limit: decoding alone", "125;125;125"),
            row("loader=pytorch", "100;100;100"),
            row("loader=pytorch", "2.5", quantity="pixel difference", unit="of 255"),
            row("SPDL", "", note="not measured: spdl is not installed"),
        ],
        {
            "caltech256": {
                "subject": ["limit: decoding alone", "loader=pytorch", "PIL + DataLoader", "SPDL"],
                "against PIL + DataLoader": ["2.5x (2.5 to 3.12)", "2x (2 to 2.5)", "1x", ""],
                "share of the limit": ["100 %", "80 %", "40 %", ""],
                "pixel difference (of 255)": ["", "2.5", "", ""],
                "epoch": ["4.08 min", "5.1 min", "10.2 min", ""],
                "note": ["", "", "", "not measured: spdl is not installed"],
            }
        },
    ),
    "workers": (
        [
            row("PIL + DataLoader", "50;50;50", num_threads=0),
            row("PIL + DataLoader", "80;80;80", num_workers=2, num_threads=0),
            row("DataLoader", "10;10;10", case="sleep", epoch_size=0),
        ],
        {
            "caltech256": {
                "parallel": ["", "2 workers"],
                "against PIL + DataLoader": ["1x", "1.6x (1.6 to 1.6)"],
            },
            "sleep": {"speed (images/s)": ["10 (10 to 10)"]},
        },
    ),
    "out_of_band": (
        [
            row("pack", "30", quantity="packing", unit="s", note="1000 images, 9 MiB"),
            *(row(**LOADING), row("loader=packed", "900;1000;1100", **LOADING)),
            *(row(**TRAINING), row("loader=packed", "50;50;50", **TRAINING)),
        ],
        {
            "caltech256": {"packing (s)": ["30"]},
            "caltech256, loading only": {
                "against loader=pytorch": ["1x", "10x (10 to 10)"],
                "packing is paid for after (epochs)": ["", "3.33"],
            },
            "caltech256, training": {"packing is paid for after (epochs)": ["", "never"]},
        },
    ),
    "entry_points": (
        [
            *(row("train.py", "100", **ON_ONE), row("train_ddp.py", "90", **ON_ONE)),
            row("train_ddp.py", "171", **ON_TWO),
            row("train_ddp.py", "12.5", quantity="data wait", unit="%", **ON_TWO),
        ],
        {
            "caltech256": {
                "scaling efficiency": ["", "", "95 %"],
                "speed per device against train.py": ["", "90 %", "86 %"],
                "data wait (%)": ["", "", "12.5"],
            }
        },
    ),
    "bottleneck": (
        [row(bottleneck.GIVEN, "10;10;10"), row(bottleneck.SYNTHETIC, "40;40;40")],
        {"caltech256": {"against as configured": ["1x", "4x (4 to 4)"]}},
    ),
    "loop_overhead": (
        [
            *(row("bare loop", "10;8;10", **IN_MS), row("train.py", "10.1;8;10.2", **IN_MS)),
            row("x", "", **IN_MS),
        ],
        {"caltech256": {"over the bare loop (%)": ["", "1 (0 to 2)", ""]}},
    ),
    "scale": (
        [row("1,000 samples", "0.1;0.2", quantity="first batch", unit="s")],
        {"caltech256": {"first batch (s)": ["0.15 (0.1 to 0.2)"]}},
    ),
    "shuffle": (
        [row("data.shuffle=full", "92;93;94", quantity=shuffle.CLASSES, unit="of 100")],
        {"caltech256": {"classes in a batch (of 100)": ["93 (92 to 94)"]}},
    ),
    "remote": (
        [
            row("loader=pytorch, files on disk", "100;80;100"),
            row("loader=pytorch, files on disk", "400;401", quantity=PEAK, unit="MB"),
            row("LitData, 100 ms", "50;50;50"),
        ],
        {
            "caltech256": {
                "against loader=pytorch, files on disk": ["1x", "0.5x (0.5 to 0.625)"],
                "peak memory (MB)": ["400 (400 to 401)", ""],
            }
        },
    ),
    "augmentations": (
        [
            row(augmentations.OURS, "4;4;4", **IN_MS),
            row("torchvision v2, image by image", "5;6;5", **IN_MS),
        ],
        {"caltech256": {"against loaders.augment": ["1x", "1.25x (1.25 to 1.5)"]}},
    ),
    "agreement": (
        [
            row(way, samples, **IN_MS)
            for way, samples in zip(AGREEMENTS, ["4;4;4", "5;6;5", "4.4;4;4"], strict=True)
        ],
        {"caltech256": {"against no agreement": ["1x", "1.25x (1.25 to 1.5)", "1x (1 to 1.1)"]}},
    ),
    "simulate": (
        [row("8 ranks", "97.5", quantity=simulate.EFFICIENCY, unit="%")],
        {"caltech256": {"efficiency (%)": ["97.5"]}},
    ),
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_report_shows_a_picture_and_tables_with_what_follows_from_the_rows(
    tmp_path: Path, benchmark: str
) -> None:
    rows, expected = FIXED[benchmark]
    tables = report.tables(benchmark, rows)
    for case, columns in expected.items():
        header, *lines = tables[case]
        for name, cells in columns.items():
            assert [line[header.index(name)] for line in lines] == cells, name
    records.append(tmp_path / f"{benchmark}.csv", rows)
    text = report.draw(tmp_path).read_text()
    assert all(report.markdown(table) in text for table in tables.values())
    assert f"]({benchmark}.png)" in text
    pixels = np.asarray(Image.open(tmp_path / f"{benchmark}.png").convert("L"))
    assert min(pixels.shape) > 100
    assert 0.005 < (pixels < 250).mean() < 0.9, "blank"


def test_report_without_results_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m benchmarks"):
        report.draw(tmp_path)


def test_verdict_names_the_largest_part_and_only_what_is_reliably_faster() -> None:
    def speeds(given: str, **samples: str) -> dict[str, Measurement]:
        names = {
            "synthetic": bottleneck.SYNTHETIC,
            "alone": bottleneck.ALONE,
            "dali": "loader=dali",
        }
        by_name = {bottleneck.GIVEN: given, **{names[key]: text for key, text in samples.items()}}
        return {
            name: row(name, text, num_devices=1 if name == bottleneck.ALONE else 2)
            for name, text in by_name.items()
        }

    loading = speeds(given="10;10", synthetic="40;40", alone="25;25")
    tried = speeds(given="10;10", dali="20;30")
    assert bottleneck.verdict(loading, tried) == ("input", 0.75, "loader=dali", 2.5)
    assert bottleneck.verdict(loading, speeds(given="10;10", dali="9;30"))[2:] == ("", 1)
    averaging = speeds(given="38;38", synthetic="40;40", alone="80;80")
    assert bottleneck.verdict(averaging, {})[:2] == ("communication", pytest.approx(0.7125))
    computing = speeds(given="39;39", synthetic="40;40", alone="20;20")
    assert bottleneck.verdict(computing, {})[:2] == ("compute", pytest.approx(0.975))


RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir()))
def test_the_committed_report_is_that_of_its_csv_files(folder: str) -> None:
    text = (RESULTS / folder / "report.md").read_text()
    for path in (RESULTS / folder).glob("*.csv"):
        rows = records.latest(path)
        with path.open(newline="") as file:
            assert len(list(csv.reader(file))) - 1 == len(records.read(path))
        for table in report.tables(path.stem, rows).values():
            assert report.markdown(table) in text, f"run python -m benchmarks.report {folder}"


def test_the_page_shows_what_was_measured() -> None:
    text = readme.PAGE.read_text()
    [folder] = set(re.findall(r"\(../(benchmarks/results/[\w.-]+)/\w+\.png\)", text))
    assert text == readme.with_excerpt(text, REPOSITORY / folder), (
        f"run python -m benchmarks.readme {folder}"
    )
    for name in readme.PICTURES:
        assert (REPOSITORY / folder / name).stat().st_size > 1000


def test_a_run_closes_with_a_verdict_that_names_settings_not_yet_used() -> None:
    settings = ("loader.num_workers=auto", "loader=dali")
    assert verdict(0.05, make_config()).startswith("compute-bound")
    assert all(setting in verdict(0.5, make_config()) for setting in settings)
    used = verdict(0.5, make_config(*settings))
    assert used.startswith("input-bound")
    assert not any(setting in used for setting in settings)
