"""`data=table`: what the cells of a table become, and which of them are refused."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from loaders.index import Index
from tests.helpers import refused, replace
from tests.images import PLAIN, index_of, paths_in, reading, save

NUM_IMAGES = 12
NAMES = ["cat", "dog", "cow", "dog"] * 3
PAIR, CLASSES, NUMBERS = (
    *("data.label_columns=[a,b]", "data.label_kind=classes", "data.label_kind=numbers"),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "images"
    for number in range(NUM_IMAGES):
        save(root / path_of(number), np.zeros((16, 16, 3), np.uint8))
    return root


def path_of(number: int) -> str:
    return f"day {number % 2}/{number}.png"


def write(tmp_path: Path, header: str, cells: list[str]) -> Path:
    """A table of the first images with these cells behind the path."""
    lines = [header, *(f"{path_of(number)},{labels}" for number, labels in enumerate(cells))]
    (table := tmp_path / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def write_columns(tmp_path: Path, columns: dict[str, list[Any]]) -> Path:
    """A table of all images with these cells again and again: a CSV file of texts, else Parquet."""
    cells = {name: column * (NUM_IMAGES // len(column)) for name, column in columns.items()}
    frame = pandas.DataFrame({"path": map(path_of, range(NUM_IMAGES)), **cells})
    if all(isinstance(cell, str) for column in columns.values() for cell in column):
        frame.to_csv(table := tmp_path / "labels.csv", index=False)
    else:
        frame.to_parquet(table := tmp_path / "labels.parquet")
    return table


def options_of(images: Path, table: Path, *overrides: str) -> list[str]:
    options = ["data=table", f"data.table={table}", *reading(images), *PLAIN]
    options += [] if b"split" in table.read_bytes() else ["data.val_count=4"]
    return [*options, "data.crop=[16,16]", *overrides]


def values_by_number(*indexes: Index) -> dict[int, Any]:
    """What each image is trained on: the number of its class, several labels, or numbers."""
    found = {}
    for index in indexes:
        target: Any = index.target
        for path, value in zip(paths_in(index), target.values.tolist(), strict=True):
            found[int(Path(path).stem)] = value
    return found


@pytest.mark.parametrize(
    ("columns", "override", "names", "expected"),
    [
        ({"label": ["cat", "dog", "cow"]}, "", "cat,cow,dog", [0, 2, 1]),
        ({"label": ["10", "9", "2"]}, "", "2,9,10", [2, 1, 0]),
        ({"label": ["cat; dog", "dog", ";"]}, "", "cat,dog", [[1, 1], [0, 1], [0, 0]]),
        ({"b": ["0", "1", "1"], "a": ["True", "0.0", "1"]}, PAIR, "a,b", [[1, 0], [0, 1], [1, 1]]),
        ({"b": ["-1", "2"], "a": ["0.5", "1"]}, PAIR, "a,b", [[0.5, -1], [1, 2]]),
        ({"label": ["0", "7"]}, NUMBERS, "label", [[0], [7]]),
        ({"label": ["a", "b"]}, "data.label_kind=several", "a,b", [[1, 0], [0, 1]]),
        ({"label": ["1", "1.0", "10.0"]}, CLASSES, "1,10", [0, 0, 1]),
        ({"label": ["\u00e9", "e\u0301", "f"]}, "", "f,\u00e9", [1, 1, 0]),
        ({"label": ["a|b", "a", "b"]}, CLASSES, "a,a|b,b", [1, 0, 2]),
        ({"label": [["cat", "dog"], ["dog"], []]}, "", "cat,dog", [[1, 1], [0, 1], [0, 0]]),
        ({"a": [True, False], "b": [0, 1]}, PAIR, "a,b", [[1, 0], [0, 1]]),
        ({"label": [2.0, 10.0]}, CLASSES, "2,10", [0, 1]),
    ],
)
def test_cells_become_labels(columns, override, names, expected, images, tmp_path) -> None:
    table = write_columns(tmp_path, columns)
    train, val = index_of(*options_of(images, table, *filter(None, [override])))
    target: Any = train.target
    assert ",".join(target.names if target.kind == "numbers" else target.classes) == names
    times = NUM_IMAGES // len(expected)
    assert values_by_number(train, val) == dict(enumerate(expected * times))


def test_the_column_split_splits(images: Path, tmp_path) -> None:
    """Of val and test, val is used; files in neither split need not exist. Folds share out those
    that train."""
    cells = ["a,train", "a,test", "b,train", "b,test", "b,train"]
    table = write(tmp_path, "path,label,split", cells)
    options = options_of(images, table)
    assert [[*values_by_number(index)] for index in index_of(*options)] == [[0, 2, 4], [1, 3]]
    replace(table, "b,test", "b,val")
    replace(table, path_of(1), "none.png")
    assert [[*values_by_number(index)] for index in index_of(*options)] == [[0, 2, 4], [3]]
    with refused("data.fold=0", "validation split"):
        index_of(*options, "data.fold=0")
    replace(table, "b,val", "b,test")
    folds = index_of(*options, "data.fold=0", "data.num_folds=3")
    assert sorted(values_by_number(*folds)) == [0, 2, 4]


def test_quotes_byte_order_marks_and_blank_lines_are_read(images: Path, tmp_path) -> None:
    lines = [f'"{path_of(n)}","a, or\n b {n % 2}"\r\n\r\n' for n in range(NUM_IMAGES)]
    text = "\ufeffpath, label\r\n" + "".join(lines)
    (table := tmp_path / "labels.csv").write_text(text, encoding="utf-8", newline="")
    indexes: Any = index_of(*options_of(images, table))
    assert indexes[0].target.classes == ("a, or\n b 0", "a, or\n b 1")
    assert values_by_number(*indexes) == {n: n % 2 for n in range(NUM_IMAGES)}
    table.write_text(f"{text},cat\r\n", encoding="utf-8", newline="")
    with refused(f"row {2 * NUM_IMAGES + 2} (path: '')"):  # blank ones count
        index_of(*options_of(images, table))


@pytest.mark.parametrize("content", [b"", b"path,label\n", b"path,label\na.png,caf\xe9\n", b"PAR1"])
def test_a_file_that_is_no_table_is_refused(content: bytes, images: Path, tmp_path) -> None:
    for name in ("labels.csv", "labels.parquet"):
        (table := tmp_path / name).write_bytes(content)
        with refused(str(table)):
            index_of(*options_of(images, table))


# Header, cells of twelve images (of all, but for the fifth) and what is named. Labels that are
# separated by something else are no classes, and a table without a header would lose a row.
SEVERAL = "data.label_kind=several"
TIMES = [1_600_000_000 + number for number in range(NUM_IMAGES)]
WRONG: list[tuple[str, list[str], str, list[str], list[str]]] = [
    ("path,label", [""], "", [], ["12 of 12 rows", "row 2", "row 7", "6 more"]),
    ("path,label", ["a;b"], "a;None", [], ["row 6 (label: 'a;None')"]),
    ("path;label", ["a"], "b", [], ["with commas"]),
    ("file,name", ["a"], "b", [], ["column path, label", "file, name"]),
    ("path,label,split", ["a,train", "b,val"], "a,valid", [], ["has valid", "train, val"]),
    ("path,label", ["a"], "b", ["data.label_columns=[label,label]"], ["label_columns"]),
    ("path,label", ["a"], "b", ["data.label_columns=[]"], ["label_columns"]),
    ("path,label,split", ["a,train", "b,train"], "c,val", [], ["row 6 (c)", "training row"]),
    ("path,label,label", ["a,b"], "b,a", [], ["several of the column label"]),
    ("path,label", ["0.5"], "n/a", [], ["row 6 (n/a)", "data.label_kind"]),
    ("path,label", ["0.5"], "1e39", [], ["row 6 (1e39)", " label ", "finite"]),
    ("path,a,b", ["1,0"], "2,3", [PAIR, SEVERAL], ["1 of 12 rows", " a ", "row 6 (2)"]),
    ("path,a,b", ["1,0"], "None,None", [PAIR], ["1 of 12 rows", "(a: 'None'), row 6 (b: 'None')"]),
    ("path,label", ["a|b", "b", "a"], "a|b", [], [repr("a|b"), ";", CLASSES]),
    ("path,label", ['"a,b"', "b", "a"], '"a,b"', [SEVERAL], [repr("a,b"), ";", CLASSES]),
    ("path,label", ["a b", "b", "a"], "a b", [], [repr("a b"), ";", CLASSES]),
    ("day 1/11.png,dog", NAMES, "cow", [], ["no header", "day 1/11.png"]),
    (
        *("day 1/11.png,dog", NAMES, "cow"),
        ["data.path_column='day 1/11.png'", "data.label_columns=[dog]"],
        ["no header", "day 1/11.png"],
    ),
    ("path,label", [*map(str, TIMES)], str(TIMES[4]), [NUMBERS], ["label", "1600000000"]),
]


@pytest.mark.parametrize(("header", "good", "wrong", "overrides", "shown"), WRONG)
def test_wrong_tables_are_refused(header, good, wrong, overrides, shown, images, tmp_path) -> None:
    cells = [good[number % len(good)] for number in range(NUM_IMAGES)]
    cells[4] = wrong
    with refused(*shown, "1600000000" if wrong == str(TIMES[4]) else "labels.csv"):
        index_of(*options_of(images, write(tmp_path, header, cells), *overrides))


def test_missing_cells_of_parquet_are_refused(images: Path, tmp_path) -> None:
    with refused("row 2 (label: '')"):
        index_of(*options_of(images, write_columns(tmp_path, {"label": ["cat", None]})))


def test_numbers_that_float32_merges_are_refused_if_all_of_them_are_alike(images, tmp_path) -> None:
    """Not those of a small split."""
    cells = [f"{time},val" for time in TIMES]
    cells[:2] = "0.5,train", "1.6e9,train"
    train, val = index_of(*options_of(images, write(tmp_path, "path,label,split", cells)))
    assert [len(train), len(val)] == [2, NUM_IMAGES - 2]


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
    with refused("row 2 (", "row 6 ("):
        index_of(*options)


def test_missing_files_and_double_paths_are_named(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES)
    good, options = table.read_text(), options_of(images, table)
    table.write_text(f"{good}day 1/99.png,cat\n../labels.csv,cat")
    with refused("row 14", "row 15 (../labels.csv)", f"data.root={images}"):
        index_of(*options)
    for folder in (".", images, f"../{images.name}"):
        table.write_text(f"{good}{folder}/day 1/3.png,cat")
        with refused("row 5 (day 1/3.png), row 14 (day 1/3.png)"):
            index_of(*options)
