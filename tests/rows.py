"""Rows of tables of tests, without those of parts that a project does not have."""

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {
    "data=huggingface": "datasets",
    "data=table": "pyarrow",
    "loader=dali": "nvidia.dali",
    "loaders.shards": "obstore",
    "model=timm": "timm",
    "muon": "timm",
    "optimizer.name=muon": "timm",
}
"""Packages of extras that a choice needs."""
MERGED = re.findall(r"tools\.compose ([\w ]+)`", (REPOSITORY / "train.py").read_text())
"""The techniques of a `train.py` that they are merged into, in one text."""


def is_installed(package: str) -> bool:
    """True with NO_SKIPS=1, too: a test that needs a package that is not installed fails then."""
    try:
        return bool(os.environ.get("NO_SKIPS") or find_spec(package))
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def rows(*given: Any, needs: str = "") -> list[Any]:
    """Return those rows whose words, and those of `needs`, name nothing that is not there."""
    return [row for row in given if all(map(is_there, words_in([row, needs])))]


def words_in(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield from row.split()
    elif isinstance(row, list | tuple):
        for part in row:
            yield from words_in(part)


def is_there(word: str) -> bool:
    """False for a script, a module or a configuration choice, such as `train_ddp.py`, `tools.runs`
    and `data=pairs`, that the project does not have, or whose package is not installed."""
    if word in PACKAGES and not is_installed(PACKAGES[word]):
        return False
    if (REPOSITORY / "template").exists():
        return True
    if found := re.fullmatch(r"train_(\w+)\.py", word):
        return has_script(found[1].split("_"))
    if re.fullmatch(r"(benchmarks|loaders|runtime|tools)\.[\w.]+", word):
        path = REPOSITORY / word.replace(".", "/")
        return path.is_dir() or path.with_suffix(".py").exists()
    group, _, name = word.partition("=")
    folder = REPOSITORY / "conf" / group
    return not (group and name and folder.is_dir()) or (folder / f"{name}.yaml").exists()


def has_script(techniques: list[str]) -> bool:
    """True if there is a script with these techniques, or what merges them."""
    if MERGED:
        return set(techniques) <= set(MERGED[0].split())
    names = ["_".join(techniques)]
    if (REPOSITORY / "tools" / "compose.py").exists():
        names = techniques
    return all((REPOSITORY / f"train_{name}.py").exists() for name in names)
