"""`SCRIPT=merged`: one `train.py` that merges a project's techniques, not one script for each."""

import re
from pathlib import Path

from compose import BASELINE, MARKER, compose, find_techniques, sort_imports, split_docstring
from template.parts import texts_in

LAUNCHER = re.compile(r"Start with `(.*?)train\.py`")
WRITTEN_BY = re.compile(r"^Written by .*\n", re.MULTILINE)


def techniques_of(parts: set[str]) -> list[str]:
    """Return the techniques among the parts."""
    return sorted(parts & find_techniques().keys())


def merged_script(names: list[str]) -> str:
    """Return `train.py` with these techniques; comments that mark their lines become ordinary ones.

    Raises:
        MergeError: the techniques do not combine.
    """
    docstring, code = split_docstring(compose(names, output=BASELINE))
    docstring = WRITTEN_BY.sub("", docstring + "\n").rstrip()
    imports, decorator, body = code.partition("\n@hydra.main")
    lines = [line for line in imports.split("\n") if not line.startswith(MARKER)]
    imports = sort_imports("\n".join(lines) + decorator + body.replace(MARKER, "# "))
    return f'"""{docstring}\n"""\n{imports}'


def merge_scripts(files: Path, names: list[str]) -> None:
    """Replace a project's training scripts by their merge, and their names in all of its files.

    Args:
        files: files of the project, without the scripts of other techniques.
        names: names of the techniques.
    """
    script = merged_script(names)
    for path in files.glob("train_*.py"):
        path.unlink()
    launcher = LAUNCHER.findall(script)[0]
    technique = "|".join(find_techniques())
    other = re.compile(rf"\btrain(?:_(?:{technique}))+(?=\.py\b|/|`|\")")
    for path, text in texts_in(files).items():
        new = other.sub("train", text)
        if path.name == "Makefile":  # which does not know how many GPUs there are
            new = with_launcher(new, launcher.replace("=2", "=1"))
        elif path.parts[0] != "tests":
            new = with_launcher(new, launcher)
        if new != text:
            (files / path).write_text(new)
    (files / BASELINE).write_text(script)


def with_launcher(text: str, launcher: str) -> str:
    """Return the text with `train.py` started as it has to be: by torchrun where it runs in several
    processes."""
    if not launcher.startswith("torchrun"):
        return text
    text = text.replace("python train.py", f"{launcher}train.py")
    arguments = ", ".join(f'"{word}"' for word in launcher.split())
    text = text.replace('"python", "train.py"', f'{arguments}, "train.py"')
    return re.sub(r"script=train\.py(?! ranks| is)", "script=train.py ranks=2", text)
