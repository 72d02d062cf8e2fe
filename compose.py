"""Merge techniques into one training script: `python compose.py ddp amp -o my_train.py`.

Every technique edits other lines of the same baseline, so the three-way merge of their scripts is the
combined script. A technique is a file `train_<name>.py` whose docstring has a line such as

    Combines with every technique but `dp` and `fsdp`.
"""

import argparse
import ast
import difflib
import itertools
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BASELINE = "train.py"
MARKER = "# new #: "
COMBINES = re.compile(
    r"^Combines with every technique(?: but (?P<excluded>[^,.]*))?[,.]", re.MULTILINE
)
COMMAND = re.compile(r"`(?P<launcher>[^`]*?)(?P<script>\w+\.py)[^`]*`")
CONFLICT = re.compile(
    r"<{7}[^\n]*\n(?P<ours>.*?)\|{7}[^\n]*\n(?P<base>.*?)={7}\n(?P<theirs>.*?)>{7}[^\n]*\n",
    re.DOTALL,
)


class MergeError(ValueError):
    """What was asked for cannot be merged; the message says why and what to do."""


def split_docstring(source: str, name: str = "the script") -> tuple[str, str]:
    """A script's docstring, and its text after the docstring.

    Raises:
        MergeError: the script, of this name, is no Python.
    """
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise MergeError(f"{name}, line {error.lineno}: {error.msg}; correct it") from error
    docstring = ast.get_docstring(module)
    if docstring is None:
        return "", source
    return docstring, "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :])


def find_techniques(folder: Path = HERE) -> dict[str, set[str]]:
    """The techniques in a folder by name, and those that each of them does not combine with."""
    excluded = {}
    for path in sorted(folder.glob("train_*.py")):
        name = path.stem.removeprefix("train_")
        if "_" in name:
            continue
        if line := COMBINES.search(split_docstring(path.read_text(), path.name)[0]):
            excluded[name] = set(re.findall(r"`(\w+)`", line["excluded"] or ""))
    return {
        name: others | {other for other in excluded if name in excluded[other]}
        for name, others in excluded.items()
    }


def allowed_sets(folder: Path = HERE) -> list[tuple[str, ...]]:
    """All sets of techniques that combine, each in the order of the alphabet."""
    excluded = find_techniques(folder)
    return [
        names
        for count in range(1, len(excluded) + 1)
        for names in itertools.combinations(excluded, count)
        if not any(excluded[name] & set(names) for name in names)
    ]


def check_set(names: list[str], folder: Path = HERE) -> None:
    """Raises MergeError unless these techniques are there and combine."""
    excluded = find_techniques(folder)
    for name in names:
        if name not in excluded:
            raise MergeError(f"unknown technique {name}; use some of {', '.join(excluded)}")
        if names.count(name) > 1:
            raise MergeError(f"{' '.join(names)} names {name} twice; name each technique once")
        if others := excluded[name] & set(names):
            raise MergeError(
                f"{name} does not combine with {', '.join(sorted(others))}; leave one out"
            )


def unmarked_differences(baseline: str, script: str) -> list[str]:
    """The differences from the baseline, docstrings aside, that do not begin with the marker."""
    old, new = (split_docstring(text)[1].splitlines() for text in (baseline, script))
    unmarked = []
    for kind, *span in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        removed = [line.strip() for line in old[span[0] : span[1]] if line.strip()]
        added = [line.strip() for line in new[span[2] : span[3]] if line.strip()]
        is_marked = added and added[0].startswith(MARKER)
        if kind != "equal" and (removed or added) and not is_marked:
            unmarked.append(
                "\n".join([f"- {line}" for line in removed] + [f"+ {line}" for line in added])
            )
    return unmarked


def compose(
    names: list[str], onto: Path | None = None, output: str | None = None, folder: Path = HERE
) -> str:
    """The text of the script that combines techniques.

    Args:
        names: of the techniques, in any order: the answer is the same.
        onto: a script that was made from `train.py` and gets the techniques in its place.
        output: file name that the docstring's command shall start; default: train_<names>.py.
        folder: where `train.py` and the scripts of the techniques lie.

    Returns:
        Where the techniques and `onto` edit the same lines, conflict markers stand around them.

    Raises:
        MergeError: the techniques do not combine, or `train.py` was edited since they were made.
    """
    check_set(names, folder)
    _, baseline = split_docstring((folder / BASELINE).read_text(), BASELINE)
    onto_path = onto or folder / BASELINE
    docstring, merged = split_docstring(onto_path.read_text(), onto_path.name)
    titles, launchers = [], []
    for name in sorted(names):
        script = (folder / f"train_{name}.py").read_text()
        if with_baseline(folder / f"train_{name}.py") != script:
            raise MergeError(
                f"train_{name}.py is older than {BASELINE}; run python compose.py --update"
            )
        own_docstring, text = split_docstring(script)
        merged = merge(baseline, merged, text, onto_path.name, f"train_{name}.py")
        titles.append(own_docstring.splitlines()[0].rstrip("."))
        command = COMMAND.search(own_docstring)
        launchers.append(command["launcher"] if command else "python ")
    script_name = output or f"train_{'_'.join(names)}.py"
    head = f"{docstring}\n\nWith:\n" if onto else ""
    arguments = " ".join(names) + (f" --onto {onto.name}" if onto else "")
    return (
        f'"""{head}' + ".\n".join(titles) + ".\n\n"
        # A launcher of several processes is the longer command.
        f"Start with `{max(launchers, key=len)}{script_name}`.\n"
        f'Written by `python compose.py {arguments}`.\n"""\n{merged}'
    )


