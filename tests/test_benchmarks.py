"""The benchmarks' harness: that it measures, keeps and draws what is there. Speeds are not tested."""

import dataclasses
import importlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tifffile
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks import entry_points, readme, records, report
from benchmarks.__main__ import BENCHMARKS, main, split
from benchmarks.alternatives import difference, first_images
from benchmarks.baselines import Recipe, copy_bytes, decode_only
from benchmarks.bottleneck import COMPUTE, GIVEN, PARTS, SPEED, STEP, SYNTHETIC, WAIT, verdict
from benchmarks.cases import make_config
from benchmarks.entry_points import COPIES
from benchmarks.records import Measurement
from benchmarks.run import Run, Sizes, Subject
from benchmarks.timing import Summary, ratios, rounds, summarise
from benchmarks.turns import measure
from benchmarks.workers import sleeping
from runtime import logger
from tests import busy
from tests.helpers import REPOSITORY

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


def test_a_known_sleep_is_measured_as_such() -> None:
    programs = {
        "slow": partial(busy.sleep, 0.02, 1),
        "fast": partial(busy.sleep, 0.02, 2),
    }
    samples = measure(programs, warmup_s=0, window_s=0.2, repeats=3).speeds
    assert summarise(samples["slow"]).median == pytest.approx(47, rel=0.15)
    assert ratios(samples["fast"], samples["slow"]).median == pytest.approx(2, rel=0.15)


def test_workers_overlap_a_known_sleep(tmp_path: Path) -> None:
    subjects = {workers: Subject("DataLoader", num_workers=workers) for workers in (0, 4)}
    Run(tmp_path, replace(TINY, window_s=0.5, repeats=3)).compare(
        *("workers", "sleeping items"),
        {subject: partial(sleeping, workers) for workers, subject in subjects.items()},
        unit="items/s",
        turn_s=0.5,
    )
    none, four = records.read(tmp_path / "workers.csv")
    assert 60 < none.median <= 105
    assert 2 < ratios(four.values, none.values).median < 5


def test_every_round_measures_every_subject_once() -> None:
    names = list(rounds(["a", "b", "c"], 4))
    assert names[:6] == ["a", "b", "c", "b", "c", "a"]
    assert all(sorted(names[i : i + 3]) == ["a", "b", "c"] for i in range(0, 12, 3))


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


def test_ratios_are_refused_for_what_was_not_measured_side_by_side() -> None:
    assert ratios([2.0, 8, 3], [1.0, 2, 3]) == Summary(2, 1, 4)
    with pytest.raises(ValueError, match="side by side"):
        ratios([1.0], [1.0, 2.0])


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
    measured = measure(
        {"SPDL": busy.refuse, "good": good}, 0, 0.02, 2, refusals=(ModuleNotFoundError,)
    )
    assert measured.reasons == {"SPDL": "spdl is not installed"}
    assert [len(samples) for samples in measured.speeds.values()] == [2]
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
from benchmarks.turns import measure
from tests import busy
if __name__ == "__main__":
    programs = {name: partial(busy.note_when, Path(sys.argv[1], name)) for name in ("a", "b")}
    measure(programs, 0, 60, 9)
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


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "loaders.csv"
    written = [row(), row("PIL + DataLoader", note='a "quoted", note'), row("none", samples="")]
    for measurement in written:
        records.append(path, measurement)
    found = records.read(path)
    assert found[:2] == written[:2]
    assert found[0].values == [90, 100, 110]
    assert np.isnan(found[2].median)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("median", "mean", "'mean' is unknown.*'median' is missing.*rename"),
        ("subject,", "", "'subject' is missing"),
        ("\n", ",extra\n", "'extra' is unknown"),
        (",8.0,", ",eight,", "line 2: column 'memory_gib' holds 'eight', which is no float"),
        (",30607,", ",3.5,", "line 2: column 'epoch_size' holds '3.5', which is no int"),
    ],
)
def test_wrong_columns_and_types_are_refused(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "loaders.csv"
    records.append(path, row())
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        records.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match=message):
        report.draw(tmp_path)


