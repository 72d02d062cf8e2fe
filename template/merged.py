"""`SCRIPT=merged`: one `train.py` that merges a project's techniques, not one script for each."""

import re

from compose import BASELINE, MARKER, compose, find_techniques, sort_imports, split_docstring

LAUNCHER = re.compile(r"Start with `(.*?)train\.py`")
WRITTEN_BY = re.compile(r"^Written by .*\n", re.MULTILINE)


def merged_script(parts: set[str]) -> str:
    """Return `train.py` with the techniques among the parts; comments that mark their lines become
    ordinary ones.

    Raises:
        MergeError: the techniques do not combine.
    """
    techniques = sorted(parts & find_techniques().keys())
    docstring, code = split_docstring(compose(techniques, output=BASELINE))
    docstring = WRITTEN_BY.sub("", docstring + "\n").rstrip()
    imports, decorator, body = code.partition("\n@hydra.main")
    lines = [line for line in imports.split("\n") if not line.startswith(MARKER)]
    imports = sort_imports("\n".join(lines) + decorator + body.replace(MARKER, "# "))
    return f'"""{docstring}\n"""\n{imports}'


def launcher_of(script: str) -> str:
    """Return what starts a merged script, such as `python ` or `torchrun ... `."""
    return LAUNCHER.findall(script)[0] if "torchrun" in script else "python "
