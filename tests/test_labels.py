"""`data=table`: what the cells of a table become, and which of them are refused."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from loaders.index import Index
from tests.helpers import refused, replace
from tests.images import PLAIN, index_of, paths_in, reading, save

NUM_IMAGES = 12
NAMES = ["cat", "dog", "cow", "dog"] * 3
PAIR, CLASSES = "data.label_columns=[a,b]", "data.label_kind=classes"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """NUM_IMAGES images, of which each shows its number."""
    root = tmp_path_factory.mktemp("data") / "images"
    for number in range(NUM_IMAGES):
        save(root / path_of(number), np.full((16, 16, 3), 20 * number, np.uint8))
    return root


def path_of(number: int) -> str:
    return f"day {number % 2}/{number}.png"


def write(tmp_path: Path, header: str, labels: list[str]) -> Path:
    """A table of the first images with these cells behind the path."""
    lines = [header, *(f"{path_of(number)},{cells}" for number, cells in enumerate(labels))]
    (table := tmp_path / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def options_of(images: Path, table: Path, *overrides: str) -> list[str]:
    options = ["data=table", f"data.table={table}", *reading(images), *PLAIN]
    options += [] if b"split" in table.read_bytes() else ["data.val_count=4"]
    return [*options, "data.crop=[16,16]", *overrides]


def labels_by_number(*indexes: Index) -> dict[int, Any]:
    """The names of each image's classes, separated by commas, or its numbers."""
    found = {}
    for index in indexes:
        target: Any = index.target
        for path, value in zip(paths_in(index), target.values.tolist(), strict=True):
            if target.kind == "labels":
                value = target.classes[value]
            elif target.kind == "several labels":
                value = ",".join(np.array(target.classes)[np.array(value) == 1])
            found[int(Path(path).stem)] = value
    return found


@pytest.mark.parametrize(
    ("header", "cells", "override", "names", "expected"),
    [
        ("label", "cat dog cow", "", "cat,cow,dog", ["cat", "dog", "cow"]),
        ("label", "10 9 2", "", "2,9,10", ["10", "9", "2"]),
        ("label", "cat;dog dog ;", "", "cat,dog", ["cat,dog", "dog", ""]),
        ("b,a", "0,True 1,0.0 1,1", PAIR, "a,b", ["a", "b", "a,b"]),
        ("b,a", "-1,0.5 2,1", PAIR, "a,b", [[0.5, -1], [1, 2]]),
        ("label", "0 7", "data.label_kind=numbers", "label", [[0], [7]]),
        ("label", "a b", "data.label_kind=several", "a,b", ["a", "b"]),
        ("label", "1 1.0 10.0", CLASSES, "1,10", ["1", "1", "10"]),
        ("label", "\u00e9 e\u0301 f", "", "f,\u00e9", ["\u00e9", "\u00e9", "f"]),
        ("label", "a|b a b", CLASSES, "a,a|b,b", ["a|b", "a", "b"]),
    ],
)
def test_cells_become_classes_several_labels_or_numbers(
    header: str, cells: str, override: str, names: str, expected, images: Path, tmp_path
) -> None:
    times = NUM_IMAGES // len(expected)
    table = write(tmp_path, f"path,{header}", cells.split() * times)
    train, val = index_of(*options_of(images, table, *filter(None, [override])))
    target: Any = train.target
    assert ",".join(target.names if target.kind == "numbers" else target.classes) == names
    assert labels_by_number(train, val) == dict(enumerate(expected * times))


@pytest.mark.parametrize(
    ("columns", "override", "expected"),
    [
        ({"label": [["cat", "dog"], ["dog"], []]}, "", ["cat,dog", "dog", ""]),
        ({"a": [True, False], "b": [0, 1]}, PAIR, ["a", "b"]),
        ({"label": [2.0, 10.0]}, CLASSES, ["2", "10"]),
        ({"label": ["cat", None]}, "", "row 2 (label: '')"),
    ],
)
def test_a_parquet_file_is_read_like_a_csv_file(columns, override, expected, images, tmp_path):
    times = NUM_IMAGES // len(next(iter(columns.values())))
    columns = {name: cells * times for name, cells in columns.items()}
    columns["path"] = [path_of(number) for number in range(NUM_IMAGES)]
    parquet.write_table(pyarrow.table(columns), table := tmp_path / "labels.parquet")
    options = options_of(images, table, *filter(None, [override]))
    if isinstance(expected, str):
        with refused(expected):
            index_of(*options)
    else:
        assert labels_by_number(*index_of(*options)) == dict(enumerate(expected * times))


def test_the_column_split_splits(images: Path, tmp_path) -> None:
    """Of val and test, val is used; files in neither split need not exist."""
    cells = ["a,train", "a,test", "b,train", "b,test", "b,train"]
    table = write(tmp_path, "path,label,split", cells)
    options = options_of(images, table)
    assert [[*labels_by_number(index)] for index in index_of(*options)] == [[0, 2, 4], [1, 3]]
    replace(table, "b,test", "b,val")
    replace(table, path_of(1), "none.png")
    assert [[*labels_by_number(index)] for index in index_of(*options)] == [[0, 2, 4], [3]]


