"""`predict.py` and `export.py` use what a run has trained, and the files need no repository."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import export
from conf.errors import UserError
from tasks.pictures import class_colours
from tests.formats import write_all
from tests.helpers import REPOSITORY, folder_with, has_ranks
from tests.images import (
    FOLDERS,
    digit_folders,
    reading,
    save,
    smooth,
    turned,
)
from tests.kinds import KINDS, READERS, common
from tests.processes import execute, train
from tests.results import summary_of
from tests.rows import rows

SHORT = ["log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
SMALL = [*SHORT, "model.kwargs.width=8"]
CROP = (24, 32)
# Task, kind of its data, options, folder of the validation images below that of the data, columns
# of the table, and the values in what an exported file answers.
TRAINED: list[tuple[str, str, str, str, str, Callable[[np.ndarray], np.ndarray]]] = [
    *rows(
        ("segmentation", "masks", "model=unet", "images", "image", lambda x: x.argmax(axis=-1)),
        ("restoration", "pairs", "model=nafnet", "test/blurry", "image", lambda x: 255 * x),
        needs="data=pairs",
    ),
    *rows(
        ("multilabel", "several labels", "loss.weights=auto", ".", "cat cow dog", np.asarray),
        ("regression", "numbers", "data.hflip=0.5", ".", "label", np.asarray),
        needs="data=table",
    ),
]


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", *rows("train_ddp_amp_ema.py")])
def test_the_validation_split_and_its_files_give_the_runs_metrics(script, tmp_path) -> None:
    """By any backend, to the last digit: the ranks evaluate with the same statistics of BatchNorm,
    although each trains with its own. Photos become grey for a model of grey digits; all are
    predicted, whatever the training left out, by a list that may be gone."""
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
    new = [*use, f"data.root={photos}", f"data.leave_out={tmp_path / 'gone.txt'}"]
    # DALI cannot read a PNG without its end, and leaves out no file that it has begun to read.
    loaders = [way for way in READERS if way != "dali"] if script == "train.py" else ["threads"]
    commands = [
        [script, f"output_dir={run}", *SMALL, "max_steps=30"],
        [*use, "split=val", f"out={val}"],
        *([*new, *READERS[x], f"out={tmp_path / x}"] for x in loaders),
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
        found = table(tmp_path / loader)
        assert [row["path"] for row in found] == sorted(str(path) for path in photos.rglob("*.*"))
        broken = {Path(row["path"]).name: row["prediction"] for row in found if row["error"]}
        assert broken == {"050.png": "", "100b.jpg": "", "note.jpg": ""}
        for row in found:
            if not row["error"]:
                other = expected[int(Path(row["path"]).stem)]
                assert row["prediction"] == other["prediction"]
                same = pytest.approx(float(other["probability"]), abs=1e-4)
                assert float(row["probability"]) == same


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind", "more", "folder", "names", "values_of"), TRAINED)
def test_all_predict_the_same(task, kind, more, folder, names, values_of, tmp_path) -> None:
    """The run, any folder and the exported file: of the validation split, among them files that no
    run has seen."""
    root, run, photos = tmp_path / "data", tmp_path / "run", tmp_path / "photos"
    data = KINDS[kind](root)
    shutil.copytree(root / folder, photos)
    first = next(photos.rglob("*.png"))
    (photos / "below").mkdir()
    Image.open(first).convert("RGB").save(photos / "below" / "more.jpg")
    (photos / "broken.jpg").write_bytes(b"no image")
    val, some = tmp_path / "val", tmp_path / "some"
    options = [*SHORT, *data.options, *common(root), f"task={task}", more]
    options += ["global_batch_size=4", f"data.crop=[{CROP[0]},{CROP[1]}]"]
    commands = [
        ["train.py", f"output_dir={run}", *options],
        ["predict.py", f"run={run}", "split=val", f"out={val}"],
        ["predict.py", f"run={run}", f"data.root={photos}/below/..", f"out={some}"],
        ["export.py", f"run={run}", "format=torch", f"out={run}.pt2"],
    ]
    trained, printed, *_ = [execute(command, tmp_path / "prints") for command in commands]
    assert ("do not move with data.hflip:" in trained) == ("data.hflip=0.5" in options)
    assert metrics_in(printed) == summary_of(run)["best"]
    columns = names.split()
    makes_images = columns == ["image"]
    tables = (out / "predictions.csv" if makes_images else out for out in (val, some))
    expected, others = map(table, tables)
    assert list(expected[0]) == list(others[0]) == ["path", *columns, "error"]
    assert [Path(row["path"]).name for row in others if row["error"]] == ["broken.jpg"]
    again = {Path(row["path"]).name: [row[column] for column in columns] for row in others}
    assert len(again) == len(list(photos.rglob("*.*")))

    extra = {"metadata.json": ""}
    program: Any = torch.export.load(f"{run}.pt2", extra_files=extra).module()
    assert '"in_channels": "3"' in extra["metadata.json"]

    def values(cells: list[str]) -> np.ndarray:
        return np.asarray(Image.open(cells[0]) if makes_images else cells, float)

    for row in expected:
        predicted, same = [row[name] for name in columns], again[Path(row["path"]).name]
        image = np.asarray(Image.open(row["path"]).convert("RGB"))
        y, x = (image.shape[0] - CROP[0]) // 2, (image.shape[1] - CROP[1]) // 2
        cut = torch.tensor(image[None, y : y + CROP[0], x : x + CROP[1]])
        exported = values_of(program(cut)[0].detach().numpy())
        for answer in (values(same), exported):
            is_other = abs(values(predicted) - answer) > (1 if task == "restoration" else 1e-4)
            assert is_other.mean() < 0.01
        if task == "segmentation":
            colours = Image.open(predicted[0]).getpalette()
            assert colours is not None
            assert colours[:9] == class_colours(3).flatten().tolist()
    if makes_images:
        assert again["more.jpg"] == [str(some / "below" / "more.jpg.png")]
        assert not (some / "broken.jpg.png").exists()
        use = ["predict.py", f"run={run}", f"data.root={photos}", f"out={run / '../photos'}"]
        assert "data.root" in execute(use, tmp_path / "prints", code=2)  # would be replaced


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A folder with a run and, in `digits`, its data: the test split has each image of the
    validation twice."""
    folder = tmp_path_factory.mktemp("digits")
    root = digit_folders(folder / "digits", range(4), 60, 30)
    for path in root.glob("val/*/*"):
        place = root / "test" / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for copy in "ab":
            shutil.copy(path, place / f"{copy}-{path.name}")
    data = [*FOLDERS, *reading(root), "data.resize=null", "data.crop=28", "data.on_error=skip"]
    train(
        "train.py", folder / "run", *data, *SMALL, "loss.weights=auto", "model.channels_last=true"
    )
    return folder


