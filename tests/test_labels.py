"""`data=table`: what the cells of a table become, and which of them are refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.class_counts import class_counts
from loaders.image_loaders import build_loaders
from loaders.index import Index, build_index
from loaders.read import read_image
from tests.helpers import make_config, refused

NUM_IMAGES = 12
NAMES = ["cat", "dog", "cow", "dog"] * 3
SEVERAL = [["cat", "dog"], ["dog"], [], ["cat", "cow"]]
PAIR, AUTO = "data.label_columns=[a,b]", "data.label_kind=auto"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """NUM_IMAGES images, of which each shows its number."""
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        path = root / path_of(number)
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), 20 * number, np.uint8)).save(path)
    return root


def path_of(number: int) -> str:
    return f"day {number % 2}/{number}.png"


def write(tmp_path: Path, header: str, labels: list[str]) -> Path:
    """A table of the first images with these cells behind the path."""
    lines = [header, *(f"{path_of(number)},{cells}" for number, cells in enumerate(labels))]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "labels.csv"


def options_of(images: Path, table: Path, *overrides: str) -> list[str]:
    options = ["data=table", f"data.root={images}", f"data.table={table}", "data.val_count=4"]
    options += [f"data.cache_dir={table.parent / 'cache'}", "data.crop=[16,16]", "data.resize=null"]
    return [*options, "data.mean=null", "data.std=null", "global_batch_size=4", *overrides]


def index_of(images: Path, table: Path, *overrides: str) -> tuple[Index, Index]:
    return build_index(make_config(*options_of(images, table, *overrides)).data)


def labels_by_number(index: Index) -> dict[int, list]:
    """The names of each image's classes, or its numbers."""
    target: Any = index.target
    values = target.values.tolist()
    if target.kind == "several labels":
        names = np.array(target.classes)
        values = [list(names[row == 1]) for row in target.values]
    elif target.kind == "labels":
        values = [[target.classes[label]] for label in values]
    numbers = [int(Path(name).stem) for name in index.files[0]]
    return dict(zip(numbers, values, strict=True))


def table_with(columns: dict[str, list[Any]], form: str, tmp_path: Path) -> Path:
    """A table with these cells behind the paths, which repeat."""
    count = NUM_IMAGES // len(next(iter(columns.values())))
    columns = {name: cells * count for name, cells in columns.items()}
    if form == "csv":
        rows = zip(*columns.values(), strict=True)
        return write(tmp_path, f"path,{','.join(columns)}", [",".join(map(text, r)) for r in rows])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [path_of(number) for number in range(NUM_IMAGES)]
    parquet.write_table(pyarrow.table({"path": paths, **columns}), tmp_path / "labels.parquet")
    return tmp_path / "labels.parquet"


def text(cell: Any) -> str:
    if isinstance(cell, list):
        return "; ".join(cell) or ";"
    return str(int(cell) if isinstance(cell, bool) else cell)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("columns", "override", "names", "expected"),
    [
        ({"label": NAMES[:4]}, AUTO, "cat,cow,dog", [["cat"], ["dog"], ["cow"], ["dog"]]),
        ({"label": [10, 9, 2, 10]}, AUTO, "2,9,10", [["10"], ["9"], ["2"], ["10"]]),
        ({"label": SEVERAL}, AUTO, "cat,cow,dog", SEVERAL),
        ({"b": [0, 1], "a": [True, False]}, PAIR, "a,b", [["a"], ["b"]]),
        ({"label": [0.5, 1.25]}, AUTO, "label", [[0.5], [1.25]]),
        ({"b": [-1.0, 2.0], "a": [0.5, 1.0]}, PAIR, "a,b", [[0.5, -1], [1, 2]]),
        ({"label": [0, 7]}, "data.label_kind=numbers", "label", [[0], [7]]),
        ({"label": ["a", "b"]}, "data.label_kind=several", "a,b", [["a"], ["b"]]),
    ],
)
def test_cells_become_classes_several_labels_or_numbers(
    columns: dict[str, list], override: str, names: str, expected, form: str, images: Path, tmp_path
) -> None:
    cfg = make_config(*options_of(images, table_with(columns, form, tmp_path), override))
    loader, other = build_loaders(cfg, torch.device("cpu"))
    target: Any = loader.index.target
    assert ",".join(target.names if target.kind == "numbers" else target.classes) == names
    by_number = labels_by_number(loader.index) | labels_by_number(other.index)
    assert (len(loader.index), len(other.index)) == (8, 4)
    assert by_number == {n: expected[n % len(expected)] for n in range(NUM_IMAGES)}
    if target.kind != "numbers":  # part: loss_weights
        labels = [label for several in labels_by_number(loader.index).values() for label in several]
        assert class_counts(loader.index).tolist() == [labels.count(c) for c in target.classes]
    about = loader.info.description[0]
    assert all(part in about for part in ["8 training", "4 validation", names.replace(",", ", ")])


