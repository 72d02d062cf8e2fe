"""`predict.py` uses what a run has trained; for every task, the exported file answers alike."""

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.palette import palette
from tests.helpers import REPOSITORY, answers_to, folder_with, has_ranks, run_all, summary_of
from tests.images import KINDS, common, digit_folders, save
from tests.torchrun import TWO_RANKS, Torchrun

SHORT = ["log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
SMALL = [*SHORT, "model.kwargs.width=8"]
BACKENDS = {
    "pytorch": ["loader=pytorch"],
    "workers": ["loader.num_workers=1"],
    "dali": ["loader=dali"],
}


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def val_labels() -> list[int]:
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        return arrays["val_labels"].tolist()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """The first 101 validation digits below folders, one of which is broken, and two more files."""
    root = tmp_path_factory.mktemp("photos")
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        for number, image in enumerate(arrays["val_images"][:101]):
            save(root / f"part {number // 40}" / f"{number:03d}.png", image)
    cut = root / "part 1" / "050.png"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (root / "part 0" / "note.jpg").write_text("no image")
    (root / "part 2" / "100b.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return digit_folders(tmp_path_factory.mktemp("digits"), range(10), 150, 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits: Path, photos) -> Path:
    """A run on RGB images, and beside it the tables of its predictions on photos, by backend."""
    folder = tmp_path_factory.mktemp("run")
    data = ["data=imagefolder", f"data.root={digits}", "data.resize=32", "data.crop=[28,28]"]
    options = [*SMALL, *data, f"data.cache_dir={folder}", "global_batch_size=50", "epochs=3"]
    use = ["predict.py", f"run={folder / 'mine'}", f"data.root={photos}"]
    commands = [["train.py", f"output_dir={folder / 'mine'}", *options]]
    commands += [[*use, *loader, f"out={folder / name}.csv"] for name, loader in BACKENDS.items()]
    _, *printed = run_all(commands, folder)
    assert all("103 samples, 3 of them broken" in text for text in printed)
    return folder / "mine"


def test_a_folder_of_images_becomes_the_same_table_by_any_backend(photos, run, val_labels) -> None:
    rows = table(run.parent / "pytorch.csv")
    assert list(rows[0]) == [
        *("path", "prediction", "probability"),
        *(f"{what}{i}" for i in range(2, 6) for what in ("top", "probability")),
        "error",
    ]
    assert [row["path"] for row in rows] == sorted(str(path) for path in photos.rglob("*.*"))
    broken = [row for row in rows if row["error"]]
    names = {Path(row["path"]).name for row in broken}
    assert names == {"050.png", "100b.jpg", "note.jpg"}
    assert {row["prediction"] for row in broken} == {""}
    whole = [row for row in rows if not row["error"]]
    true = [f"digit {val_labels[int(Path(row['path']).stem)]}" for row in whole]
    assert np.mean([row["prediction"] == name for row, name in zip(whole, true, strict=True)]) > 0.6
    for row in whole:
        shares = [float(row[key]) for key in row if key.startswith("probability")]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.00001
        classes = {row["prediction"], *(row[f"top{i}"] for i in range(2, 6))}
        assert len(classes & {f"digit {number}" for number in range(10)}) == 5
    for backend in BACKENDS:
        for row, other in zip(rows, table(run.parent / f"{backend}.csv"), strict=True):
            assert (row["path"], bool(row["error"])) == (other["path"], bool(other["error"]))
            if not row["error"]:  # DALI's resizing rounds differently
                same = pytest.approx(float(other["probability"]), abs=0.02)
                assert float(row["probability"]) == same


def test_two_ranks_that_torchrun_starts_write_the_same_table(run, photos, tmp_path) -> None:
    out = tmp_path / "predictions.csv"
    name, loader = list(BACKENDS.items())[-1]
    use = ["predict.py", f"run={run}", f"data.root={photos}", f"out={out}", *loader]
    with Torchrun([*TWO_RANKS, *use], REPOSITORY, tmp_path / "prints.txt") as torchrun:
        assert torchrun.wait() == 0, torchrun.text()
    assert torchrun.text().count("3 of them broken") == 1
    assert out.read_bytes() == (run.parent / f"{name}.csv").read_bytes()


@pytest.mark.parametrize("script", ["train_ema.py", "train_ddp_amp_ema.py"])
def test_the_validation_split_gives_the_runs_metrics_and_files_the_same_predictions(
    script: str, photos, val_labels, tmp_path
) -> None:
    """To the last digit: the ranks evaluate with the same statistics of BatchNorm, although each
    trains with its own. Photos become grey for a model of grey digits."""
    folder, val = tmp_path / "run", tmp_path / "val.csv"
    outs = [tmp_path / f"{name}.csv" for name in BACKENDS] * (script == "train_ema.py")
    use = [str(REPOSITORY / "predict.py"), f"run={folder}", f"data.cache_dir={tmp_path}"]
    commands = [
        [script, f"output_dir={folder}", *SMALL, "max_steps=30"],
        [*use, "split=val", f"out={val}"],
        *([*use, f"data.root={photos}", *BACKENDS[out.stem], f"out={out}"] for out in outs),
    ]
    here = folder_with(tmp_path / "s", script)
    _, printed, *_ = run_all(commands, tmp_path, 1 + has_ranks(script), here)
    metrics, summary = metrics_in(printed), summary_of(folder)
    assert metrics == summary["best"] == {key: summary[key] for key in metrics}
    expected = table(val)
    right = np.array([int(row["prediction"]) for row in expected]) == val_labels
    assert right.mean() == metrics["val/top1"]
    for out in outs:
        whole = [row for row in table(out) if not row["error"]]
        assert len(whole) == 100
        for row in whole:
            other = expected[int(Path(row["path"]).stem)]
            assert row["prediction"] == other["prediction"]
            assert float(row["probability"]) == pytest.approx(float(other["probability"]), abs=1e-4)


CROP = (24, 32)
CASES = {
    "multilabel": ("several labels", ["model.kwargs.width=8"], "."),
    "regression": ("numbers", ["model.kwargs.width=8"], "."),
    "restoration": ("pairs", ["model=nafnet", "model.kwargs.width=4"], "test/blurry"),
    "segmentation": ("masks", ["model=unet", "model.kwargs.width=4"], "images"),
}
"""Of each task, the kind of data (of `tests.images`), options and, below the data's folder, that of
the inputs of its validation split."""
PIXELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "restoration": lambda answer: 255 * answer,
    "segmentation": lambda answer: answer.argmax(axis=-1),
}
"""Tasks whose predictions are images, and how these follow from what the exported file answers."""
COLUMNS = {"multilabel": ["cat", "cow", "dog"], "regression": ["label"]}


@pytest.mark.parametrize("task", [task for task in CASES if CASES[task][0] in KINDS])
def test_the_run_any_folder_and_the_exported_file_give_the_same_predictions(
    task: str, tmp_path: Path
) -> None:
    """Those of the validation split, among them files that no run has seen."""
    pytest.importorskip(f"tasks.{task}")
    kind, options, below = CASES[task]
    if "model=" in options[0]:
        pytest.importorskip(f"models.{options[0].partition('=')[2]}")
    root, run, photos = tmp_path / "data", tmp_path / "run", tmp_path / "photos"
    data = KINDS[kind](root)
    shutil.copytree(root / below, photos)
    first = next(photos.rglob("*.png"))
    (photos / "below").mkdir()
    Image.open(first).convert("RGB").save(photos / "below" / "more.jpg")
    (photos / "broken.jpg").write_bytes(b"no image")
    ending = ".csv" if task in COLUMNS else ""
    val, some = (tmp_path / f"{name}{ending}" for name in ("val", "some"))
    options = [*SHORT, *data.options, *common(root), f"task={task}", *options]
    options += ["global_batch_size=4", f"data.crop=[{CROP[0]},{CROP[1]}]"]
    if task in ("multilabel", "segmentation"):  # part: loss_weights
        options += ["loss.weights=auto"]
    options += ["data.hflip=0.5"] * (task == "regression")
    commands = [
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={val}"],
        ["predict.py", f"run={run}", f"data.root={photos}/below/..", f"out={some}"],
    ]
    commands += [["export.py", f"run={run}", "format=torch", f"out={run}.pt2"]]  # part: export
    trained, printed, *_ = run_all(commands, tmp_path)
    assert ("do not move with data.hflip:" in trained) == (task == "regression")
    assert metrics_in(printed) == summary_of(run)["best"]
    columns = COLUMNS.get(task, ["image"])
    rows = table(val if ending else val / "predictions.csv")
    others = table(some if ending else some / "predictions.csv")
    assert list(rows[0]) == list(others[0]) == ["path", *columns, "error"]
    assert [Path(row["path"]).name for row in others if row["error"]] == ["broken.jpg"]
    again = {Path(row["path"]).name: [row[column] for column in columns] for row in others}
    assert len(again) == len([path for path in photos.rglob("*.*")])

    def values(cells: list[str]) -> np.ndarray:
        return np.asarray(Image.open(cells[0]) if task in PIXELS else cells, float)

    program = torch.export.load(f"{run}.pt2").module()  # part: export
    for row in rows:
        predicted, same = [row[column] for column in columns], again[Path(row["path"]).name]
        answers = [values(same)]
        image = np.asarray(Image.open(row["path"]).convert("RGB"))  # part: export
        y, x = (image.shape[0] - CROP[0]) // 2, (image.shape[1] - CROP[1]) // 2  # part: export
        cut = torch.tensor(image[None, y : y + CROP[0], x : x + CROP[1]])  # part: export
        answer = program(cut)[0].detach().numpy()  # part: export
        answers += [PIXELS.get(task, np.asarray)(answer)]  # part: export
        for answer in answers:
            is_other = abs(values(predicted) - answer) > (1 if task == "restoration" else 1e-4)
            assert is_other.mean() < 0.01
        if task == "segmentation":
            colours = Image.open(predicted[0]).getpalette()
            assert colours is not None
            assert colours[:9] == palette(3).flatten().tolist()
    if not ending:
        assert again["more.jpg"] == [str(some / "below" / "more.jpg.png")]
        assert not (some / "broken.jpg.png").exists()
        use = ["predict.py", f"run={run}", f"data.root={photos}", f"out={run / '../photos'}"]
        [(code, printed)] = answers_to([use], tmp_path)
        assert code == 2
        assert "data.root" in printed  # whose images would be replaced


MISTAKES = {  # what is wrong, and what the message names
    "run=outputs/nowhere": "run=outputs/nowhere",
    "data.root=nowhere": "data.root=nowhere",
    "split=test": "split=test",
    "": "data.root=",
    "split=val data.hflop=1": "data.hflop=1",
    "split=val model.kwargs.width=16": "model.kwargs",
    "data.root=data loader=synthetic": "loader=pytorch",
    "data.root=runtime": "data.root=runtime",
    "split=val out=data": "out=data is a folder",
    "out": "key=value",
    "out=": "out=",
}
OTHER_CLASSES = [("predict.py", "split=val"), ("export.py", "format=safetensors")]


def test_mistakes_and_other_classes_end_in_a_few_lines_that_name_them(
    run, digits, photos, tmp_path
) -> None:
    out, commands, expected = tmp_path / "out", [], list(MISTAKES.values())
    for line in MISTAKES:
        given = [] if line == "out=" else [f"out={out}", *line.split()]
        commands.append(["predict.py", f"run={run}", *given])
    root = shutil.copytree(digits, tmp_path / "digits", copy_function=os.link)
    for split in ("train", "val"):  # as many classes as before, in another order
        (root / split / "digit 0").rename(root / split / "zzz")
    data = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    for script, option in OTHER_CLASSES:
        commands.append([script, f"run={run}", *data, f"out={out}", option])
        expected.append("output 0: digit 0 then, digit 1 now")
    answers = answers_to(commands, tmp_path)
    for command, message, (status, text) in zip(commands, expected, answers, strict=True):
        assert status == 2, command
        assert message in text, command
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 3, text
    assert not out.exists()
