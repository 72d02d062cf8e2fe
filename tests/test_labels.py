"""`data=table`: what the cells of a table become, and what is said of those that are wrong."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.check import check
from loaders.class_counts import class_counts
from loaders.image_loaders import build_loaders
from loaders.index import Index, build_index
from loaders.read import read_image
from loaders.targets import Labels, MultiLabels, RegressionTargets
from tests.helpers import events_of, make_config, summary_of, train

CPU = torch.device("cpu")
NUM_IMAGES = 12


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """NUM_IMAGES images, of which each shows its number."""
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        path = root / f"day {number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), 20 * number, np.uint8)).save(path)
    return root


def path_of(number: int) -> str:
    return f"day {number % 2}/{number}.png"


def write(tmp_path: Path, header: str, labels: list[str], name: str = "labels.csv") -> Path:
    """A table of the first images with these cells behind the path."""
    lines = [header, *(f"{path_of(number)},{cells}" for number, cells in enumerate(labels))]
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def options_of(images: Path, table: Path, *overrides: str) -> list[str]:
    options = ["data=table", f"data.root={images}", f"data.table={table}", "data.val_count=4"]
    options += [f"data.cache_dir={table.parent / 'cache'}", "data.crop=[16,16]", "data.resize=null"]
    return [*options, "data.mean=null", "data.std=null", "global_batch_size=4", *overrides]


def index_of(images: Path, table: Path, *overrides: str) -> tuple[Index, Index]:
    return build_index(make_config(*options_of(images, table, *overrides)).data)


def labels_by_number(index: Index) -> dict[int, list[str]]:
    """The names of each image's classes."""
    target = index.target
    assert isinstance(target, Labels | MultiLabels)
    rows = target.values if target.values.ndim == 2 else np.eye(len(target.classes))[target.values]
    return {
        int(Path(name).stem): [target.classes[i] for i in np.flatnonzero(row)]
        for name, row in zip(index.files[0], rows, strict=True)
    }


NAMES = ["cat", "dog", "cow", "dog"] * 3


def test_names_are_classes(images: Path, tmp_path) -> None:
    train, val = index_of(images, write(tmp_path, "path,label", NAMES))
    assert isinstance(train.target, Labels)
    assert train.target.classes == ("cat", "cow", "dog")
    assert (len(train), len(val)) == (8, 4)
    both = labels_by_number(train) | labels_by_number(val)
    assert both == {number: [name] for number, name in enumerate(NAMES)}


def test_integers_are_classes_in_the_order_of_their_values(images: Path, tmp_path) -> None:
    cells = ["10", "9", "2", "10"] * 3
    train, val = index_of(images, write(tmp_path, "path,label", cells))
    assert isinstance(train.target, Labels)
    assert train.target.classes == ("2", "9", "10")
    both = labels_by_number(train) | labels_by_number(val)
    assert both == {number: [cell] for number, cell in enumerate(cells)}


def test_names_with_semicolons_are_several_labels(images: Path, tmp_path) -> None:
    cells = ["cat;dog", "dog", ";", "cow; cat"] * 3
    train, val = index_of(images, write(tmp_path, "path,label", cells))
    assert isinstance(train.target, MultiLabels)
    assert train.target.classes == ("cat", "cow", "dog")
    expected = [["cat", "dog"], ["dog"], [], ["cat", "cow"]] * 3
    assert labels_by_number(train) | labels_by_number(val) == dict(enumerate(expected))