@pytest.mark.parametrize(
    ("splits", "name"),
    [
        (["train", "train", "train", "val"], "val"),
        (["train", "train", "train", "test"], "test"),
        (["train", "val", "test", "train"], "val"),  # of test and val, val is used
    ],
)
def test_the_column_split_splits(splits: list[str], name: str, images: Path, tmp_path) -> None:
    cells = [f"{'ab'[n % 2]},{splits[n % 4]}" for n in range(NUM_IMAGES)]
    table = write(tmp_path, "path,label,split", cells)
    for number in range(NUM_IMAGES):
        if splits[number % 4] not in ("train", name):  # nor has a file in neither split to exist
            table.write_text(table.read_text().replace(path_of(number), f"none/{number}.png"))
    both = index_of(images, table)
    for index, split in zip(both, ("train", name), strict=True):
        numbers = [n for n in range(NUM_IMAGES) if splits[n % 4] == split]
        assert sorted(labels_by_number(index)) == numbers


def test_quotes_byte_order_marks_and_blank_lines_are_read(images: Path, tmp_path) -> None:
    lines = [f'"{path_of(n)}","a, or\n b {n % 2}"\r\n\r\n' for n in range(NUM_IMAGES)]
    table = tmp_path / "labels.csv"
    table.write_text("\ufeffpath,label\r\n" + "".join(lines), encoding="utf-8", newline="")
    labels = labels_by_number(index_of(images, table)[0])
    assert labels == {n: [f"a, or\n b {n % 2}"] for n in labels}


def wrong(header: str, good: str, line: int, cells: str) -> tuple[str, list[str]]:
    """A table of which one line is wrong, counted from 1 with the header."""
    rows = [good] * NUM_IMAGES
    rows[line - 2] = cells
    return header, rows


@pytest.mark.parametrize(
    ("table", "overrides", "shown"),
    [
        (("path,label", [""] * NUM_IMAGES), [], ["12 empty", "line 2", "line 7", "6 more"]),
        (
            *(wrong("path,label,split", "a,train", 4, "b,valid"), []),
            ["line 4 (valid)", "train, val, test"],
        ),
        (wrong("path,label,split", "a,train", 4, "b,val"), [], ["validation", "line 4 (b)"]),
        (wrong("path,label,split", "a;b,train", 4, "a;x;y,val"), [], ["line 4 (x;y)"]),
        (wrong("path,label", "0.5", 7, "n/a"), [], ["line 7 (n/a)", "data.label_kind"]),
        (
            *(wrong("path,a,b", "1,0", 6, "2,0"), [PAIR, "data.label_kind=several"]),
            ["cells of a", "line 6 (2)"],
        ),
        (wrong("path,label", "a", 6, "b,c"), [], ["2 cells", "line 6 (3)", "quotes"]),
        (wrong("file,label", "a", 6, "b"), [], ["path", "file, label", "data.path_column"]),
        (
            *(wrong("path,label", "a", 6, "b"), ["data.label_columns=[name,label]"]),
            ["name", "path, label", "data.label_columns"],
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    table: tuple[str, list[str]], overrides: list[str], shown: list[str], images: Path, tmp_path
) -> None:
    with refused(*shown):
        index_of(images, write(tmp_path, *table), *overrides)


def test_missing_files_and_double_paths_are_named_with_their_lines(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES)
    good = table.read_text()
    table.write_text(f"{good}day 1/99.png,cat\nnone.png,cat")
    with refused("line 14", f"line 15 ({images}/none.png)"):
        index_of(images, table)
    for folder in (".", images):
        table.write_text(f"{good}{folder}/day 1/3.png,cat")
        with refused("line 14 (day 1/3.png, as line 5)"):
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


def test_a_missing_table_or_folder_is_named(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES)
    for root, path, override, shown in (
        (images, tmp_path / "none.csv", "seed=0", "data.table"),
        (tmp_path / "nowhere", table, "seed=0", "data.root"),
        (images, table, "data.table=null", "data.table=FILE"),
    ):
        with refused(shown):
            index_of(root, path, override)
