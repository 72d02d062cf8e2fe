"""Merge techniques into one training script: `python compose.py ddp amp -o my_train.py`.

Every technique edits other lines of the same baseline, so the three-way merge of their scripts is the
combined script. Without arguments, lists the techniques.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from pathlib import Path

TECHNIQUES = ("dp", "ddp", "amp")
REFUSED = {
    frozenset({"dp", "ddp"}): "both split the batch over the GPUs; use ddp, which is faster",
}
HERE = Path(__file__).parent


def split_docstring(source: str) -> tuple[str, str]:
    """A script's docstring, and its text after the docstring."""
    docstring = ast.parse(source).body[0]
    rest = "".join(source.splitlines(keepends=True)[docstring.end_lineno :])
    return ast.get_docstring(ast.parse(source)) or "", rest


def compose(techniques: list[str], name: str | None = None, folder: Path = HERE) -> str:
    """The text of the script that combines the techniques.

    Args:
        techniques: some of `TECHNIQUES`, at least one.
        name: file name that the docstring's command shall start; default: train_<techniques>.py.
        folder: where `train.py` and the scripts of the techniques lie.

    Raises:
        ValueError: a technique is unknown or named twice, a set of them makes no sense, or their
            scripts edit the same lines.
    """
    for technique in techniques:
        if technique not in TECHNIQUES:
            raise ValueError(f"unknown technique {technique}; use some of {', '.join(TECHNIQUES)}")
    if len(set(techniques)) < len(techniques):
        raise ValueError(f"{' '.join(techniques)} names a technique twice; name each once")
    for refused, reason in REFUSED.items():
        if refused <= set(techniques):
            raise ValueError(f"{' with '.join(sorted(refused))} makes no sense: {reason}")

    _, baseline = split_docstring((folder / "train.py").read_text())
    merged, titles, launcher = baseline, [], "python"
    for technique in techniques:
        docstring, script = split_docstring((folder / f"train_{technique}.py").read_text())
        merged = merge(baseline, merged, script, f"{technique} with {' '.join(techniques)}")
        titles.append(docstring.split(":")[0])
        if "`torchrun" in docstring:
            launcher = "torchrun --standalone --nproc_per_node=2"
    name = name or f"train_{'_'.join(techniques)}.py"
    return (
        f'"""{" + ".join(titles)}.\n\nStart with `{launcher} {name}`.\n\n'
        f'Written by `python compose.py {" ".join(techniques)}`.\n"""\n{merged}'
    )


def merge(base: str, ours: str, theirs: str, what: str) -> str:
    """Three-way merge of texts with `git merge-file`.

    Raises:
        ValueError: the texts conflict; `what` says in the message what was merged.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        result = subprocess.run(
            ["git", "merge-file", "-p", "--quiet", *map(str, paths)], capture_output=True, text=True
        )
    if result.returncode < 0 or result.returncode > 127:
        raise RuntimeError(f"git merge-file failed: {result.stderr.strip()}")
    if result.returncode:
        raise ValueError(f"merging {what}: {result.returncode} conflicts; both edit the same lines")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help=", ".join(TECHNIQUES))
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write; default: print the script"
    )
    arguments = parser.parse_args()
    if not arguments.techniques:
        for technique in TECHNIQUES:
            docstring, _ = split_docstring((HERE / f"train_{technique}.py").read_text())
            print(f"{technique:4} {docstring.splitlines()[0]}")
        return
    output: Path | None = arguments.output
    try:
        if output is not None and output.exists():
            raise ValueError(f"{output} exists already; choose another name or remove it")
        script = compose(arguments.techniques, output.name if output else None)
    except ValueError as error:
        sys.exit(f"compose.py: {error}")
    if output is None:
        print(script, end="")
    else:
        output.write_text(script)


if __name__ == "__main__":
    main()
