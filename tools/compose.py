"""Merge techniques into one training script: `python -m tools.compose ddp amp -o my_train.py`.

Every technique edits other lines of the same baseline, so the three-way merge of their scripts is
the combined script. A technique is a file `train_<name>.py` whose docstring has a line such as

    Combines with every technique but `dp` and `fsdp`.

`python -m tools.compose --update` brings an edit of `train.py` to all scripts, also by a three-way
merge. Its base is `.train.py.base`, the `train.py` that the scripts were last updated with.
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

from conf.errors import UserError

HERE = Path(__file__).parents[1]
BASELINE = "train.py"
BASE = ".train.py.base"
MARKER = "# new #: "
COMBINES = re.compile(r"^Combines with every technique(?: but ([^,.]*))?[,.]", re.MULTILINE)
COMMAND = re.compile(r"`([^`]*?)\w+\.py[^`]*`")
COMPOSED = re.compile(r"^Written by `python -m tools\.compose ([\w ]+)`", re.MULTILINE)
CONFLICT = re.compile(
    r"^<{7} [^\n]*\n(?P<ours>.*?)(^\|{7} [^\n]*\n(?P<base>.*?))?"
    r"^={7}\n(?P<theirs>.*?)^>{7} [^\n]*\n",
    re.DOTALL | re.MULTILINE,
)


def split_docstring(source: str) -> tuple[str, str]:
    """Split a script into its docstring and the text after the docstring."""
    module = ast.parse(source)
    docstring = ast.get_docstring(module)
    if docstring is None:
        return "", source
    return docstring, "".join(source.splitlines(keepends=True)[module.body[0].end_lineno :])


def read(path: Path) -> tuple[str, str]:
    """Read a script's docstring and the text after it; each line ends with a line feed alone.

    Raises:
        UserError: the script holds conflicts, or is no Python.
    """
    try:
        text = path.read_text(encoding="utf-8")
        refuse_conflicts(path.name, text)
        return split_docstring(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}; correct it") from error


def find_techniques(folder: Path = HERE) -> dict[str, set[str]]:
    """Return the names of a folder's techniques, each with those that it does not combine with."""
    excluded = {}
    for path in sorted(folder.glob("train_*.py")):
        name = path.stem.removeprefix("train_")
        if "_" not in name and (line := COMBINES.search(read(path)[0])):
            excluded[name] = set(re.findall(r"`(\w+)`", line[1] or ""))
    return {
        name: others | {other for other in excluded if name in excluded[other]}
        for name, others in excluded.items()
    }


def allowed_sets(folder: Path = HERE) -> list[tuple[str, ...]]:
    """Return all sets of techniques that combine, each in alphabetical order."""
    excluded = find_techniques(folder)
    counts = range(1, len(excluded) + 1)
    sets = itertools.chain(*(itertools.combinations(excluded, count) for count in counts))
    return [names for names in sets if not any(excluded[name] & {*names} for name in names)]


def refuse_unmarked(baseline: str, script: str, name: str) -> None:
    """Raise UserError if a script's changes lack the marker; both are texts after docstrings."""
    old, new = baseline.splitlines(), script.splitlines()
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        removed = [f"- {line.strip()}" for line in old[i1:i2] if line.strip()]
        added = [f"+ {line.strip()}" for line in new[j1:j2] if line.strip()]
        is_marked = added and added[0].startswith(f"+ {MARKER}")
        if kind != "equal" and (removed or added) and not is_marked:
            raise UserError(
                f"{name} has an unmarked difference from {BASELINE}; put a comment "
                f"`{MARKER.strip()} why` above it, or take the lines of {BASELINE}:\n"
                + "\n".join(removed + added)
            )


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
        UserError: the techniques do not combine, `onto` is another script, or `train.py` was
            edited since they were made.
    """
    excluded = find_techniques(folder)
    for name in names:
        if name not in excluded:
            known = ", ".join(excluded)
            raise UserError(f"unknown technique {name}; use some of {known}: no train_{name}.py")
        if names.count(name) > 1:
            raise UserError(f"{' '.join(names)} names {name} twice; name each technique once")
        if others := excluded[name] & set(names):
            raise UserError(f"{name} does not combine with {', '.join(others)}; leave one out")
    onto_path = onto or folder / BASELINE
    docstring, merged = read(onto_path)
    lines = onto_path.read_text(encoding="utf-8").splitlines(keepends=True)
    comments = "".join(itertools.takewhile(lambda line: line[0] == "#", lines))
    merged = merged.removeprefix(comments)
    if "\n@entry_point\n" not in merged:
        raise UserError(
            f"--onto {onto_path}: it has no @entry_point, and so is not made from {BASELINE}; "
            f"start with a copy of {BASELINE}, and move your code into it"
        )
    _, baseline = read(folder / BASELINE)
    if read(folder / BASE)[1] != baseline:
        raise UserError(
            f"{BASELINE} has changed since the scripts were updated; "
            "run python -m tools.compose --update"
        )
    titles, launcher = [], "python "
    are_sorted = sort_imports(merged) == merged
    for name in sorted(names):
        path = folder / f"train_{name}.py"
        own_docstring, text = read(path)
        refuse_unmarked(baseline, text, path.name)
        merged = merge(baseline, merged, text, onto_path.name, path.name)
        titles.append(own_docstring.splitlines()[0])
        # A launcher of several processes is the longer command.
        launcher = max([launcher, *COMMAND.findall(own_docstring)[:1]], key=len)
    merged = sort_imports(merged) if are_sorted else merged
    arguments = [*names, "--onto", onto.name] if onto else names
    head = f"{docstring}\n\nWith:\n" if onto else ""
    head += "\n".join(titles) + "\n\n"
    head += f"Start with `{launcher}{output or '_'.join(['train', *names]) + '.py'}`.\n"
    head += f"Written by `python -m tools.compose {' '.join(arguments)}`.\n"
    head = head.replace("\\", r"\\").replace('"""', r"\"\"\"")
    return f'{comments}"""{head}"""\n{merged}'