def test_a_row_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "loaders.csv"
    records.append(path, row())
    records.append(path, row("second"))
    path.write_text(path.read_text()[:-20])
    assert [measurement.subject for measurement in records.read(path)] == ["loader=pytorch"]
    records.append(path, row("third"))
    assert [measurement.subject for measurement in records.read(path)] == [
        "loader=pytorch",
        "third",
    ]


def test_the_newest_row_counts() -> None:
    old, new = row(samples="1"), row(samples="2", commit="other")
    assert records.latest([old, row("x"), new]) == [new, row("x")]


def test_every_column_is_documented() -> None:
    source = Path(records.__file__).read_text()
    body = source.partition("class Measurement:")[2].partition("@property")[0]
    for field in dataclasses.fields(Measurement):
        assert body.partition(f"    {field.name}: ")[2].split("\n")[1].strip().startswith('"""')


# Runs


def test_an_interrupted_run_goes_on_without_measuring_again(tmp_path: Path) -> None:
    built = tmp_path / "built.txt"
    once = partial(busy.draw_once_built, built)

    def measure_both(interrupt: bool) -> None:
        run = Run(tmp_path, TINY)
        run.compare("loaders", "one", {Subject("a"): once}, unit="images/s")
        last = busy.draw_interrupted if interrupt else once
        second: dict[Subject, Callable] = {Subject("b"): once, Subject("c"): last}
        run.compare("loaders", "two", second, unit="images/s")

    with pytest.raises(RuntimeError, match="c: its process ended with exit code 1"):
        measure_both(interrupt=True)
    assert len(built.read_text().split()) == 2
    measure_both(interrupt=False)
    measure_both(interrupt=False)
    assert len(built.read_text().split()) == 4
    rows = records.read(tmp_path / "loaders.csv")
    assert [(found.case, found.subject) for found in rows] == [
        *(("one", "a"), ("two", "b"), ("two", "c"))
    ]


def test_what_cannot_be_built_is_listed_with_its_reason(tmp_path: Path) -> None:
    builders = {Subject("SPDL"): busy.draw_missing, Subject("a"): busy.draw_one}
    Run(tmp_path, TINY).compare("alternatives", "x", builders, unit="s")
    spdl, other = records.read(tmp_path / "alternatives.csv")
    assert (spdl.repeats, spdl.note) == (0, "not measured: spdl is not installed; pip install spdl")
    assert other.repeats == TINY.repeats


