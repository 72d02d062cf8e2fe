"""`predict.py` uses what a run has trained; for every task, the exported file answers alike."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.common import class_colours
from tests.helpers import REPOSITORY, folder_with, has_ranks
from tests.images import FOLDERS, common, digit_folders, reading, save
from tests.kinds import KINDS, READERS
from tests.processes import execute, train
from tests.results import summary_of
from tests.rows import rows


class Trained(NamedTuple):
    """A task with data that it is trained on, and what its predictions are."""

    task: str
    kind: str
    """Of data: a row of KINDS."""
    options: list[str]
    folder: str
    """Below the data's, that of the validation images."""
    columns: list[str]
    tolerance: float = 1e-4
    values_of: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Function of what an exported file answers."""
    has_palette: bool = False


TRAINED: list[Trained] = [
    *rows(
        Trained(
            *("segmentation", "masks"),
            ["model=unet", "model.kwargs.num_levels=2", "loss.weights=auto"],
            folder="images",
            columns=["image"],
            values_of=lambda answer: answer.argmax(axis=-1),
            has_palette=True,
        ),
        Trained(
            *("restoration", "pairs", ["model=nafnet", "model.kwargs.num_blocks=[1,1]"]),
            folder="test/blurry",
            columns=["image"],
            tolerance=1,
            values_of=lambda answer: 255 * answer,
        ),
        needs="data=pairs",
    ),
    *rows(
        Trained(
            *("multilabel", "several labels", ["model.kwargs.width=8", "loss.weights=auto"], "."),
            columns=["cat", "cow", "dog"],
        ),
        Trained(
            *("regression", "numbers", ["model.kwargs.width=8", "data.hflip=0.5"], "."),
            columns=["label"],
        ),
        needs="data=table",
    ),
]


SHORT = ["log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
SMALL = [*SHORT, "model.kwargs.width=8"]


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", *rows("train_ddp_amp_ema.py")])
def test_the_validation_split_gives_the_runs_metrics_and_its_files_the_same_table_by_any_backend(
    script: str, tmp_path
) -> None:
    """To the last digit: the ranks evaluate with the same statistics of BatchNorm, although each
    trains with its own. Photos become grey for a model of grey digits."""
    run, photos, val = tmp_path / "run", tmp_path / "photos", tmp_path / "val.csv"
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        labels = arrays["val_labels"]
        for number, image in enumerate(arrays["val_images"][:101]):
            save(photos / f"part {number // 40}" / f"{number:03d}.png", image)
    cut = photos / "part 1" / "050.png"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (photos / "part 0" / "note.jpg").write_text("no image")
    (photos / "part 2" / "100b.jpg").write_bytes(b"")
    (photos / "part 2" / "README").touch()

    use = [str(REPOSITORY / "predict.py"), f"run={run}", f"data.cache_dir={tmp_path}"]
    of_photos = [*use, f"data.root={photos}"]
    # DALI cannot read a PNG without its end, and leaves out no file that it has begun to read.
    loaders = [way for way in READERS if way != "dali"] if script == "train.py" else ["threads"]
    commands = [
        [script, f"output_dir={run}", *SMALL, "max_steps=30"],
        [*use, "split=val", f"out={val}"],
        *([*of_photos, *READERS[loader], f"out={tmp_path / loader}"] for loader in loaders),
    ]
    here = folder_with(tmp_path / "s", script)
    _, printed, *others = [
        execute(command, tmp_path / f"answers-{number}", 1 + has_ranks(script), here)
        for number, command in enumerate(commands)
    ]
    assert all("103 samples, 3 of them broken" in text for text in others)
    assert all("1 no ending" in text for text in others)
    for prints in tmp_path.glob("answers-*-1.txt"):  # of the other rank
        assert "samples" not in prints.read_text()
    metrics, summary = metrics_in(printed), summary_of(run)
    assert metrics == summary["best"] == {key: summary[key] for key in metrics}
    expected = table(val)
    right = np.array([int(row["prediction"]) for row in expected]) == labels
    assert right.mean() == metrics["val/top1"]
    for loader in loaders:
        rows = table(tmp_path / loader)
        assert [row["path"] for row in rows] == sorted(str(path) for path in photos.rglob("*.*"))
        broken = {Path(row["path"]).name: row["prediction"] for row in rows if row["error"]}
        assert broken == {"050.png": "", "100b.jpg": "", "note.jpg": ""}
        for row in rows:
            if not row["error"]:
                other = expected[int(Path(row["path"]).stem)]
                assert row["prediction"] == other["prediction"]
                same = pytest.approx(float(other["probability"]), abs=1e-4)
                assert float(row["probability"]) == same


CROP = (24, 32)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED, ids=[case.task for case in TRAINED])
def test_the_run_any_folder_and_the_exported_file_give_the_same_predictions(
    case: Trained, tmp_path: Path
) -> None:
    """Those of the validation split, among them files that no run has seen."""
    root, run, photos = tmp_path / "data", tmp_path / "run", tmp_path / "photos"
    data = KINDS[case.kind](root)
    shutil.copytree(root / case.folder, photos)
    first = next(photos.rglob("*.png"))
    (photos / "below").mkdir()
    Image.open(first).convert("RGB").save(photos / "below" / "more.jpg")
    (photos / "broken.jpg").write_bytes(b"no image")
    val, some = tmp_path / "val", tmp_path / "some"
    options = [*SHORT, *data.options, *common(root), f"task={case.task}", *case.options]
    options += ["global_batch_size=4", f"data.crop=[{CROP[0]},{CROP[1]}]"]
    commands = [
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={val}"],
        ["predict.py", f"run={run}", f"data.root={photos}/below/..", f"out={some}"],
    ]
    commands.append(["export.py", f"run={run}", "format=torch", f"out={run}.pt2"])
    trained, printed, *_ = [execute(command, tmp_path / "prints") for command in commands]
    assert ("do not move with data.hflip:" in trained) == ("data.hflip=0.5" in options)
    assert metrics_in(printed) == summary_of(run)["best"]
    makes_images = case.columns == ["image"]
    rows, others = (table(out / "predictions.csv" if makes_images else out) for out in (val, some))
    assert list(rows[0]) == list(others[0]) == ["path", *case.columns, "error"]
    assert [Path(row["path"]).name for row in others if row["error"]] == ["broken.jpg"]
    again = {Path(row["path"]).name: [row[column] for column in case.columns] for row in others}
    assert len(again) == len(list(photos.rglob("*.*")))

    extra = {"metadata.json": ""}
    program: Any = torch.export.load(f"{run}.pt2", extra_files=extra).module()
    assert '"in_channels": "3"' in extra["metadata.json"]

    def values(cells: list[str]) -> np.ndarray:
        return np.asarray(Image.open(cells[0]) if makes_images else cells, float)

    for row in rows:
        predicted, same = [row[name] for name in case.columns], again[Path(row["path"]).name]
        image = np.asarray(Image.open(row["path"]).convert("RGB"))
        y, x = (image.shape[0] - CROP[0]) // 2, (image.shape[1] - CROP[1]) // 2
        shown = torch.tensor(image[None, y : y + CROP[0], x : x + CROP[1]])
        exported = case.values_of(program(shown)[0].detach().numpy())
        for answer in (values(same), exported):
            is_other = abs(values(predicted) - answer) > case.tolerance
            assert is_other.mean() < 0.01
        if case.has_palette:
            colours = Image.open(predicted[0]).getpalette()
            assert colours is not None
            assert colours[:9] == class_colours(3).flatten().tolist()
    if makes_images:
        assert again["more.jpg"] == [str(some / "below" / "more.jpg.png")]
        assert not (some / "broken.jpg.png").exists()
        use = ["predict.py", f"run={run}", f"data.root={photos}", f"out={run / '../photos'}"]
        printed = execute(use, tmp_path / "prints", code=2)
        assert "data.root" in printed  # whose images would be replaced


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A folder with a run, its data in `digits`, and a copy whose validation split is the test
    split."""
    folder = tmp_path_factory.mktemp("digits")
    root, copy = digit_folders(folder / "digits", range(4), 60, 30), folder / "copy"
    shutil.move(digit_folders(folder / "more", range(4), 50, 0) / "train", root / "test")
    shutil.copytree(root / "train", copy / "train")
    shutil.copytree(root / "test", copy / "val")
    data = [*FOLDERS, *reading(root), "data.resize=null", "data.crop=28"]
    data += ["data.on_error=skip"]
    train("train.py", folder / "run", *data, *SMALL, "loss.weights=auto")
    return folder