def merge(base: str, ours: str, theirs: str, our_name: str, their_name: str) -> str:
    """Three-way merge with git; where both only insert at the same place, both insertions are kept.

    Returns:
        The merged text; where both sides edit the same lines, git's conflict markers stand around them.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        labels = [option for name in (our_name, BASELINE, their_name) for option in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        merged = subprocess.run(command, capture_output=True, text=True).stdout

    def resolved(conflict: re.Match[str]) -> str:
        if conflict["base"].strip():
            return conflict[0]
        if "\n" + conflict["theirs"] in "\n" + conflict["ours"]:
            return conflict["ours"]
        return conflict["ours"] + conflict["theirs"]

    return CONFLICT.sub(resolved, merged)


def with_baseline(path: Path) -> str:
    """A technique's script or a composite, merged with `train.py` if that was edited since it was made.

    Raises:
        MergeError: the script differs from the `train.py` it was made from in a place that is not marked,
            or one of the two is no Python.
    """
    script = path.read_text()
    _, own = split_docstring(script, path.name)
    _, new = split_docstring(path.with_name(BASELINE).read_text(), BASELINE)
    base = baseline_of(path)
    if unmarked := unmarked_differences(base, script):
        raise MergeError(
            f"{path.name} differs from {BASELINE} in a place that is not marked `{MARKER.strip()}`:\n"
            f"{unmarked[0]}"
        )
    _, old = split_docstring(base)
    head = script.removesuffix(own)
    return script if old == new else head + merge(old, own, new, path.name, "as edited")


def baseline_of(path: Path) -> str:
    """The `train.py` that a script was made from: that of the commit that changed the script last."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=path.parent, capture_output=True, text=True).stdout

    current = path.with_name(BASELINE).read_text()
    if git("status", "--porcelain", "--", path.name):
        if not unmarked_differences(current, path.read_text()):
            return current  # it follows already, or is new
        commit = "HEAD"
    else:
        commit = git("log", "-1", "--format=%H", "--", path.name).strip()
    return git("show", f"{commit}:./{BASELINE}") if commit else current


def refuse_conflicts(name: str, text: str) -> None:
    """Raises MergeError, which shows the lines, if there are conflicts in a script of this name."""
    if conflicts := [match[0] for match in CONFLICT.finditer(text)]:
        raise MergeError(
            f"{name}: both sides edit the same lines in {len(conflicts)} places; choose there, between the "
            f"markers:\n{conflicts[0]}"
        )


def update(folder: Path = HERE) -> None:
    """Bring an edit of `train.py` to the scripts of all techniques and to their composites.

    Raises:
        MergeError: both sides edit the same lines; the other scripts are written all the same.
    """
    techniques = find_techniques(folder).keys()
    conflicts = []
    for path in sorted(folder.glob("train_*.py")):
        if not set(path.stem.split("_")[1:]) <= techniques:
            continue
        text = with_baseline(path)
        if text == path.read_text():
            continue
        print(f"{path.name} follows {BASELINE}")
        path.write_text(text)
        try:
            refuse_conflicts(str(path), text)
        except MergeError as error:
            conflicts.append(str(error))
    if conflicts:
        raise MergeError("\n".join(conflicts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "techniques", nargs="*", metavar="TECHNIQUE", help="see the list without any"
    )
    parser.add_argument("--onto", type=Path, help="a script of your own, made from train.py")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write; default: print the script"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--diff", action="store_true", help="show the difference from train.py")
    parser.add_argument(
        "--update", action="store_true", help="bring an edit of train.py to all scripts"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    output: Path | None = options.output
    try:
        if options.update:
            update()
        elif not options.techniques:
            for name in find_techniques():
                docstring, _ = split_docstring((HERE / f"train_{name}.py").read_text())
                print(f"{name:10} {docstring.splitlines()[0]}")
        elif output is not None and output.exists() and not options.force:
            raise MergeError(f"{output} exists already; choose another name or give --force")
        else:
            script = compose(options.techniques, options.onto, output.name if output else None)
            if options.diff:
                show_difference(options.onto or HERE / BASELINE, script)
            elif output is None:
                print(script, end="")
            else:
                output.write_text(script)
            refuse_conflicts(str(output or "the printed script"), script)
    except (MergeError, OSError) as error:
        sys.exit(f"compose.py: {error}")


def show_difference(old: Path, script: str) -> None:
    """Print how a script differs from a file, as git does, in colour on a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder, "merged.py")
        new.write_text(script)
        colour = "always" if sys.stdout.isatty() else "never"
        command = [
            "git",
            "--no-pager",
            "diff",
            "--no-index",
            f"--color={colour}",
            str(old),
            str(new),
        ]
        subprocess.run(command)


if __name__ == "__main__":
    main()