def test_columns_of_0_and_1_are_several_labels(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,cat,dog", ["1,0", "0,1", "1,1", "0,0"] * 3)
    train, val = index_of(images, table, "data.label_columns=[dog,cat]")
    assert isinstance(train.target, MultiLabels)
    assert train.target.classes == ("dog", "cat")
    expected = [["cat"], ["dog"], ["dog", "cat"], []] * 3
    assert labels_by_number(train) | labels_by_number(val) == dict(enumerate(expected))


@pytest.mark.parametrize("columns", [["a"], ["b", "a"]])
def test_numbers_are_numbers(images: Path, tmp_path, columns: list[str]) -> None:
    table = write(tmp_path, "path,a,b", [f"{n}.5,{-n}" for n in range(NUM_IMAGES)])
    for index in index_of(images, table, f"data.label_columns=[{','.join(columns)}]"):
        target = index.target
        assert isinstance(target, RegressionTargets)
        assert target.names == tuple(columns)
        assert target.values.dtype == np.float32
        numbers = [int(Path(name).stem) for name in index.files[0]]
        expected = [[{"a": n + 0.5, "b": -n}[name] for name in columns] for n in numbers]
        assert target.values.tolist() == expected


def test_the_kind_can_be_said(images: Path, tmp_path) -> None:
    integers = write(tmp_path, "path,label", ["0", "1", "1", "7"] * 3)
    train, _ = index_of(images, integers, "data.label_kind=numbers")
    assert isinstance(train.target, RegressionTargets)
    names = write(tmp_path, "path,label", NAMES)
    train, _ = index_of(images, names, "data.label_kind=several")
    assert isinstance(train.target, MultiLabels)


@pytest.mark.parametrize("name", ["val", "test"])
def test_the_column_split_splits(images: Path, tmp_path, name: str) -> None:
    splits = ["train", "train", "train", name] * 3
    cells = [f"{label},{split}" for label, split in zip(NAMES, splits, strict=True)]
    train, val = index_of(images, write(tmp_path, "path,label,split", cells))
    assert sorted(labels_by_number(val)) == [3, 7, 11]
    assert sorted(labels_by_number(train)) == [n for n in range(NUM_IMAGES) if n % 4 != 3]


def test_lines_of_test_are_left_out_beside_some_of_val(images: Path, tmp_path) -> None:
    splits = ["train", "val", "test", "train"] * 3
    cells = [f"{label},{split}" for label, split in zip(["a", "b"] * 6, splits, strict=True)]
    train, val = index_of(images, write(tmp_path, "path,label,split", cells))
    assert (len(train), len(val)) == (6, 3)
    assert sorted(labels_by_number(val)) == [1, 5, 9]


def test_counts_of_classes(images: Path, tmp_path) -> None:
    train, _ = index_of(images, write(tmp_path, "path,label", ["a", "a", "b", "a"] * 3))
    labels = [names[0] for names in labels_by_number(train).values()]
    assert class_counts(train).tolist() == [labels.count("a"), labels.count("b")]
    several, _ = index_of(images, write(tmp_path, "path,label", ["a;b", "b", "a;b", "b"] * 3))
    assert class_counts(several)[1] == 8
    numbers, _ = index_of(images, write(tmp_path, "path,label", ["0.5", "1.5"] * 6))
    with pytest.raises(ValueError, match="are numbers, which have no classes"):
        class_counts(numbers)


def test_the_log_tells_what_is_predicted(images: Path, tmp_path) -> None:
    cells = {"2 classes (a, b)": ["a", "b"], "any of 2 classes (a, b) each": ["a;b", "b"]}
    cells["1 numbers (label)"] = ["0.5", "1.5"]
    for text, two in cells.items():
        table = write(tmp_path, "path,label", two * 6)
        train, _ = build_loaders(make_config(*options_of(images, table)), CPU)
        assert train.info.description[0] == (f"labels: 8 training and 4 validation samples, {text}")


def test_quotes_byte_order_marks_and_blank_lines_are_read(images: Path, tmp_path) -> None:
    text = "\ufeffpath,label\r\n" + "".join(
        f'"{path_of(n)}","a, or\n b {n % 2}"\r\n\r\n' for n in range(NUM_IMAGES)
    )
    table = tmp_path / "labels.csv"
    table.write_text(text, encoding="utf-8", newline="")
    train, _ = index_of(images, table)
    assert isinstance(train.target, Labels)
    assert train.target.classes == ("a, or\n b 0", "a, or\n b 1")


def wrong(header: str, good: str, line: int, cells: str) -> tuple[str, list[str]]:
    """A table of which one line is wrong, counted from 1 with the header."""
    rows = [good] * NUM_IMAGES
    rows[line - 2] = cells
    return header, rows


@pytest.mark.parametrize(
    ("table", "overrides", "message"),
    [
        (wrong("path,label", "a", 5, ""), [], r"has 1 empty cells: line 5 \(label\); fill them in"),
        (wrong("path,label", "a", 5, '"\n"'), [], r"has 1 empty cells: line 5 \(label\)"),
        (
            wrong("path,a,b", "1,0", 3, "1,"),
            ["data.label_columns=[a,b]"],
            r"has 1 empty cells: line 3 \(b\)",
        ),
        (
            wrong("path,label,split", "a,train", 4, "b,valid"),
            [],
            r"1 lines have an unknown split in .*: line 4 \(valid\); use train, val, test",
        ),
        (
            wrong("path,label,split", "a,train", 4, "a,train"),
            [],
            "has 12 lines of train and 0 of val or test; it needs some of both",
        ),
        (
            wrong("path,label,split", "a,train", 4, "b,val"),
            [],
            r"1 lines of the validation split have labels that no training line has in .*: "
            r"line 4 \(b\); correct them or add training lines",
        ),
        (
            wrong("path,label,split", "a;b,train", 4, "a;x;y,val"),
            [],
            r"labels that no training line has in .*: line 4 \(x;y\)",
        ),
        (
            wrong("path,label", "0.5", 7, "n/a"),
            [],
            r"1 cells are no finite numbers in .*: line 7 \(n/a\); correct them, or set data.label_kind",
        ),
        (wrong("path,label", "0.5", 7, "inf"), [], r"line 7 \(inf\)"),
        (
            wrong("path,a,b", "1,0", 6, "2,x"),
            ["data.label_columns=[a,b]"],
            r"cells are no finite numbers in .*: line 6 \(x\)",
        ),
        (
            wrong("path,a,b", "1,0", 6, "2,0"),
            ["data.label_columns=[a,b]", "data.label_kind=several"],
            r"1 cells of a are neither 0 nor 1 in .*: line 6 \(2\)",
        ),
        (
            wrong("path,label", "a", 6, "b,c"),
            [],
            r"1 lines of .* do not have 2 cells as the header does: line 6 \(3\); put quotes",
        ),
        (
            wrong("file,label", "a", 6, "b"),
            [],
            "has no column path; its columns are file, label: set data.path_column",
        ),
        (
            wrong("path,label", "a", 6, "b"),
            ["data.label_columns=[name,label]"],
            "has no column name; its columns are path, label: set data.path_column and data.label",
        ),
        (wrong("path,label", "a", 6, "a"), [], r"has 1 classes \(a\); it needs 2 or more"),
        (wrong("path,label", ";", 6, ";"), [], "has 0 classes .*; it needs 1 or more"),
        (
            wrong("path,label", "a", 6, "b"),
            ["data.label_kind=words"],
            "data.label_kind=words is unknown; use one of auto, classes, several, numbers",
        ),
        (
            wrong("path,a,b", "x,y", 6, "x,z"),
            ["data.label_columns=[a,b]", "data.label_kind=classes"],
            "names 2 columns, but classes stand in one; name one column",
        ),
        (("path,label", []), [], "has no line below its header"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    table: tuple[str, list[str]], overrides: list[str], message: str, images: Path, tmp_path
) -> None:
    with pytest.raises(ValueError, match=message):
        index_of(images, write(tmp_path, *table), *overrides)


def test_missing_files_and_double_paths_are_named_with_their_lines(images: Path, tmp_path) -> None:
    table = tmp_path / "labels.csv"
    lines = [f"{path_of(n)},{n % 2}" for n in range(NUM_IMAGES)]
    table.write_text("\n".join(["path,label", *lines, "day 1/99.png,1", "none.png,0"]))
    message = r"2 files are missing in .*: line 14 \(.*day 1/99.png\), line 15 \(.*none.png\)"
    with pytest.raises(ValueError, match=message):
        index_of(images, table)
    table.write_text("\n".join(["path,label", *lines, "./day 1/3.png,1"]))
    message = r"lists 1 paths twice: line 14 \(day 1/3.png, as line 5\); keep one line of each"
    with pytest.raises(ValueError, match=message):
        index_of(images, table)


def test_a_root_may_be_written_in_any_way(images: Path, tmp_path, monkeypatch) -> None:
    table = write(tmp_path, "path,label", NAMES)
    expected = index_of(images, table)[0]
    monkeypatch.chdir(images)
    for root in (".", "./", f"../{images.name}", f".//../{images.name}", f"{images}//."):
        index = index_of(images, table, f"data.root={root}")[0]
        assert np.array_equal(read_image(index, 3), read_image(expected, 3))
        assert [*map(os.path.realpath, index.files[0])] == [*expected.files[0]]
        assert index.fingerprint == expected.fingerprint
    lines = table.read_text().replace("day 0/2.png", str(images / "day 0/2.png"))
    table.write_text(lines)
    assert len(index_of(images, table)[0]) == len(expected)
    message = rf"1 paths are absolute, .*: line 4 \(.*/2.png\); set data.root={images}$"
    with pytest.raises(ValueError, match=message):
        index_of(images, table, "data.root=.")
    shutil.copy(images / "day 0/2.png", tmp_path / "private.png")
    outside = os.path.relpath(tmp_path / "private.png", images)
    table.write_text(table.read_text().replace(str(images / "day 0/2.png"), outside))
    with pytest.raises(ValueError, match=r"1 paths lead out of data.root .*private.png"):
        index_of(images, table)


def test_of_many_wrong_lines_the_first_are_named(images: Path, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"12 empty cells: line 2 .*, line 7 \(label\) and 6 more"):
        index_of(images, write(tmp_path, "path,label", [""] * NUM_IMAGES))


def test_a_missing_table_or_folder_is_named(images: Path, tmp_path) -> None:
    with pytest.raises(ValueError, match="data.table=.*none.csv is not a file"):
        index_of(images, tmp_path / "none.csv")
    table = write(tmp_path, "path,label", NAMES)
    with pytest.raises(ValueError, match="data.root=.*nowhere is not a folder"):
        index_of(tmp_path / "nowhere", table)
    with pytest.raises(ValueError, match="needs data.table=FILE"):
        index_of(images, table, "data.table=null")
    table.write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(ValueError, match="cannot be read below line .*; save it as CSV in UTF-8"):
        index_of(images, table)


def test_parquet_is_read_like_csv(images: Path, tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    paths = [path_of(n) for n in range(NUM_IMAGES)]

    def saved(name: str, **columns: list) -> Path:
        parquet.write_table(pyarrow.table({"path": paths, **columns}), tmp_path / name)
        return tmp_path / name

    names = saved("names.parquet", label=NAMES)
    csv = write(tmp_path, "path,label", NAMES)
    for one, other in zip(index_of(images, names), index_of(images, csv), strict=True):
        assert labels_by_number(one) == labels_by_number(other)
    train, _ = index_of(images, saved("integers.parquet", label=[3, 1] * 6))
    assert isinstance(train.target, Labels)
    train, _ = index_of(images, saved("numbers.parquet", label=[0.5, 1.25] * 6))
    assert isinstance(train.target, RegressionTargets)
    columns = "data.label_columns=[a,b]"
    train, _ = index_of(
        images, saved("several.parquet", a=[True, False] * 6, b=[1, 0] * 6), columns
    )
    assert isinstance(train.target, MultiLabels)
    train, _ = index_of(images, saved("lists.parquet", label=[["a", "b"], []] * 6))
    assert isinstance(train.target, MultiLabels)
    with pytest.raises(ValueError, match=r"1 empty cells: row 3 \(label\)"):
        index_of(images, saved("empty.parquet", label=["a", "b", None, *["a"] * 9]))


def test_without_pyarrow_the_message_says_what_to_do(images: Path, tmp_path, monkeypatch) -> None:
    table = tmp_path / "labels.parquet"
    table.touch()
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="pip install pyarrow, or save the table as CSV"):
        index_of(images, table)


def test_check_decodes_the_files_of_the_table(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES[:8])
    assert check(make_config(*options_of(images, table)).data) == (8, {})


@pytest.mark.parametrize(
    ("script", "task", "label_of", "metric"),
    [
        ("train.py", "classification", lambda n: "light" if n >= 6 else "dark", "val/top1"),
        (
            "train_ddp.py",
            "multilabel",
            lambda n: ";".join(["light"] * (n > 5) + ["any"]),
            "val/map",
        ),
        ("train_ddp.py", "regression", lambda n: f"{20 * n / 255:.3f}", "val/r2"),
    ],
)
def test_every_task_of_labels_learns_from_a_table(
    script: str, task: str, label_of, metric: str, images: Path, tmp_path
) -> None:
    """How light an image is; validated on the training images, unequal numbers of them per rank."""
    pytest.importorskip(f"tasks.{task}")
    lines = ["path,label,split"]
    for number in range(NUM_IMAGES):
        lines.append(f"{path_of(number)},{label_of(number)},train")
    copies = tmp_path / "images"
    shutil.copytree(images, copies)
    for number in range(1, NUM_IMAGES):
        shutil.copy(images / path_of(number), copies / f"val{number}.png")
        lines.append(f"val{number}.png,{label_of(number)},val")
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(lines))
    options = options_of(copies, table, f"task={task}", "data.mean=[0.5]", "data.std=[0.25]")
    options += ["epochs=25", "model.kwargs.width=8", "model.kwargs.batch_norm=false"]
    printed = train(script, tmp_path / "run", *options, "optimizer.lr=0.01", "data.hflip=0.5")
    assert ("do not move with data.hflip:" in printed) == (task == "regression")
    summary = summary_of(tmp_path / "run")
    assert summary["best"][metric] > 0.9
    pictures = {"train/inputs", "val/predictions"} | (
        {"val/confusion"} if task == "classification" else set()
    )
    events = events_of(tmp_path / "run")
    assert set(events.Tags()["images"]) == pictures
    assert events.Images("train/inputs")[0].height > 16  # gaps between the images of a grid
