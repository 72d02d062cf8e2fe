"""The documents name files, folders and doors that exist, and the way of a batch as it is."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from conf.cli import load_config
from loaders import build_loaders
from loaders.shards import Part, pack_shards
from tests.helpers import PACKAGES, REPOSITORY
from tests.images import make_photos, reading
from tests.test_architecture import ARCHITECTURE, code, modules, offered_by, rows_of, text_of


def test_every_promise_names_a_file_of_tests() -> None:
    rows = rows_of((REPOSITORY / "docs" / "failures.md").read_text(), "What happens when ...")
    assert len(rows) > 10
    for *_, path in rows:
        assert "\ndef test_" in (REPOSITORY / "tests" / path.strip("`")).read_text(), path


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    for document in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]:
        links = re.findall(r"\]\(([^)#:]+)[^):]*\)", document.read_text())
        for link in links:
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_page_on_the_architecture_lists_every_package_with_its_door() -> None:
    doors = {folder.strip("`/"): door for folder, _, door in rows_of(ARCHITECTURE, "Folders")}
    paths = [path for name, path in modules().items() if name in code()]
    assert doors.keys() == {str(path.parent) for path in paths if path.parts[0] in PACKAGES}
    for folder, door in doors.items():
        for name, file in re.findall(r"`(\w+)`(?: in `(\S+)`)?", door):
            module = (file.removesuffix(".py") or folder).replace("/", ".")
            defined = re.search(rf"^(class |def )?{name}\b", text_of(module), re.MULTILINE)
            assert defined or name in offered_by(module), f"{module} does not offer {name}"


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", ARCHITECTURE):
        assert (REPOSITORY / path).exists(), path
    tables = re.findall(r"`([A-Z][A-Z_]+)` (?:in |\()`([\w/]+\.py)`", ARCHITECTURE)
    assert len(tables) > 1
    for name, path in tables:
        assert re.search(rf"^{name}\b.* = ", (REPOSITORY / path).read_text(), re.MULTILINE), name


BATCHES = [
    *("data=imagefolder", "data.random_crop=true", "data.hflip=0.5"),
    *("data.colour_jitter=[0.4,0,0]", "data.resize=36", "data.crop=32", "global_batch_size=4"),
]


def files_of_a_batch(overrides: list[str]) -> set[str]:
    """Files of `loaders/` that run between a batch's request and the batch; augment/ as a whole."""
    train_loader, _ = build_loaders(load_config(overrides), torch.device("cpu"))
    train_loader.set_epoch(0)
    found = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        found.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of threads that are started from here on
    sys.setprofile(note)
    try:
        next(iter(train_loader))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inner = rf"^{REPOSITORY}/loaders/(augment/|.*)"
    return set(re.findall(inner, "\n".join(found), re.MULTILINE))


def test_the_page_on_loaders_shows_the_files_that_a_batch_passes(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "loaders.md").read_text()
    [picture] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    shown = set(re.findall(r"\w+/(?:\w+\.py)?|(?<!/)\b\w+\.py", picture))

    photos = [*BATCHES, *reading(make_photos(tmp_path / "photos", 40))]
    shards = [*BATCHES, *reading(tmp_path / "shards"), "data.shuffle=window"]
    pack_shards(load_config(photos).data, str(tmp_path / "shards"), shard_mb=0.01, part=Part(1, 1))
    passed = files_of_a_batch(photos)
    assert len(passed) <= 15
    others = files_of_a_batch([*photos, "loader=dali"]) | files_of_a_batch(shards)
    assert passed | others == shown