def test_the_test_split_is_evaluated_on_any_number_of_ranks(digits: Path, tmp_path) -> None:
    """As on the copy of the data."""
    use = ["predict.py", f"run={digits / 'run'}"]
    test, val = tmp_path / "test.csv", tmp_path / "val.csv"
    same = [*use, "split=val", f"data.root={digits / 'copy'}", f"out={val}"]
    printed = execute([*use, "split=test", f"out={test}"], tmp_path / "prints")
    execute(same, tmp_path / "prints")
    metrics, expected = (
        json.loads(path.with_suffix(".metrics.json").read_text()) for path in (test, val)
    )
    assert list(metrics) == ["test/loss", "test/top1"]
    assert [*metrics.values()] == [*expected.values()]
    assert json.dumps(metrics) in printed
    assert test.read_text().count("/test/") == 4 * 50
    assert not any("test" in name for name in summary_of(digits / "run"))
    for num_ranks in rows(2, needs="runtime.distributed"):
        again = tmp_path / f"{num_ranks}.csv"
        execute([*use, "split=test", f"out={again}"], tmp_path / "prints", num_ranks)
        of_ranks = json.loads(again.with_suffix(".metrics.json").read_text())
        assert of_ranks == pytest.approx(metrics, abs=1e-6)
        assert again.read_text() == test.read_text()


MISTAKES = {  # what is wrong, and what the message names
    "predict.py run=outputs/nowhere": "run=outputs/nowhere",
    "predict.py data.root=nowhere": "data.root=nowhere",
    "predict.py split=tset": "split=tset",
    "predict.py split=val data.split_seed=1": "data.split_seed=1: split=val is that of the run",
    "predict.py": "out=",
    "predict.py device=cpu": "data.root=",
    "predict.py split=val model.kwargs.width=16": "model.kwargs",
    "predict.py data.root=data loader=synthetic": "loader=pytorch",
    "predict.py split=val out=data": "out=data is a folder",
    "predict.py split=val data.root=OTHERS": "output 0: digit 0 then, digit 1 now",
    "export.py format=onyx": "format=onyx",
    "export.py format=safetensors data.root=OTHERS": "output 0: digit 0 then, digit 1 now",
}


@pytest.mark.slow
def test_mistakes_and_other_classes_end_in_a_few_lines(digits: Path, tmp_path: Path) -> None:
    others = shutil.copytree(digits / "copy", tmp_path / "others")
    for folder in others.glob("*/digit 0"):  # as many classes as before, in another order
        folder.rename(folder.with_name("digit 9"))
    run, out = digits / "run", tmp_path / "out"
    for line, message in MISTAKES.items():
        script, *given = line.replace("OTHERS", str(others)).split()
        command = [script, f"run={run}", *[f"out={out}"] * bool(given), *given]
        text = execute(command, tmp_path / "prints", code=2)
        assert message in text, line
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 3, text
    assert not out.exists()
