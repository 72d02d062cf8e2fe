"""`predict.py` uses what a run has trained; for every task, the exported file answers alike."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tasks.palette import palette
from tests.helpers import REPOSITORY, answers_to, checkpoint_of, has_ranks, run_all, summary_of
from tests.torchrun import TWO_RANKS, torchrun

SHORT = ["log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]
SMALL = [*SHORT, "model.kwargs.width=8"]
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BACKENDS = {
    "pytorch": ["loader.num_workers=0"],
    "workers": ["loader.num_workers=1"],
    "dali": ["loader=dali"],
}
BROKEN = ["050.png", "100b.jpg", "note.jpg"]


def metrics_in(printed: str) -> dict[str, float]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def export_of(run: Path, *overrides: str) -> list[str]:
    return ["export.py", f"run={run}", "format=torch", f"out={run}.pt2", *overrides]


def program_of(run: Path) -> tuple[Any, dict[str, Any]]:  # part: export
    """The exported program, which takes one image (H, W, C), and the description of its target."""
    extra = {"metadata.json": ""}
    program = torch.export.load(f"{run}.pt2", extra_files=extra).module()
    target = json.loads(json.loads(extra["metadata.json"])["target"])
    return lambda image: program(torch.from_numpy(image.copy())[None])[0].detach().numpy(), target


def backends() -> dict[str, list[str]]:
    """Overrides by the name of a backend that is installed."""
    try:
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError:
        return {name: BACKENDS[name] for name in BACKENDS if name != "dali"}
    return BACKENDS


def write_digits(split: str, count: int, path_of: Any) -> list[int]:
    """Write digits of the embedded data; returns what they are."""
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        images, labels = (arrays[f"{split}_{kind}"][:count] for kind in ("images", "labels"))
    for number, image in enumerate(images):
        path = path_of(number, NAMES[labels[number]])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return labels.tolist()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Path, list[int]]:
    """100 digits and three broken files below folders, and the digits in the order of the files."""
    root = tmp_path_factory.mktemp("photos")
    labels = write_digits("val", 101, lambda n, _: root / f"part {n // 40}" / f"{n:03d}.png")
    whole = (root / "part 1" / "050.png").read_bytes()
    (root / "part 1" / "050.png").write_bytes(whole[: len(whole) // 2])
    (root / "part 0" / "note.jpg").write_text("no image")
    (root / "part 2" / "100b.jpg").write_bytes(b"")
    return root, labels


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Training data in class folders whose names are words."""
    root = tmp_path_factory.mktemp("digits")
    for split, count in [("train", 1500), ("val", 103)]:
        write_digits(split, count, lambda n, name, split=split: root / split / name / f"{n}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, digits: Path, photos) -> Path:
    """A run on RGB images, and beside it the tables of its predictions on photos, by backend."""
    folder = tmp_path_factory.mktemp("run")
    data = ["data=imagefolder", f"data.root={digits}", "data.resize=32", "data.crop=[28,28]"]
    options = [*SMALL, *data, f"data.cache_dir={folder}", "global_batch_size=50", "epochs=3"]
    use = ["predict.py", f"run={folder / 'mine'}", f"data.root={photos[0]}"]
    commands = [["train.py", f"output_dir={folder / 'mine'}", *options]]
    commands += [[*use, *BACKENDS[name], f"out={folder / name}.csv"] for name in backends()]
    _, *printed = run_all(commands, folder)
    assert all("103 images, 3 of them broken" in text for text in printed)
    return folder / "mine"


def test_a_folder_of_images_becomes_a_table_with_class_names(photos, run) -> None:
    root, labels = photos
    rows = table(run.parent / "pytorch.csv")
    assert list(rows[0]) == [
        *("path", "prediction", "probability"),
        *(f"{what}{i}" for i in range(2, 6) for what in ("top", "probability")),
        "error",
    ]
    assert [row["path"] for row in rows] == sorted(str(path) for path in root.rglob("*.*"))
    broken = [row for row in rows if row["error"]]
    assert sorted(Path(row["path"]).name for row in broken) == BROKEN
    assert {row["prediction"] for row in broken} == {""}
    whole = [row for row in rows if not row["error"]]
    right = [row["prediction"] == NAMES[labels[int(Path(row["path"]).stem)]] for row in whole]
    assert np.mean(right) > 0.6
    for row in whole:
        shares = [float(row[key]) for key in row if key.startswith("probability")]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1.00001
        classes = {row["prediction"], *(row[f"top{i}"] for i in range(2, 6))}
        assert len(classes & set(NAMES)) == 5


def test_any_backend_and_number_of_ranks_give_the_same_table(run, photos, tmp_path) -> None:
    one, two = run.parent / "pytorch.csv", tmp_path / "two.csv"
    for name in backends():
        for row, other in zip(table(one), table(run.parent / f"{name}.csv"), strict=True):
            assert (row["path"], bool(row["error"])) == (other["path"], bool(other["error"]))
            if not row["error"]:  # DALI's resizing rounds differently
                same = pytest.approx(float(other["probability"]), abs=0.02)
                assert float(row["probability"]) == same
    use = ["predict.py", f"run={run}", f"data.root={photos[0]}", f"out={two}"]
    run_all([use], tmp_path, num_ranks=2)
    assert two.read_bytes() == one.read_bytes()


def test_torchrun_starts_it_with_a_backend_that_meets_a_broken_file(run, photos, tmp_path) -> None:
    out, prints = tmp_path / "predictions.csv", tmp_path / "prints.txt"
    loader = list(backends().values())[-1]
    use = ["predict.py", f"run={run}", f"data.root={photos[0]}", f"out={out}", *loader]
    process = torchrun([*TWO_RANKS, *use], REPOSITORY, prints)
    process.join(240)
    assert process.exitcode == 0, prints.read_text()
    assert prints.read_text().count("3 of them broken") == 1
    assert sorted(Path(row["path"]).name for row in table(out) if row["error"]) == BROKEN


@pytest.mark.parametrize("script", ["train_ema.py", "train_ddp_amp.py"])
def test_the_validation_split_gives_the_runs_metrics_and_files_the_same_predictions(
    script: str, photos, tmp_path
) -> None:
    """To the last digit; photos become grey for a model of grey digits."""
    folder, val = tmp_path / "run", tmp_path / "val.csv"
    outs = [tmp_path / f"{name}.csv" for name in backends()] * (script == "train_ema.py")
    use = ["predict.py", f"run={folder}", f"data.cache_dir={tmp_path}"]
    commands = [
        [script, f"output_dir={folder}", *SMALL, "max_steps=30"],
        [*use, "split=val", f"out={val}"],
        *([*use, f"data.root={photos[0]}", *BACKENDS[out.stem], f"out={out}"] for out in outs),
    ]
    _, printed, *_ = run_all(commands, tmp_path, num_ranks=2 if has_ranks(script) else 1)
    metrics, summary = metrics_in(printed), summary_of(folder)
    assert metrics == summary["best"] == {key: summary[key] for key in metrics}
    expected = table(val)
    with np.load(REPOSITORY / "data" / "mnist_mini.npz") as arrays:
        labels = arrays["val_labels"]
    right = [int(row["prediction"]) == label for row, label in zip(expected, labels, strict=True)]
    assert np.mean(right) == metrics["val/top1"]
    for out in outs:
        whole = [row for row in table(out) if not row["error"]]
        assert len(whole) == 100
        for row in whole:
            other = expected[int(Path(row["path"]).stem)]
            assert row["prediction"] == other["prediction"]
            assert float(row["probability"]) == pytest.approx(float(other["probability"]), abs=1e-4)


def train_and_use(
    tmp_path: Path, options: list[str], inputs: Path, ending: str = "", *overrides: str
) -> dict[str, float]:
    """Train `run`, export it, and predict its validation split as `val` and these inputs as `all`.

    Returns:
        The metrics of the validation split.
    """
    run, cache = tmp_path / "run", f"data.cache_dir={tmp_path}"
    commands = [
        ["train.py", f"output_dir={run}", cache, *SHORT, "global_batch_size=4", *options],
        ["predict.py", f"run={run}", "split=val", f"out={tmp_path / 'val'}{ending}"],
        ["predict.py", f"run={run}", f"data.root={inputs}", f"out={tmp_path / 'all'}{ending}"],
    ]
    commands[-1] += overrides
    commands += [export_of(run, *overrides)]  # part: export
    _, printed, *_ = run_all(commands, tmp_path)
    metrics = metrics_in(printed)
    assert metrics == summary_of(run)["best"]
    return metrics


def test_a_restorer_writes_images(tmp_path) -> None:
    pytest.importorskip("tasks.restoration")
    pytest.importorskip("models.nafnet")
    random, run, photos = np.random.default_rng(0), tmp_path / "run", tmp_path / "photos"
    for number in range(12):
        name = f"scene/{number:02d}.{'jpg' if number else 'png'}"
        for folder in (tmp_path / "pairs/input", tmp_path / "pairs/target", photos):
            (folder / "scene").mkdir(parents=True, exist_ok=True)
            small = random.integers(0, 255, (4, 6, 3), np.uint8)
            Image.fromarray(small).resize((48, 32)).save(folder / name)
    (photos / "scene" / "07.jpg").write_bytes(b"no image")
    options = ["data=pairs", f"data.root={tmp_path / 'pairs'}", "data.val_count=3"]
    options += ["model=nafnet", "model.kwargs.width=4", "task=restoration", "data.crop=[16,16]"]
    train_and_use(tmp_path, options, photos, "", "data.crop=[32,48]")
    one, two = tmp_path / "all", tmp_path / "two"
    use = ["predict.py", f"run={run}", f"data.root={photos}", "data.crop=null"]
    run_all([[*use, f"out={two}"]], tmp_path, num_ranks=2)
    [(code, printed)] = answers_to([[*use, f"out={run / '../photos'}"]], tmp_path)
    assert code == 2
    assert "data.root" in printed  # whose images would be replaced
    rows = table(one / "predictions.csv")
    assert list(rows[0]) == ["path", "image", "error"]
    assert [bool(row["error"]) for row in rows] == [number == 7 for number in range(12)]
    whole = [row for row in rows if not row["error"]]
    names = [f"scene/{n:02d}.{'jpg.png' if n else 'png'}" for n in range(12) if n != 7]
    assert [row["image"] for row in whole] == [str(one / name) for name in names]
    assert {Image.open(path).size for path in tmp_path.glob("val/**/*.png")} == {(16, 16)}
    for name, row in zip(names, whole, strict=True):
        image, other = (np.asarray(Image.open(out / name)).astype(int) for out in (one, two))
        assert image.shape == (32, 48, 3)
        assert abs(image - other).max() <= 1
        # After one epoch the net corrects little: it is the image, not noise or a black square.
        assert abs(np.asarray(Image.open(row["path"]).convert("RGB")) - image).mean() < 30
    assert not (two / "scene" / "07.jpg.png").exists()
    answer = program_of(run)[0](np.array(Image.open(whole[0]["path"])))  # part: export
    image = np.array(Image.open(whole[0]["image"])) / 255
    assert abs(answer - image).max() < 0.6 / 255  # part: export


@pytest.mark.parametrize(
    ("task", "columns", "kind"),
    [
        ("multilabel", ["image", "light", "shade"], "several labels"),
        ("regression", ["label"], "numbers"),
    ],
)
def test_several_labels_and_numbers_are_columns(
    tmp_path, task: str, columns: list[str], kind: str
) -> None:
    """A table of images, some lighter than others."""
    pytest.importorskip(f"tasks.{task}")
    root, lines, is_number = tmp_path / "images", ["path,label"], task == "regression"
    root.mkdir()
    for number in range(24):
        image = np.full((16, 16, 3), 10 * number, np.uint8)
        image[:8] //= 1 + number % 2
        Image.fromarray(image).save(root / f"{number:02d}.png")
        labels = [name for name, has in [("light", number > 11), ("shade", number % 2)] if has]
        label = number / 24 if is_number else ";".join([*labels, "image"])
        lines.append(f"{number:02d}.png,{label}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    data = ["data=table", f"data.root={root}", f"data.table={tmp_path / 'labels.csv'}"]
    data += ["data.val_count=5", "data.crop=[16,16]", "data.resize=null"]
    options = [*SMALL, *data, f"task={task}", "epochs=4"]
    options += [] if is_number else ["loss.weights=auto"]  # part: loss_weights
    metrics = train_and_use(tmp_path, options, root, ".csv")
    rows, val = {row["path"]: row for row in table(tmp_path / "all.csv")}, tmp_path / "val.csv"
    assert len(rows) == 24
    program, target = program_of(tmp_path / "run")  # part: export
    assert target["kind"] == kind  # part: export
    for row in table(val):
        assert list(row) == ["path", *columns, "error"]
        numbers, again = ([float(r[name]) for name in columns] for r in (row, rows[row["path"]]))
        assert again == pytest.approx(numbers, abs=1e-4)
        assert is_number or all(0 <= number <= 1 for number in numbers)
        answer = program(np.array(Image.open(row["path"])))  # part: export
        assert answer == pytest.approx(numbers, abs=1e-4)  # part: export
    if is_number:
        errors = [abs(float(r["label"]) - int(Path(r["path"]).stem) / 24) for r in table(val)]
        assert np.mean(errors) == pytest.approx(metrics["val/mae"], abs=1e-4)


def test_masks_are_written_as_indices_in_colours(tmp_path) -> None:
    """A run on the middle of images that are bright where their masks are 2, dark elsewhere."""
    pytest.importorskip("tasks.segmentation")
    pytest.importorskip("models.unet")
    random, scenes = np.random.default_rng(0), tmp_path / "scenes"
    for number in range(12):
        mask = 2 * random.integers(0, 2, (9, 10), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
        image = (100 * mask[..., None] + random.integers(0, 50, (36, 40, 3))).astype(np.uint8)
        for kind, array in [("images", image), ("masks", mask)]:
            path = scenes / kind / f"{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    options = ["data=masks", f"data.root={scenes}", "data.crop=[24,32]", "data.val_count=4"]
    options += ["loss.weights=auto"]  # part: loss_weights
    options += ["task=segmentation", "model=unet", "model.kwargs.width=4"]
    options += ["model.kwargs.num_levels=2", "epochs=3", "optimizer.lr=0.01"]
    metrics, right = train_and_use(tmp_path, options, scenes / "images"), []
    assert len(list(tmp_path.glob("all/*.png"))) == 12
    program, target = program_of(tmp_path / "run")  # part: export
    assert target["kind"] == "masks"  # part: export
    for row in table(tmp_path / "val" / "predictions.csv"):
        assert list(row) == ["path", "image", "error"]
        picture = Image.open(row["image"])
        assert (picture.mode, picture.size) == ("P", (32, 24))
        assert picture.getpalette()[:9] == palette(3).flatten().tolist()  # type: ignore[index]
        image, mask_file = np.asarray(picture), row["path"].replace("images", "masks")
        right.append(image == np.asarray(Image.open(mask_file))[6:30, 4:36])
        again = np.asarray(Image.open(tmp_path / "all" / Path(row["path"]).name))
        assert np.mean(again == image) > 0.99
        answer = program(np.array(Image.open(row["path"]))[6:30, 4:36])  # part: export
        np.testing.assert_allclose(answer.sum(axis=-1), 1, rtol=1e-5)  # part: export
        assert np.mean(answer.argmax(axis=-1) == image) > 0.99  # part: export
    assert len(right) == 4
    assert np.mean(right) == pytest.approx(metrics["val/pixel_accuracy"])


def test_the_names_of_the_classes_travel_with_the_run(run) -> None:
    expected = sorted(NAMES)
    assert json.loads((run / "run.json").read_text())["classes"] == expected
    with safe_open(run / "checkpoints" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["classes"]) == expected
    assert json.loads(metadata["target"]) == {"kind": "labels", "classes": expected}
    assert json.loads(metadata["in_channels"]) == 3
    facts = checkpoint_of(run)["facts"]
    assert (facts["classes"], facts["precision"]) == (expected, "float32")


MISTAKES = {  # what is wrong, and what the message names
    "run=outputs/nowhere": "run=outputs/nowhere",
    "data.root=nowhere": "data.root=nowhere",
    "split=test": "split=test",
    "": "data.root=",
    "split=val data.hflop=1": "data.hflop=1",
    "split=val epochs=many": "epochs=many",
    "split=val model.kwargs.width=16": "model.kwargs",
    "data.root=data loader=synthetic": "loader=pytorch",
    "data.root=runtime": "data.root=runtime",
    "out": "key=value",
    "out=": "out=",
}
DAMAGED = [  # files of a run
    ("predict.py", "split=val", "run.json", "[]"),
    ("predict.py", "split=val", "config.yaml", "data: {root: 'http://host/${oc.env:PATH}'}"),
    ("export.py", "format=onnx", "config.yaml", "[1"),
]
OTHER_CLASSES = [
    ("predict.py", "split=val"),
    ("export.py", "format=safetensors"),
]


def test_mistakes_damaged_files_and_other_classes_end_in_a_few_lines_that_name_them(
    run, digits, photos, tmp_path
) -> None:
    out, commands, expected = tmp_path / "out", [], list(MISTAKES.values())
    for line in MISTAKES:
        given = [] if line == "out=" else [f"out={out}", *line.split()]
        commands.append(["predict.py", f"run={run}", *given])
    for number, (script, option, file, content) in enumerate(DAMAGED):
        copy = shutil.copytree(run, tmp_path / str(number))
        (copy / file).write_text(content)
        commands.append([script, f"run={copy}", f"out={out}", option])
        expected.append(str(copy / file))
    root = shutil.copytree(digits, tmp_path / "digits", copy_function=os.link)
    for split in ("train", "val"):  # as many classes as before, in another order
        (root / split / "eight").rename(root / split / "zzz")
    data = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    for script, option in OTHER_CLASSES:
        commands.append([script, f"run={run}", *data, f"out={out}", option])
        expected.append("output 0: eight then, five now")
    # Without the best weights, the newest checkpoint is used.
    copy = shutil.copytree(run, tmp_path / "newest")
    (copy / "checkpoints" / "model.safetensors").unlink()
    rest = ["predict.py", f"run={copy}", f"data.root={photos[0]}", f"out={tmp_path / 'out.csv'}"]
    # The names of the classes are there before the first step.
    failing = [f"output_dir={tmp_path / 'run'}", "optimizer.lr=1e30", "max_bad_steps=1"]
    commands.append(["train.py", *SMALL, *failing, "log.every_steps=1"])
    *answers, (failed, _), (code, printed) = answers_to([*commands, rest], tmp_path)
    for command, message, (status, text) in zip(commands[:-1], expected, answers, strict=True):
        assert status == 2, command
        assert message in text, command
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 3, text
    assert not out.exists()
    assert (failed, code) == (2, 0)
    assert Path(printed.rpartition("weights: ")[2].strip()).match("step-*.pt")
    started = json.loads((tmp_path / "run" / "run.json").read_text())
    assert started["classes"] == list("0123456789")
