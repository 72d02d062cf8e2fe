"""The documents name files, folders and doors that exist, and the way of a batch as it is."""

import re
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from conf.cli import load_config
from loaders import build_loaders
from loaders.batch import Batch
from loaders.workers import data_loader
from tests.helpers import PACKAGES, REPOSITORY
from tests.images import FOLDERS, make_photos, reading
from tests.parts import rows_of as rows_of_parts
from tests.test_architecture import (
    ARCHITECTURE,
    code,
    doors,
    modules,
    offered_by,
    rows_of,
    text_of,
)

DOCUMENTS = {
    path: path.read_text()
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
}


def test_every_promise_names_a_file_of_tests() -> None:
    rows = [row for page in DOCUMENTS.values() for row in rows_of(page, "What happens when ...")]
    assert len(rows) > 10
    for *_, path in rows:
        assert "\ndef test_" in (REPOSITORY / "tests" / path.strip("`")).read_text(), path


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    for path, text in DOCUMENTS.items():
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_page_on_the_architecture_lists_every_package_with_its_door() -> None:
    folders = {str(modules()[name].parent) for name in code()}
    packages = {folder for folder in folders if folder.partition("/")[0] in PACKAGES}
    listed = {folder for folder in doors() if (REPOSITORY / folder).is_dir()}
    assert listed == {name for name in packages if not name.startswith("conf/")}
    for folder, door in doors().items():
        for name, file in re.findall(r"`(\w+)`(?: in `(\S+)`)?", door):
            module = (file.removesuffix(".py") or folder).replace("/", ".")
            defined = re.search(rf"^(class |def )?{name}\b", text_of(module), re.MULTILINE)
            assert defined or name in offered_by(module), f"{module} does not offer {name}"


def test_the_page_on_the_architecture_names_files_and_tables_that_exist() -> None:
    for path in re.findall(r"`([\w/]+(?:/|\.py))`", ARCHITECTURE):
        assert (REPOSITORY / path).exists(), path
    tables = re.findall(r"`([A-Z][A-Z_]+)` (?:in |\()`([\w/]+\.py)`", ARCHITECTURE)
    assert len(tables) > 1
    for name, path in tables:
        assert re.search(rf"^{name}\b.* = ", (REPOSITORY / path).read_text(), re.MULTILINE), name


BATCHES = [
    *(*FOLDERS, "data.random_crop=true", "data.hflip=0.5"),
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


@dataclass
class Recorded(Dataset):
    """Batches of a Dataset, and in place of bad samples the files that ran."""

    dataset: Any

    def __getitems__(self, rows: np.ndarray) -> Batch:
        sys.setprofile(note_in_worker)  # it stays: what comes after this is noted, too
        batch = self.dataset.__getitems__(rows)
        return replace(batch, bad=dict(enumerate(NOTED)))


NOTED: set[str] = set()


def note_in_worker(frame: FrameType, event: str, argument: object) -> None:
    NOTED.add(frame.f_code.co_filename)


def files_in_a_worker(overrides: list[str]) -> set[str]:
    options = [*overrides, "loader.num_workers=1", "loader.num_threads=1"]
    loader: Any = build_loaders(load_config(options), torch.device("cpu"))[0]
    recorded = data_loader(Recorded(loader.batches.dataset), loader.plan, 1, 1, False)
    _, second, *_ = recorded
    found = second.bad.values()
    return set(re.findall(rf"^{REPOSITORY}/loaders/(.*)", "\n".join(found), re.MULTILINE))


def shown_by(page: str) -> set[str]:
    """Files in the picture of a page."""
    [picture] = re.findall(r"```text\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    return set(re.findall(r"(?:\w+/)+(?:\w+\.py)?|(?<!/)\b\w+\.py", picture))


def test_the_page_on_loaders_shows_the_files_that_a_batch_passes(tmp_path: Path) -> None:
    """In this process, and in this one and a worker."""
    photos = [*BATCHES, *reading(make_photos(tmp_path / "photos", 40))]
    passed, shown = files_of_a_batch(photos), shown_by("docs/loaders.md")
    assert passed == shown - {"workers.py", "batch.py"}
    with_worker = files_of_a_batch([*photos, "loader.num_workers=1"]) | files_in_a_worker(photos)
    assert with_worker == shown
    for page, overrides_for in rows_of_parts("WAYS_OF_A_BATCH"):
        others = files_of_a_batch([*photos, *overrides_for(photos, tmp_path)])
        assert others - shown == shown_by(page) - shown, page