def test_quotes_byte_order_marks_and_blank_lines_are_read(images: Path, tmp_path) -> None:
    lines = [f'"{path_of(n)}","a, or\n b {n % 2}"\r\n\r\n' for n in range(NUM_IMAGES)]
    text = "\ufeffpath, label\r\n" + "".join(lines)
    (table := tmp_path / "labels.csv").write_text(text, encoding="utf-8", newline="")
    labels = labels_by_number(*index_of(*options_of(images, table)))
    assert labels == {n: f"a, or\n b {n % 2}" for n in range(NUM_IMAGES)}
    table.write_text(f"{text},cat\r\n", encoding="utf-8", newline="")
    with refused(f"row {2 * NUM_IMAGES + 2} (path: '')"):  # blank ones count
        index_of(*options_of(images, table))


@pytest.mark.parametrize("content", [b"", b"path,label\n", b"path,label\na.png,caf\xe9\n", b"PAR1"])
def test_a_file_that_is_no_table_is_refused(content: bytes, images: Path, tmp_path) -> None:
    for name in ("labels.csv", "labels.parquet"):
        (table := tmp_path / name).write_bytes(content)
        with refused(str(table)):
            index_of(*options_of(images, table))


@pytest.mark.parametrize(
    ("header", "good", "wrong", "shown"),
    [
        ("path,label", "", "", ["12 of 12 rows", "row 2", "row 7", "6 more"]),
        ("path,label", "a;b", "a;None", ["row 6 (label: 'a;None')"]),
        ("path;label", "a", "b", ["with commas"]),
        ("file,name", "a", "b", ["column path, label", "file, name"]),
        ("path,label,split", "a,train", "b,valid", ["row 6 (valid)", "train, val, test"]),
        ("path,label", "0.5", "n/a", ["row 6 (n/a)", "data.label_kind"]),
        ("path,a,b", "1,0", "2,0", ["1 of 12 rows", "row 6 (2)"]),
    ],
)
def test_wrong_rows_are_named(header, good, wrong, shown, images, tmp_path) -> None:
    cells = [good] * 4 + [wrong] + [good] * 7
    several = [PAIR, "data.label_kind=several"] if header == "path,a,b" else []
    with refused(*shown):
        index_of(*options_of(images, write(tmp_path, header, cells), *several))


@pytest.mark.parametrize("separator", "|, ")
def test_several_labels_with_another_separator_are_no_classes(separator, images, tmp_path) -> None:
    cells = [f'"{separator.join(labels)}"' for labels in ["ab", "b", "a", "bc", "ac", "c"] * 2]
    table = write(tmp_path, "path,label", cells)
    for kind in ("auto", "several"):
        with refused(repr(f"a{separator}b"), ";", CLASSES):
            index_of(*options_of(images, table, f"data.label_kind={kind}"))


def test_a_table_without_a_header_is_refused_before_it_loses_a_row(images: Path, tmp_path) -> None:
    table = write(tmp_path, f"{path_of(11)},dog", NAMES[:11])
    followed = [f"data.path_column='{path_of(11)}'", "data.label_columns=[dog]"]
    for more in ([], followed):
        with refused("no header", path_of(11)):
            index_of(*options_of(images, table, *more))


def test_classes_that_differ_in_spelling_are_named(images: Path, tmp_path) -> None:
    for cells, alike in (("Cat,dog,CAT,cat", "CAT, Cat, cat"), ("1,a,1.0,b", "1, 1.0")):
        table = write(tmp_path, "path,label", cells.split(",") * 3)
        assert any(alike in note for note in index_of(*options_of(images, table))[0].notes)
    table = write(tmp_path, "path,label", NAMES)
    assert index_of(*options_of(images, table))[0].notes == ()


def test_a_path_is_found_in_another_unicode_normal_form(tmp_path) -> None:
    root = tmp_path / "images"
    forms: Any = ("NFC", "NFD")
    paths = [unicodedata.normalize(forms[n % 2], f"\u00c4/\u00e9 {n}.png") for n in range(4)]
    others = [unicodedata.normalize(forms[n % 2 - 1], path) for n, path in enumerate(paths)]
    for path in paths:
        save(root / path, np.zeros((16, 16, 3), np.uint8))
    lines = ["path,label", *(f"{path},{'ab'[n % 2]}" for n, path in enumerate(others))]
    (table := tmp_path / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    options = options_of(root, table, "data.val_count=1")
    files = {file for index in index_of(*options) for file in paths_in(index)}
    assert files == {f"{root}/{path}" for path in paths}
    table.write_text("\n".join([*lines, f"{paths[0]},a"]), encoding="utf-8")
    with refused("row 6", "as row 2"):
        index_of(*options)


def test_missing_files_and_double_paths_are_named(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES)
    good, options = table.read_text(), options_of(images, table)
    table.write_text(f"{good}day 1/99.png,cat\n../labels.csv,cat")
    with refused("row 14", f"row 15 ({images}/../labels.csv)"):
        index_of(*options)
    for folder in (".", images):
        table.write_text(f"{good}{folder}/day 1/3.png,cat")
        with refused(f"row 14 ({images}/day 1/3.png, as row 5)"):
            index_of(*options)
