"""Merge techniques into one training script: `python compose.py ddp amp -o my_train.py`.

Every technique edits other lines of the same baseline, so the three-way merge of their scripts is
the combined script. A technique is a file `train_<name>.py` whose docstring has a line such as

    Combines with every technique but `dp` and `fsdp`.

`python compose.py --update` brings an edit of `train.py` to all scripts, also by a three-way merge.
Its base is `.train.py.base`, the `train.py` that the scripts were made from or last updated with.
"""

import argparse
import ast
import difflib
import itertools
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BASELINE = "train.py"
BASE = ".train.py.base"
MARKER = "# new #: "
COMBINES = re.compile(
    r"^Combines with every technique(?: but (?P<excluded>[^,.]*))?[,.]", re.MULTILINE
)
COMMAND = re.compile(r"`(?P<launcher>[^`]*?)(?P<script>\w+\.py)[^`]*`")
COMPOSED = re.compile(r"^Written by `python compose\.py (?P<names>[\w ]+)`", re.MULTILINE)
CONFLICT = re.compile(
    r"^<{7} [^\n]*\n(?P<ours>.*?)(^\|{7} [^\n]*\n(?P<base>.*?))?"
    r"^={7}\n(?P<theirs>.*?)^>{7} [^\n]*\n",
    re.DOTALL | re.MULTILINE,
)


class MergeError(ValueError):
    """Error of scripts that cannot be merged; its message gives the reason and the fix."""


def split_docstring(source: str, name: str = "the script") -> tuple[str, str]:
    """Split a script into its docstring and the text after the docstring.

    Raises:
        MergeError: the script, of this name, holds conflicts or is no Python.
    """
    refuse_conflicts(name, source)
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise MergeError(f"{name}, line {error.lineno}: {error.msg}; correct it") from error
    docstring = ast.get_docstring(module)
    if docstring is None:
        return "", source
    return docstring, "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :])


def read(path: Path) -> tuple[str, str]:
    """Read a script's docstring and the text after it; each line ends with a line feed alone."""
    return split_docstring(read_text(path), path.name)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MergeError(f"{path} is not encoded in UTF-8; save it so") from error


def write_text(path: Path, text: str) -> None:
    """Write a script; one that is there stays whole until then, and keeps its permissions."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    if path.exists():
        shutil.copymode(path, new)
    new.replace(path)


def find_techniques(folder: Path = HERE) -> dict[str, set[str]]:
    """Return the names of a folder's techniques, each with those that it does not combine with."""
    excluded = {}
    for path in sorted(folder.glob("train_*.py")):
        name = path.stem.removeprefix("train_")
        if "_" in name:
            continue
        if line := COMBINES.search(read(path)[0]):
            excluded[name] = set(re.findall(r"`(\w+)`", line["excluded"] or ""))
    return {
        name: others | {other for other in excluded if name in excluded[other]}
        for name, others in excluded.items()
    }


def allowed_sets(folder: Path = HERE) -> list[tuple[str, ...]]:
    """Return all sets of techniques that combine, each in alphabetical order."""
    excluded = find_techniques(folder)
    return [
        names
        for count in range(1, len(excluded) + 1)
        for names in itertools.combinations(excluded, count)
        if not any(excluded[name] & set(names) for name in names)
    ]


def check_set(names: list[str], folder: Path = HERE) -> None:
    """Raise MergeError unless these techniques exist and combine."""
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
    """Return the differences from the baseline that lack the marker; docstrings may differ."""
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
    """Combine techniques into one script.

    Args:
        names: names of the techniques; their order only changes the docstring.
        onto: script that was made from `train.py` and gets the techniques in its place.
        output: file name in the docstring's command; default: train_<names>.py.
        folder: where `train.py` and the scripts of the techniques lie.

    Returns:
        Text of the script, with conflict markers if the techniques and `onto` edit the same lines.

    Raises:
        MergeError: the techniques do not combine, `onto` is another script, or `train.py` was
            edited since they were made.
    """
    check_set(names, folder)
    onto_path = onto or folder / BASELINE
    source = read_text(onto_path)
    docstring, merged = split_docstring(source, onto_path.name)
    if "\n@entry_point\n" not in merged:
        raise MergeError(
            f"--onto {onto_path}: it has no @entry_point, and so is not made from {BASELINE}; "
            f"start with a copy of {BASELINE}, and move your code into it"
        )
    comments = "".join(itertools.takewhile(lambda line: line[0] == "#", source.splitlines(True)))
    merged = merged.removeprefix(comments)
    _, baseline = read(folder / BASELINE)
    if read(folder / BASE)[1] != baseline:
        raise MergeError(
            f"{BASELINE} has changed since the scripts were updated; run python compose.py --update"
        )
    titles, launchers = [], []
    are_sorted = sort_imports(merged) == merged
    for name in sorted(names):
        path = folder / f"train_{name}.py"
        own_docstring, text = read(path)
        refuse_unmarked(baseline, path)
        merged = merge(baseline, merged, text, onto_path.name, path.name)
        titles.append(own_docstring.splitlines()[0].rstrip("."))
        command = COMMAND.search(own_docstring)
        launchers.append(command["launcher"] if command else "python ")
    merged = sort_imports(merged) if are_sorted else merged
    script_name = output or f"train_{'_'.join(names)}.py"
    head = f"{docstring}\n\nWith:\n" if onto else ""
    arguments = " ".join(names) + (f" --onto {onto.name}" if onto else "")
    head += ".\n".join(titles) + ".\n\n"
    # A launcher of several processes is the longer command.
    head += f"Start with `{max(launchers, key=len)}{script_name}`.\n"
    head += f"Written by `python compose.py {arguments}`.\n"
    head = head.replace("\\", r"\\").replace('"""', r"\"\"\"")
    return f'{comments}"""{head}"""\n{merged}'