def test_the_test_split_is_evaluated_on_any_number_of_ranks(digits: Path, tmp_path) -> None:
    summary, tables = summary_of(digits / "run"), set()
    expected = {f"test/{name}": summary[f"val/{name}"] for name in ("loss", "top1")}
    assert not any("test" in name for name in summary)
    for num_ranks in [1, *rows(2, needs="runtime.distributed")]:
        out = tmp_path / f"{num_ranks}.csv"
        use = ["predict.py", f"run={digits / 'run'}", "split=test", f"out={out}"]
        printed = execute(use, tmp_path / "prints", num_ranks)
        metrics = json.loads(out.with_suffix(".metrics.json").read_text())
        assert metrics_in(printed) == metrics == pytest.approx(expected, abs=1e-6)
        tables.add(out.read_text())
    [text] = tables
    assert text.count("/test/") == 4 * 2 * 30


MISTAKES = {  # what is wrong, and what the message names
    "predict.py run=outputs/nowhere": "run=outputs/nowhere",
    "predict.py data.root=nowhere": "data.root=nowhere",
    "predict.py split=tset": "split=tset",
    "predict.py split=val data.split_seed=1": "data.split_seed=1: split=val is that of the run",
    "predict.py split=val data.fold=": "data.fold=: split=val is that of the run",
    "predict.py": "out=",
    "predict.py device=cpu": "data.root=",
    "predict.py split=val model.kwargs.width=16": "model.kwargs",
    "predict.py data.root=data loader=synthetic": "loader=pytorch",
    "predict.py split=val out=data": "out=data is a folder",
    "predict.py split=val data.root=OTHERS": "output 0: digit 0 then, digit 1 now",
    "export.py format=onyx": "format=onyx",
    "export.py format=torch out=mine.pt": "ends in .pt2",
    "export.py format=safetensors data.root=OTHERS": "output 0: digit 0 then, digit 1 now",
}


@pytest.mark.slow
def test_mistakes_and_other_classes_end_in_a_few_lines(digits: Path, tmp_path: Path) -> None:
    others = shutil.copytree(digits / "digits", tmp_path / "others")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", ["resize=[40,32] background=[10,200,70]", "resize=30 crop=[20,24] exif=false"]
)
def test_the_example_predicts_what_predict_does(changes: str, digits: Path, tmp_path) -> None:
    """For photos of any shape and of all formats, upright or not."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    photos, file, out = tmp_path / "photos", tmp_path / "mine.onnx", tmp_path / "out.csv"
    write_all(photos, background=[255, 255, 255])
    for number, orientation in enumerate([1, 6, 3]):
        image = smooth(number, 240 + 40 * number, 280)
        for form in ("jpg", "png"):
            save(photos / f"{number}.{form}", image, exif=turned(orientation))
    use = [f"run={digits / 'run'}", *(f"data.{change}" for change in changes.split())]
    commands = [
        ["predict.py", *use, f"data.root={photos}", f"out={out}", "data.reduced_decoding=false"],
        ["export.py", *use, "format=onnx", f"out={file}"],
        ["examples/use_onnx.py", str(file), *map(str, sorted(photos.iterdir()))],
    ]
    *_, printed = [execute(command, tmp_path / "prints") for command in commands]
    found = {path: answer for path, *answer in (line.split("\t") for line in printed.splitlines())}
    expected = table(out)
    assert len(expected) == len(found) == len(list(photos.iterdir()))
    for row in expected:
        name, probability = found[row["path"]]
        assert name == row["prediction"], row["path"]
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(digits, tmp_path, monkeypatch) -> None:
    """One of the weights alone has the names of the classes."""

    def other(exported: Any, images: Any, metadata: Any, file: Path) -> Any:
        file.write_text("wrong")
        return lambda images: exported(images) + 2e-4

    monkeypatch.setitem(export.FORMATS, "other", other)
    use = ["export.py", f"run={digits / 'run'}", f"out={tmp_path / 'mine'}"]
    monkeypatch.setattr("sys.argv", [*use, "format=other"])
    with pytest.raises(UserError, match=r"2\.0e-04"):
        export.main()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", [*use, "format=safetensors"])
    export.main()
    with safe_open(tmp_path / "mine", "pt") as weights:
        assert json.loads(weights.metadata()["classes"]) == [f"digit {n}" for n in range(4)]