def merge(base: str, ours: str, theirs: str, our_name: str, their_name: str) -> str:
    """Merge three ways with git, which marks conflicts; insertions of both at the same place are
    kept, and those of ours directly above an edit of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        labels = [option for name in (our_name, BASELINE, their_name) for option in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise UserError("scripts are merged by git, which is not installed") from error
    if done.returncode > 127:  # up to there it is the number of conflicts
        raise UserError(f"{our_name}: git merge-file failed: {done.stderr.strip()}")

    def resolved(conflict: re.Match[str]) -> str:
        ours, base, theirs = conflict["ours"], conflict["base"], conflict["theirs"]
        if base.strip():
            return ours.removesuffix(base) + theirs if ours.endswith(base) else conflict[0]
        return ours if "\n" + theirs in "\n" + ours else ours + theirs

    return CONFLICT.sub(resolved, done.stdout)


def sort_imports(text: str) -> str:
    """Sort the imports of a script with ruff, unless it has conflicts or ruff is not installed."""
    command = [sys.executable, "-m", "ruff", "check", "--select=I", "--fix", "--quiet"]
    command += [f"--stdin-filename={HERE / BASELINE}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=HERE)
    return done.stdout if done.returncode == 0 else text


def refuse_conflicts(name: str, text: str) -> None:
    """Raise UserError, which shows the lines, if there are conflicts in a script of this name."""
    if conflicts := [match[0] for match in CONFLICT.finditer(text)]:
        raise UserError(
            f"{name}: both sides edit the same lines (conflicts: {len(conflicts)}); edit between "
            f"the markers:\n{conflicts[0]}"
        )


def update(folder: Path = HERE) -> None:
    """Bring an edit of `train.py` to the scripts of all techniques and to those composed of them.

    Raises:
        UserError: a script holds conflicts from an earlier merge; no script is written. Or both
            sides edit the same lines, or a technique is gone; the other scripts are written.
    """
    techniques = find_techniques(folder).keys()
    (_, base), (_, baseline) = read(folder / BASE), read(folder / BASELINE)
    is_sorted = sort_imports(baseline) == baseline
    scripts = {}  # the techniques of those that were composed, and the lines of all
    for path in sorted(folder.glob("train_*.py")):
        composed = COMPOSED.search(path.read_text(encoding="utf-8", errors="replace"))
        if composed or techniques >= set(path.stem.split("_")[1:]):
            scripts[path] = composed[1].split() if composed else [], read(path)[1]

    for path, (_, own) in scripts.items():
        new = own if base == baseline else merge(base, baseline, own, "as edited", path.name)
        new = sort_imports(new) if is_sorted and new != own else new
        if new != own:
            print(f"{path.name} follows {BASELINE}")
            head = path.read_text(encoding="utf-8").removesuffix(own)
            path.write_text(head + new, encoding="utf-8")
    (folder / BASE).write_text((folder / BASELINE).read_text(encoding="utf-8"), encoding="utf-8")

    problems = []
    for path, (names, _) in scripts.items():
        try:
            own = read(path)[1]
            refuse_unmarked(baseline, own, path.name)
            if names and not compose(names, folder=folder).endswith(own):
                command = f"python -m tools.compose {' '.join(names)} -o {path.name} --force"
                print(f"{path.name} is not what its techniques give; to write it again: {command}")
        except UserError as error:
            problems.append(str(error) if path.name in str(error) else f"{path.name}: {error}")
    if problems:
        raise UserError("\n".join(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("techniques", nargs="*", metavar="TECHNIQUE", help="see the list without any")
    add("--onto", type=Path, help="a script of your own, made from train.py")
    add("-o", "--output", type=Path, help="file to write; default: print the script")
    add("--force", action="store_true", help="replace the file if it exists")
    add("--diff", action="store_true", help="show the difference from train.py")
    add("--update", action="store_true", help="bring an edit of train.py to all scripts")
    options = parser.parse_args()
    output = options.output
    try:
        if options.update:
            update()
        elif not options.techniques:
            for name in find_techniques():
                print(f"{name:10} {read(HERE / f'train_{name}.py')[0].splitlines()[0]}")
        elif output and output.exists() and not options.force:
            raise UserError(f"{output} already exists; use another name, or --force to replace it")
        else:
            script = compose(options.techniques, options.onto, output.name if output else None)
            if options.diff:
                old = options.onto or HERE / BASELINE
                lines = old.read_text().splitlines(), script.splitlines()
                print(*difflib.unified_diff(*lines, old.name, "merged", lineterm=""), sep="\n")
            if output:
                output.write_text(script, encoding="utf-8")
            elif not options.diff:
                print(script, end="")
            refuse_conflicts(str(output or "the printed script"), script)
    except (UserError, OSError) as error:
        print(f"tools.compose: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    main()