def merge(base: str, ours: str, theirs: str, our_name: str, their_name: str) -> str:
    """Merge three ways with git; insertions of both at the same place are kept, and those of ours
    directly above an edit of theirs.

    Returns:
        The merged text; where both sides edit the same lines, with git's conflict markers.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        labels = [option for name in (our_name, BASELINE, their_name) for option in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise MergeError("git is not installed, which merges scripts; install it") from error
    if done.returncode > 127:  # up to there it is the number of conflicts
        raise MergeError(f"{our_name}: git merge-file failed: {done.stderr.strip()}")

    def resolved(conflict: re.Match[str]) -> str:
        ours, base, theirs = conflict["ours"], conflict["base"], conflict["theirs"]
        if base.strip() and ours.endswith(base):
            return ours.removesuffix(base) + theirs
        if base.strip():
            return conflict[0]
        return ours if "\n" + theirs in "\n" + ours else ours + theirs

    return CONFLICT.sub(resolved, done.stdout)


def sort_imports(text: str) -> str:
    """Sort the imports of a script with ruff, and join those of one module.

    Returns:
        The script; unchanged if it has conflicts, or if ruff is not installed.
    """
    command = [sys.executable, "-m", "ruff", "check", "--select=I", "--fix", "--quiet"]
    command += [f"--stdin-filename={HERE / BASELINE}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=HERE)
    return done.stdout if done.returncode == 0 else text


def refuse_conflicts(name: str, text: str) -> None:
    """Raise MergeError, which shows the lines, if there are conflicts in a script of this name."""
    if conflicts := [match[0] for match in CONFLICT.finditer(text)]:
        places = "1 place" if len(conflicts) == 1 else f"{len(conflicts)} places"
        raise MergeError(
            f"{name}: both sides edit the same lines in {places}; edit between the markers:\n"
            f"{conflicts[0]}"
        )


def refuse_unmarked(baseline: str, path: Path) -> None:
    """Raise MergeError if a script differs from the baseline in a place that is not marked."""
    if unmarked := unmarked_differences(baseline, read_text(path)):
        raise MergeError(
            f"{path.name} has an unmarked difference from {BASELINE}; put a comment "
            f"`{MARKER.strip()} why` above it, or take the lines of {BASELINE}:\n{unmarked[0]}"
        )


def update(folder: Path = HERE) -> None:
    """Bring an edit of `train.py` to the scripts of all techniques and to those composed of them.

    Raises:
        MergeError: a script holds conflicts from an earlier merge; no script is written. Or both
            sides edit the same lines, or a technique is gone; the other scripts are written.
    """
    techniques = find_techniques(folder).keys()
    (_, base), (_, baseline) = read(folder / BASE), read(folder / BASELINE)
    is_sorted = sort_imports(baseline) == baseline
    scripts: dict[Path, list[str]] = {}  # those composed with the names of their techniques
    merged = {}
    for path in sorted(folder.glob("train_*.py")):
        text = read_text(path)
        composed = COMPOSED.search(text)
        if not composed and not techniques >= set(path.stem.split("_")[1:]):
            continue
        scripts[path] = composed["names"].split() if composed else []
        _, own = split_docstring(text, path.name)
        if base == baseline:
            continue
        new = merge(base, baseline, own, "as edited", path.name)
        new = sort_imports(new) if is_sorted else new
        if new != own:
            merged[path] = text.removesuffix(own) + new

    for path, text in merged.items():
        print(f"{path.name} follows {BASELINE}")
        write_text(path, text)
    write_text(folder / BASE, read_text(folder / BASELINE))

    problems = {}
    for path, names in scripts.items():
        try:
            _, own = read(path)
            refuse_unmarked(baseline, path)
            if gone := sorted(set(names) - techniques):
                raise MergeError(
                    f"{path.name} merges {' '.join(names)}, but there is no train_{gone[0]}.py; "
                    "delete it, or the line `Written by` in its docstring to keep it as your own"
                )
            if names and own != split_docstring(compose(names, folder=folder))[1]:
                command = f"python compose.py {' '.join(names)} -o {path.name} --force"
                print(f"{path.name} is not what its techniques give; to write it again: {command}")
        except MergeError as error:
            problems[str(error)] = path
    if problems:
        raise MergeError("\n".join(problems))


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
    output: Path | None = options.output
    try:
        if options.update:
            update()
        elif not options.techniques:
            for name in find_techniques():
                docstring, _ = read(HERE / f"train_{name}.py")
                print(f"{name:10} {docstring.splitlines()[0]}")
        elif output is not None and output.exists() and not options.force:
            raise MergeError(f"{output} already exists; use another name, or --force to replace it")
        else:
            script = compose(options.techniques, options.onto, output.name if output else None)
            if options.diff:
                old = options.onto or HERE / BASELINE
                lines = old.read_text().splitlines(), script.splitlines()
                print(*difflib.unified_diff(*lines, old.name, "merged", lineterm=""), sep="\n")
            elif output is None:
                print(script, end="")
            if output is not None:
                write_text(output, script)
            refuse_conflicts(str(output or "the printed script"), script)
    except (MergeError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}; use another path"
        print(f"compose.py: {text}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    main()
