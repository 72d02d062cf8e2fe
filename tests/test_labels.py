"""`data=table`: what the cells of a table become, and which of them are refused."""

import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from loaders.index import Index
from tests.helpers import REPOSITORY, refused, replace
from tests.images import PLAIN, index_in, index_of, loaders_of, paths_in, reading, save

NUM_IMAGES = 12
NAMES = ["cat", "dog", "cow", "dog"] * 3
SEVERAL = [["cat", "dog"], ["dog"], [], ["cat", "cow"]]
PAIR, AUTO = "data.label_columns=[a,b]", "data.label_kind=auto"
CLASSES = "data.label_kind=classes"


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
    return [*options, "data.crop=[16,16]", "global_batch_size=4", *overrides]


def labels_by_number(index: Index) -> dict[int, list]:
    """The names of each image's classes, or its numbers."""
    target: Any = index.target
    values = target.values.tolist()
    if target.kind == "several labels":
        values = [list(np.array(target.classes)[row == 1]) for row in target.values]
    elif target.kind == "labels":
        values = [[target.classes[label]] for label in values]
    return dict(zip((int(Path(name).stem) for name in paths_in(index)), values, strict=True))


def write_parquet(tmp_path: Path, columns: dict[str, list[Any]]) -> Path:
    columns = {"path": [path_of(number) for number in range(NUM_IMAGES)], **columns}
    parquet.write_table(pyarrow.table(columns), table := tmp_path / "labels.parquet")
    return table


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
        ({"b": ["False", "true"], "a": ["TRUE", "0.0"]}, PAIR, "a,b", [["a"], ["b"]]),
        ({"label": ["True", "False"]}, AUTO, "False,True", [["True"], ["False"]]),
        ({"label": ["1", "1.0", "10.0"]}, CLASSES, "1,10", [["1"], ["1"], ["10"]]),
        ({"label": [2.0, 10.0]}, CLASSES, "2,10", [["2"], ["10"]]),
        ({"label": ["1;2", "2.0"]}, AUTO, "1,2", [["1", "2"], ["2"]]),
        ({"label": ["\u00e9", "e\u0301", "f"]}, AUTO, "f,\u00e9", [["\u00e9"], ["\u00e9"], ["f"]]),
        ({"label": ["hot dog", "cat"]}, AUTO, "cat,hot dog", [["hot dog"], ["cat"]]),
        ({"label": ["a b", "a", "b"]}, CLASSES, "a,a b,b", [["a b"], ["a"], ["b"]]),
    ],
)
def test_cells_become_classes_several_labels_or_numbers(
    columns: dict[str, list], override: str, names: str, expected, form: str, images: Path, tmp_path
) -> None:
    columns = {name: cells * (NUM_IMAGES // len(cells)) for name, cells in columns.items()}
    if form == "csv":
        rows = [",".join(map(text, row)) for row in zip(*columns.values(), strict=True)]
        table = write(tmp_path, f"path,{','.join(columns)}", rows)
    else:
        table = write_parquet(tmp_path, columns)
    loader, other = loaders_of(*options_of(images, table, override))
    target: Any = index_in(loader).target
    assert ",".join(target.names if target.kind == "numbers" else target.classes) == names
    by_number = labels_by_number(index_in(loader)) | labels_by_number(index_in(other))
    assert by_number == {n: expected[n % len(expected)] for n in range(NUM_IMAGES)}
    if target.kind != "numbers":
        labels = [
            label for several in labels_by_number(index_in(loader)).values() for label in several
        ]
        assert loader.info.class_counts is not None
        assert loader.info.class_counts().tolist() == [labels.count(c) for c in target.classes]
    assert names.replace(",", ", ") in loader.info.description[0]


@pytest.mark.parametrize(("offset", "is_refused"), [(1.6e9, True), (-1.6e9, True), (1000, False)])
def test_numbers_that_float32_merges_are_refused_with_their_column(
    offset: float, is_refused: bool, images: Path, tmp_path
) -> None:
    numbers = [offset + k for k in range(NUM_IMAGES)]
    cells = [f"{k / 7},{number:.0f}" for k, number in enumerate(numbers)]
    table = write(tmp_path, "path,share,time", cells)
    options = options_of(images, table, "data.label_columns=[share,time]")
    if is_refused:
        with refused("numbers of time", f"{numbers[-1]:.0f} is {offset:.0f}"):
            index_of(*options)
    else:
        labels = labels_by_number(index_of(*options)[0])
        assert {k: cells[1] for k, cells in labels.items()} == {k: offset + k for k in labels}


def test_the_column_split_splits(images: Path, tmp_path) -> None:
    """Of val and test, val is used; files in neither split need not exist."""

    def numbers() -> list[list[int]]:
        return [sorted(labels_by_number(index)) for index in index_of(*options_of(images, table))]

    cells = ["a,train", "a,test", "b,train", "b,test", "b,train"]
    table = write(tmp_path, "path,label,split", cells)
    assert numbers() == [[0, 2, 4], [1, 3]]
    replace(table, "b,test", "b,val")
    replace(table, path_of(1), "none.png")
    assert numbers() == [[0, 2, 4], [3]]


def test_quotes_byte_order_marks_and_blank_lines_are_read(images: Path, tmp_path) -> None:
    lines = [f'"{path_of(n)}","a, or\n b {n % 2}"\r\n\r\n' for n in range(NUM_IMAGES)]
    table = tmp_path / "labels.csv"
    text = "\ufeffpath, label\r\n" + "".join(lines)
    table.write_text(text, encoding="utf-8", newline="")
    labels = labels_by_number(index_of(*options_of(images, table))[0])
    assert labels == {n: [f"a, or\n b {n % 2}"] for n in labels}
    table.write_text(f"{text},cat\r\n", encoding="utf-8", newline="")
    with refused(f"row {2 * NUM_IMAGES + 2} (path: '')"):  # blank ones count
        index_of(*options_of(images, table))


@pytest.mark.parametrize(
    "content", [b"", b"path,label\n", b"path,label\na.png,caf\xe9\n", b"PAR1", b"path,label\n\n\n"]
)
def test_a_file_that_is_no_table_is_refused(content: bytes, images: Path, tmp_path) -> None:
    for name in ("labels.csv", "labels.parquet"):
        (table := tmp_path / name).write_bytes(content)
        with refused(str(table)):
            index_of(*options_of(images, table))


def test_a_locale_without_utf8_is_blamed_and_not_a_name(tmp_path) -> None:
    save(tmp_path / "images" / "\u00c4" / "1.png", np.zeros((16, 16, 3), np.uint8))
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n\u00c4/1.png,a\n", encoding="utf-8")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for data in ("imagefolder", "table"):
        options = [f"data={data}", f"data.root={tmp_path}/images", f"data.cache_dir={tmp_path}/c"]
        options += [f"data.table={table}"] * (data == "table")
        command = [sys.executable, "-m", "loaders.check", *options]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "PYTHONUTF8=1" in done.stderr


@pytest.mark.parametrize(
    ("header", "good", "wrong", "shown"),
    [
        ("path,label", "", "", ["12 of 12 rows", "row 2", "row 7", "6 more"]),
        ("path,label", "a", "nan", ["1 of 12 rows", "row 6 (label: 'nan')"]),
        ("path,label", "a;b", "a;None", ["row 6 (label: 'a;None')"]),
        ("path,label,label", "a,x", "b,y", ["columns label;"]),
        ("path;label", "a", "b", ["';'", "commas"]),
        ("file,name", "a", "b", ["column path, label", "file, name"]),
        ("path,label,split", "a,train", "b,valid", ["row 6 (valid)", "train, val, test"]),
        ("path,label,split", "a,train", "b,val", ["validation", "row 6 (b)"]),
        ("path,label,split", "a;b,train", "a;x;y,val", ["row 6 (x;y)"]),
        ("path,label", "0.5", "n/a", ["row 6 (n/a)", "data.label_kind"]),
        ("path,label", "a", "b,c", ["header's 2", "row 6 (3)", "quotes"]),
        ("path,a,b", "1,0", "2,0", ["1 of 12 rows", "row 6 (2)"]),
    ],
)
def test_wrong_rows_are_named(header, good, wrong, shown, images, tmp_path) -> None:
    cells = [good] * 4 + [wrong] + [good] * 7
    several = [PAIR, "data.label_kind=several"] if header == "path,a,b" else []
    with refused(*shown):
        index_of(*options_of(images, write(tmp_path, header, cells), *several))


@pytest.mark.parametrize("separator", "|,/+& ")
@pytest.mark.parametrize("kind", ["auto", "several"])
def test_several_labels_with_another_separator_are_no_classes(
    separator: str, kind: str, images: Path, tmp_path
) -> None:
    cells = [f'"{separator.join(labels)}"' for labels in ["ab", "b", "a", "bc", "ac", "c"] * 2]
    table = write(tmp_path, "path,label", cells)
    with refused(repr(f"a{separator}b"), ";", CLASSES):
        index_of(*options_of(images, table, f"data.label_kind={kind}"))
    table = write(tmp_path, "path,label", [cell.replace(separator, ";") for cell in cells])
    train: Any = index_of(*options_of(images, table))[0]
    assert train.target.classes == ("a", "b", "c")


def test_a_table_without_a_header_is_refused_before_it_loses_a_row(images: Path, tmp_path) -> None:
    table = write(tmp_path, f"{path_of(11)},dog", NAMES[:11])
    followed = [f"data.path_column='{path_of(11)}'", "data.label_columns=[dog]"]
    for more in ([], followed):
        with refused("no header", path_of(11)):
            index_of(*options_of(images, table, *more))


@pytest.mark.parametrize(
    ("cells", "alike"),
    [("Cat,dog,CAT,cat", "CAT, Cat, cat"), ("01,2,1,3", "01, 1"), ("1,a,1.0,b", "1, 1.0")],
)
def test_classes_that_differ_in_spelling_are_named(cells, alike, images: Path, tmp_path) -> None:
    train, _ = index_of(*options_of(images, write(tmp_path, "path,label", cells.split(",") * 3)))
    assert any(alike in note for note in train.notes)
    train, _ = index_of(*options_of(images, write(tmp_path, "path,label", NAMES)))
    assert train.notes == ()


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


def test_classes_without_a_training_sample_are_named(images: Path, tmp_path) -> None:
    for odd, kind in (("cow", "classes"), ("dog;cow", "several")):
        table = write(tmp_path, "path,label", ["cat", "dog"] * 5 + [odd, odd])
        for seed in range(99):
            overrides = f"data.split_seed={seed}", f"data.label_kind={kind}"
            train, _ = index_of(*options_of(images, table, *overrides))
            if not any("cow" in names for names in labels_by_number(train).values()):
                break
        assert "1 class without a training sample: cow" in train.notes


def test_missing_files_and_double_paths_are_named(images: Path, tmp_path) -> None:
    table = write(tmp_path, "path,label", NAMES)
    good, options = table.read_text(), options_of(images, table)
    table.write_text(f"{good}day 1/99.png,cat\nnone.png,cat")
    with refused("row 14", f"row 15 ({images}/none.png)"):
        index_of(*options)
    for folder in (".", images):
        table.write_text(f"{good}{folder}/day 1/3.png,cat")
        with refused("row 14 (day 1/3.png, as row 5)"):
            index_of(*options)
    for wrong in ("data.table=none.csv", "data.table=null", "data.root=nowhere"):
        with refused(wrong.replace("null", "FILE")):
            index_of(*options, wrong)


def test_a_root_may_be_written_in_any_way(images: Path, tmp_path, monkeypatch) -> None:
    options = options_of(images, write(tmp_path, "path,label", NAMES))
    expected = index_of(*options)[0]
    monkeypatch.chdir(images)
    for root in (".", "./", f"../{images.name}", f".//../{images.name}", f"{images}//."):
        index = index_of(*options, f"data.root={root}")[0]
        assert [*map(os.path.realpath, paths_in(index))] == paths_in(expected)
        assert index.fingerprint == expected.fingerprint