def test_help_names_every_benchmark_and_is_no_failure(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert not stopped.value.code
    assert set(BENCHMARKS) <= set(capsys.readouterr().out.split("Benchmarks:")[1].split())


def test_command_line_tells_benchmarks_settings_and_overrides_apart() -> None:
    names, settings = split(["loaders", "full=true", "experiment=cells", "results=x", "+a=b"])
    assert names == ["loaders"]
    assert settings == {"full": "true", "results": "x", "overrides": "experiment=cells\n+a=b"}
    assert split([])[0] == list(BENCHMARKS)
    with pytest.raises(SystemExit, match="repeats=0 is no count"):
        main(["repeats=0"])
    with pytest.raises(SystemExit, match="window=0.0 is no time"):
        main(["window=0.0"])
    with pytest.raises(SystemExit, match="loader is no benchmark; use one of loaders, "):
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


def batches_of(module: str, *arguments, **options):
    return importlib.import_module(f"benchmarks.baselines.{module}").batches(*arguments, **options)


PHOTO_WAYS = [
    ("pil_imagefolder", {}, None),
    ("torchvision_v2", {}, None),
    ("torchvision_v2", {"uint8_batches": True}, None),
    ("dali_minimal", {}, "nvidia.dali"),
    ("spdl_threads", {}, "spdl.pipeline"),
    ("spdl_threads", {"own_decoder": False}, "spdl.pipeline"),
    ("webdataset_shards", {"folder": "webdataset"}, "webdataset"),
    ("litdata_chunks", {"folder": "litdata"}, "litdata"),
    ("ffcv_beton", {"folder": "ffcv"}, "ffcv"),
]


@pytest.mark.parametrize(("module", "options", "package"), PHOTO_WAYS)
def test_ways_of_loading_photos_give_the_pixels_of_pil(
    photos: list[str], tmp_path: Path, module: str, options: dict, package: str | None
) -> None:
    if package:
        pytest.importorskip(package, exc_type=ImportError)
    options = {k: tmp_path / v if k == "folder" else v for k, v in options.items()}
    recipe = Recipe()
    images = first_images(batches_of(module, photos, recipe.for_evaluation(), 3, **options))
    assert images.shape == (8, 3, 224, 224)
    assert images.dtype == torch.float32
    expected = torch.stack([pil_reference(path, recipe) for path in photos])
    assert difference(images, expected, recipe) < 2.5  # of 255
    assert difference(images.flip(3), expected, recipe) > 20
    assert difference(images.flip(1), expected, recipe) > 20

    epoch = list(batches_of(module, photos, recipe, 3, **options))
    assert epoch[0].shape == (3, 3, 224, 224)
    assert epoch[0].dtype == torch.float32


def pil_reference(path: str, recipe: Recipe) -> torch.Tensor:
    image: Image.Image = Image.open(path)
    scale = 256 / min(image.size)
    width, height = (int(scale * side) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    normalised = (pixels - np.array(recipe.mean)) / np.array(recipe.std)
    return torch.from_numpy(normalised).permute(2, 0, 1).float()


@pytest.mark.parametrize("module", ["pil_pairs", "dali_external_source"])
def test_pairs_are_cut_and_flipped_alike(photos: list[str], module: str) -> None:
    if module.startswith("dali"):
        pytest.importorskip("nvidia.dali")
    recipe = Recipe(256, (224, 224), vflip=0.5, mean=(0.5,), std=(0.5,))
    loader = batches_of(module, photos, photos, recipe, 4)
    pairs = [*loader, *loader]
    assert len(pairs) == 4
    for inputs, targets in pairs:
        assert inputs.shape == (4, 3, 224, 224)
        assert inputs.dtype == torch.float32
        assert -1 <= inputs.min() < -0.5
        assert 0.5 < inputs.max() <= 1
        assert torch.equal(inputs, targets)
    assert not torch.equal(pairs[0][0], pairs[2][0])  # another order, other crops in each epoch
    evaluated, expected = (
        first_images(batches_of(name, photos, photos, recipe.for_evaluation(), 4))
        for name in (module, "pil_pairs")
    )
    assert difference(evaluated, expected, recipe) < 2.5


@pytest.mark.parametrize("module", ["tifffile_cells", "dali_minimal"])
def test_cells_are_read_with_all_channels(tmp_path: Path, module: str) -> None:
    options = {}
    if module.startswith("dali"):
        pytest.importorskip("nvidia.dali")
        options = {"channels": 5}
    pixels = np.random.default_rng(0).integers(0, 256, (4, 50, 50, 5), np.uint8)
    files = [str(tmp_path / f"{number}.tif") for number in range(4)]
    for path, image in zip(files, pixels, strict=True):
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    reading = Recipe(None, None, train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(module, files, reading, 4, **options)
    expected = torch.from_numpy((pixels / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(images, expected, atol=1e-4, rtol=0)
    resized = Recipe((220, 224), (220, 220), train=False, mean=(0.5,), std=(0.25,))
    (images,) = batches_of(module, files, resized, 4, **options)
    assert images.shape == (4, 5, 220, 220)
    assert images.dtype == torch.float32


def test_limits_touch_every_file_and_copy_what_lies_in_the_file(photos, tmp_path: Path) -> None:
    decoded = [image for batch in decode_only.batches(photos, 3, 2) for image in batch]
    assert [image.shape[:2] for image in decoded[:2]] == [(300, 400), (280, 280)]
    read = [data for batch in decode_only.batches(photos, 3, 2, decode_only.read) for data in batch]
    assert [len(data) for data in read] == [Path(path).stat().st_size for path in photos]

    resize = partial(decode_only.resize, shorter_side=256, crop=(224, 192))
    resized = [image for batch in decode_only.batches(photos, 3, 2, resize) for image in batch]
    assert {image.shape for image in resized} == {(224, 192, 3)}
    for image, path in zip(resized, photos, strict=True):
        other = v2.functional.resize(Image.open(path), [256])
        crop = np.asarray(v2.functional.center_crop(other, [224, 192]))
        assert np.abs(image.astype(int) - crop).mean() < 3

    pixels = copy_bytes.write_pixels(tmp_path / "noise.bin", (10, 12, 16, 3))
    copies = torch.cat(list(copy_bytes.batches(pixels, (12, 16), 4, 2)))
    assert sorted(copies.flatten(1).sum(1).tolist()) == sorted(pixels.sum((1, 2, 3)).tolist())
    floats = next(iter(copy_bytes.batches(pixels, (8, 8), 4, 2, as_float=True)))
    assert floats.shape == (4, 3, 8, 8)
    assert floats.dtype == torch.float32


def test_recipe_is_that_of_the_configuration() -> None:
    recipe = Recipe.of(
        make_config("data.value_range=[-1,1]", "data.mean=null", "data.std=null").data
    )
    assert (recipe.mean, recipe.std) == ((0.5,), (0.5,))
    with pytest.raises(ValueError, match=r"use data.random_resized_crop=null"):
        Recipe.of(make_config("data.random_resized_crop=[0.1,1]").data)


# Every benchmark, as small as it gets


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


def run_tiny(name: str, folder: Path, data_dir: Path, *overrides: str, cases=("mnist",)):
    run = Run(folder, TINY, overrides, cases, data_dir)
    importlib.import_module(f"benchmarks.{name}").main(run)
    rows = records.read(folder / f"{name}.csv")
    assert report.draw(folder).read_text().count("\n## ") == 1
    assert (folder / f"{name}.png").stat().st_size > 5000
    importlib.import_module(f"benchmarks.{name}").main(run)
    assert len(records.read(folder / f"{name}.csv")) == len(rows), "measured again"
    return {(found.case, found.subject, found.quantity): found for found in rows}


def test_loaders_runs(tmp_path: Path, data_dir: Path) -> None:
    pytest.importorskip("loaders.generate")
    rows = run_tiny("loaders", tmp_path, data_dir, BATCH, cases=("cells",))
    for case, subject in [
        ("cells", "loader=pytorch"),
        ("cells", "tifffile + DataLoader"),
        ("cells", "loader=dali"),
        ("cells", "limit: reading files"),
    ]:
        assert rows[case, subject, "speed"].median > 0, rows[case, subject, "speed"].note


def test_alternatives_runs(tmp_path: Path, data_dir: Path) -> None:
    pytest.importorskip("loaders.generate")
    rows = run_tiny("alternatives", tmp_path, data_dir, BATCH, cases=("pairs",))
    case = "pairs of JPEGs, resize 256, random crop 224"
    for subject in ("PIL pairs + DataLoader", "DALI external source", "loader=pytorch"):
        assert rows[case, subject, "speed"].median > 0, rows[case, subject, "speed"].note
        assert rows[case, subject, "pixel difference"].median < 10


def test_workers_runs(tmp_path: Path, data_dir: Path) -> None:
    rows = run_tiny("workers", tmp_path, data_dir, cases=())
    assert rows["sleeping items", "DataLoader", "speed"].median > 0


def test_out_of_band_runs(tmp_path: Path, data_dir: Path) -> None:
    pytest.importorskip("loaders.generate")
    small = (BATCH, "data.resize=[32,32]")
    rows = run_tiny("out_of_band", tmp_path, data_dir, *small, cases=("lowlight",))
    assert rows["lowlight, loading only", "loader=pytorch", "speed"].median > 0
    assert rows["lowlight, training", "loader=packed", "speed"].median > 0
    assert rows["lowlight", "python -m loaders.pack", "packing"].median > 0


SHARED_MEMORY = """
import os, time
held = bytearray(os.urandom(1 << 20)) * 256
if os.fork() == 0:
    time.sleep(3)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is shared")
def test_memory_that_processes_share_is_counted_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", SHARED_MEMORY])
    assert 0.25 < entry_points.watch(process, gpus=[]).memory_gib < 0.4


def test_a_run_of_one_step_has_no_speed(tmp_path: Path) -> None:
    run = Run(tmp_path, TINY, (*LIGHT, "max_steps=1"))
    with pytest.raises(ValueError, match="it ended after its first step, which measures no speed"):
        entry_points.run_once(run, Subject("train.py", settings="loader=synthetic"))


def test_entry_points_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(entry_points, "scripts", lambda: ["train.py"])
    rows = run_tiny("entry_points", tmp_path, data_dir, *LIGHT)
    found = {quantity: row for (_, script, quantity), row in rows.items() if script == "train.py"}
    assert found["speed"].median > 0
    assert 0 <= found["data wait"].median <= 100
    assert 0.1 < found["peak memory"].median < 8
    assert found["final metric"].unit == "top1"
    if len(entry_points.cores()) > 1:
        assert rows[" ".join(LIGHT), COPIES, "speed"].num_devices > 1


def test_bottleneck_runs(tmp_path: Path, data_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)  # which takes half a minute
    rows = run_tiny("bottleneck", tmp_path, data_dir, *LIGHT)
    parts = [rows[" ".join(LIGHT), GIVEN, part].values for part in PARTS]
    whole = rows[" ".join(LIGHT), GIVEN, STEP].values
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-4)


def test_loop_overhead_runs(tmp_path: Path, data_dir: Path) -> None:
    rows = run_tiny("loop_overhead", tmp_path, data_dir, *LIGHT)
    for subject in ("bare loop", "train.py"):
        assert rows[" ".join(LIGHT), subject, "time per step"].median > 0


# The report


FIXED = {
    "loaders": [
        row("PIL + DataLoader", "50;50;50", num_workers=2, num_threads=0),
        row("limit: decoding alone", "200;200;200", settings="step=decode"),
        row(),
        row("loader=packed", "", note="not measured: no pack"),
    ],
    "workers": [
        *(
            row("PIL + DataLoader", samples, num_workers=count, num_threads=0)
            for count, samples in enumerate(["50;50;50", "48;48;48", "80;80;80"])
        ),
        row(),
        *(
            row("DataLoader", samples, case="sleeping items", num_workers=count, epoch_size=0)
            for count, samples in enumerate(["10;10;10", "10;10;10", "20;20;20"])
        ),
    ],
    "out_of_band": [
        row(
            "python -m loaders.pack", "30", quantity="packing", unit="s", note="1000 images, 9 MiB"
        ),
        *(row(case=f"caltech256, {mode}") for mode in ("loading only", "training")),
        *(
            row("loader=packed", "900;1000;1100", case=f"caltech256, {mode}")
            for mode in ("loading only", "training")
        ),
    ],
    "entry_points": [
        row(script, samples, case="digits", settings="loader=pytorch", num_devices=devices, **more)
        for script, devices, speed in [
            *(("train.py", 1, "100"), ("train_ddp.py", 1, "90"), ("train_ddp.py", 2, "171"))
        ]
        for samples, more in [
            (speed, {}),
            ("12.5", {"quantity": "data wait", "unit": "%"}),
            ("0.98", {"quantity": "final metric", "unit": "top1"}),
        ]
    ]
    + [
        row(COPIES, "180", case="digits", settings="loader=pytorch", num_devices=2),
    ],
    "bottleneck": [
        *(
            row(GIVEN, samples, case="digits", quantity=part, unit="ms")
            for part, samples in zip(
                PARTS, ["63;63;63", "0", "30;30;30", "0", "7;7;7"], strict=True
            )
        ),
        row(GIVEN, "100;100;100", case="digits", quantity=STEP, unit="ms"),
        row(SYNTHETIC, "30;30;30", case="digits", quantity=STEP, unit="ms"),
        row(GIVEN, "10;10;10", case="digits", quantity=SPEED),
        row("loader=dali loader.num_threads=2", "25;24;26", case="digits", quantity=SPEED),
        row("loader=pytorch loader.num_workers=2", "20;20;20", case="digits", quantity=SPEED),
    ],
    "loop_overhead": [
        *(
            row(loop, samples, case="digits", quantity="time per step", unit="ms")
            for loop, samples in (
                ("bare loop", "8;8;8"),
                ("bare loop with clip_grad_norm_", "10;10;10"),
                ("train.py", "10.1;10.1;10.2"),
                ("Lightning", "12;12;12"),
                ("accelerate", ""),
            )
        ),
    ],
    "alternatives": [
        row("PIL + DataLoader", "50;50;50", case="JPEGs"),
        row("WebDataset", "60;60;60", case="JPEGs"),
        row("limit: decoding alone", "125;125;125", case="JPEGs"),
        row("limit: decoding and resizing", "100;100;100", case="JPEGs"),
        row("loader=pytorch", "175;175;175", case="JPEGs"),
        row("loader=pytorch", "2.5", case="JPEGs", quantity="pixel difference", unit="of 255"),
        row("SPDL", "", case="JPEGs", note="not measured: spdl is not installed"),
    ],
}
EXPECTED = {
    "loaders": [
        "2x (loader=pytorch against PIL + DataLoader)",
        "5.1 min instead of 10.2 min",
    ],
    "workers": ["saves 38 % of its time with 2 workers", "2 workers are 2x as fast as none"],
    "out_of_band": ["10x as fast as loader=pytorch", "paid for after 3.3 epochs"],
    "entry_points": ["train_ddp.py with loader=pytorch on 2 95 %", "once: 90 % on 2", "12.5 %"],
    "bottleneck": [
        "input-bound: 63 % of the step waits for data (compute 30 %, compute slowed by loading 7 %)",
        "loader=dali loader.num_threads=2 makes it 2.50x as fast",
    ],
    "loop_overhead": [
        "backward and step alone: bare loop with clip_grad_norm_ 25 (25 to 25) %, train.py 26.2 (26.2",
        "Lightning 50 (50 to 50) %, accelerate not measured.",
    ],
    "alternatives": [
        "3.5x PIL + DataLoader, 140 % of decoding alone, 175 % of decoding and resizing; the",
        "WebDataset, is 1.2x",
        "SPDL",
    ],
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_report_is_drawn_from_fixed_rows(tmp_path: Path, benchmark: str) -> None:
    for measurement in FIXED[benchmark]:
        records.append(tmp_path / f"{benchmark}.csv", replace(measurement, benchmark=benchmark))
    text = report.draw(tmp_path).read_text()
    page = (tmp_path / "report.html").read_text()
    for expected in EXPECTED[benchmark]:
        assert expected in text
    pictures = sorted(tmp_path.glob("*.png"))
    assert pictures
    for picture in pictures:
        pixels = np.asarray(Image.open(picture).convert("L"))
        assert min(pixels.shape) > 100
        assert 0.005 < (pixels < 250).mean() < 0.9, "blank"
        assert f"]({picture.name})" in text
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "a CPU, 2 cores, 8 GiB memory; no GPU" in page


def test_report_without_results_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run python -m benchmarks"):
        report.draw(tmp_path)


def test_verdict_recommends_only_what_was_measured_to_be_faster() -> None:
    parts = [
        row(GIVEN, f"{ms};{ms}", quantity=part, unit="ms")
        for part, ms in [*((part, 1.0) for part in PARTS), (WAIT, 10.0), (COMPUTE, 9.0)][2:]
    ]
    slower = [row(GIVEN, "10;10", quantity=SPEED), row("loader=dali", "9;11", quantity=SPEED)]
    missing = [row(GIVEN, "1;1", quantity=part, unit="ms") for part in PARTS[1:2]]
    text = verdict([*missing, *parts, *slower])
    assert text.startswith("input-bound")
    assert "nothing that was tried makes it faster (loader=dali)" in text


def test_the_readme_shows_what_was_measured() -> None:
    text = (REPOSITORY / "README.md").read_text()
    [folder] = set(re.findall(r"\((benchmarks/results/[\w.-]+)/\w+\.png\)", text))
    assert text == readme.with_excerpt(text, REPOSITORY / folder), (
        f"run python -m benchmarks.readme {folder}"
    )
    for name in ("report.md", "report.html", *readme.PICTURES):
        assert (REPOSITORY / folder / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("share", "overrides", "expected"),
    [
        (0.05, [], "compute-bound: 5% of the time waiting for data"),
        (
            0.5,
            [],
            "input-bound: 50% of the time waiting for data; try loader.num_workers=auto, loader=dali",
        ),
        (0.5, ["loader=dali", "loader.num_workers=auto"], "waiting for data; try smaller images"),
    ],
)
def test_a_run_closes_with_a_short_verdict(share: float, overrides, expected: str) -> None:
    assert logger.verdict(share, make_config(*overrides)).endswith(expected)
