"""Merge techniques into one training script: `python -m tools.compose ddp amp -o my_train.py`.

Every technique edits other lines of the same baseline, so the three-way merge of their scripts is
the combined script. A technique is a file `train_<name>.py` whose docstring has a line such as

    Combines with every technique but `dp` and `fsdp`.

The baseline is git's: `train.py` of the newest commit of these scripts that they differ from in
marked places only. So techniques merge into a `train.py` that you have edited, too, and
`python -m tools.compose --update` brings the edit to all scripts. Commit them together.
"""

import argparse
import difflib
import itertools
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from conf.errors import UserError

HERE = Path(__file__).parents[1]
BASELINE = "train.py"
MARKER = "# new #: "
COMBINES = re.compile(r"^Combines with every technique(?: but ([^,.]*))?[,.]", re.MULTILINE)
COMPOSED = re.compile(r"^Written by `python -m tools\.compose ([\w ]+)`", re.MULTILINE)
IN_CONFLICT = "both sides edit the same lines; edit between the markers"
HEAD = re.compile(r'\A(?:#.*\n)*[rR]?"""(.*?)"""\n', re.DOTALL)
CONFLICT = re.compile(
    r"^<{7} .*?\n(?P<ours>.*?)^\|{7} .*?\n(?P<base>.*?)^={7}\n(?P<theirs>.*?)^>{7} .*?\n",
    re.DOTALL | re.MULTILINE,
)


def split(text: str) -> tuple[str, str]:
    """Split a script into its head, which ends with the docstring, and its code."""
    head = HEAD.match(text)
    end = head.end() if head else 0
    return text[:end], text[end:]


def read_source(path: Path) -> tuple[str, str]:
    """Split a script that techniques are merged into; UserError if it has conflict markers."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("<<<<<<< "):
            raise UserError(f"{path.name}:{number}: {IN_CONFLICT}")
    return split(text)


def title_of(head: str) -> str:
    """Return the first line of a docstring."""
    return head.partition('"""')[2].splitlines()[0]


def find_techniques(folder: Path = HERE) -> dict[str, set[str]]:
    """Return a folder's techniques by name, each with those that it says it excludes."""
    techniques = {}
    for path in sorted(folder.glob("train_*.py")):
        name = path.stem.removeprefix("train_")
        if "_" not in name and (line := COMBINES.search(split(path.read_text())[0])):
            techniques[name] = set(re.findall(r"`(\w+)`", line[1] or ""))
    return techniques


def unmarked_lines(baseline: str, script: str) -> list[str]:
    """Return the first change of a script, with - and +, that lacks the marker; both are code."""
    old, new = baseline.splitlines(), script.splitlines()
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        removed = [f"- {line.strip()}" for line in old[i1:i2] if line.strip()]
        added = [f"+ {line.strip()}" for line in new[j1:j2] if line.strip()]
        is_marked = added and added[0].startswith(f"+ {MARKER}")
        if kind != "equal" and (removed or added) and not is_marked:
            return removed + added
    return []


def git(folder: Path, *arguments: str) -> str:
    """Run git and return what it prints; UserError if it cannot answer."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"git {arguments[0]}: {done.stderr.strip().splitlines()[0]}\n"
            f"a merge starts from the {BASELINE} in git; commit {BASELINE} and the scripts"
        )
    return done.stdout


def find_baseline(scripts: dict[str, str], folder: Path) -> str:
    """Return the code of the `train.py` that scripts, code by name, were last made of.

    UserError if they fit no committed one nor, if they were edited since, that on disk.
    """
    commits = git(folder, "log", "--format=%H", "--", *scripts).split()
    texts: Iterable[str] = (git(folder, "show", f"{commit}:./{BASELINE}") for commit in commits)
    if git(folder, "status", "--porcelain", "--", *scripts):
        texts = itertools.chain([(folder / BASELINE).read_text()], texts)
    misfits: dict[str, list[str]] = {}
    for text in texts:
        _, baseline = split(text)
        changes = {name: unmarked_lines(baseline, code) for name, code in scripts.items()}
        if not any(changes.values()):
            return baseline
        misfits = misfits or {name: lines for name, lines in changes.items() if lines}
    name, lines = next(iter(misfits.items()), (", ".join(scripts), ["not in git"]))
    raise UserError(
        f"{name} has an unmarked difference from {BASELINE} in git; commit both after each "
        f"--update, and put a comment `{MARKER.strip()} why` above a change:\n" + "\n".join(lines)
    )


def compose(
    names: list[str], onto: Path | None = None, output: str | None = None, folder: Path = HERE
) -> str:
    """Combine techniques into one script; UserError if they say that they do not combine.

    It has conflict markers where they edit the same lines. A script `onto`, made from `train.py`,
    gets them in its place and keeps its docstring. `output` is the file name in the docstring's
    command, by default train_<names>.py.
    """
    techniques = find_techniques(folder)
    for name in names:
        if name not in techniques:
            known = ", ".join(techniques)
            raise UserError(f"unknown technique {name}; use some of {known}: no train_{name}.py")
        if names.count(name) > 1:
            raise UserError(f"{' '.join(names)} names {name} twice; name each technique once")
        if others := techniques[name] & set(names):
            raise UserError(f"{name} does not combine with {', '.join(others)}; leave one out")
    files = [f"train_{name}.py" for name in sorted(names)]
    scripts = {file: split((folder / file).read_text()) for file in files}
    baseline = find_baseline({file: code for file, (_, code) in scripts.items()}, folder)
    path = onto or folder / BASELINE
    head, merged = read_source(path)
    for file, (_, code) in scripts.items():
        merged = merge(baseline, merged, code, path.name, file)
    if onto:
        return head + merged
    heads = [own_head for own_head, _ in scripts.values()]
    titles = "\n".join(map(title_of, heads))
    has_ranks = any("torchrun" in own_head for own_head in heads)
    launcher = "torchrun --standalone --nproc_per_node=2" if has_ranks else "python"
    start = f"Start with `{launcher} {output or '_'.join(['train', *names]) + '.py'}`."
    written = f"Written by `python -m tools.compose {' '.join(names)}`."
    return f'"""{titles}\n\n{start}\n{written}\n"""\n{merged}'


def merge(base: str, ours: str, theirs: str, our_name: str, their_name: str) -> str:
    """Merge three ways with git, which marks conflicts; insertions of both at the same place are
    kept, and those of ours directly above an edit of theirs."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        labels = [option for name in (our_name, BASELINE, their_name) for option in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 127:  # up to there it is the number of conflicts
        raise UserError(f"{our_name}: git merge-file failed: {done.stderr.strip()}")

    def resolved(conflict: re.Match[str]) -> str:
        ours, base, theirs = conflict["ours"], conflict["base"], conflict["theirs"]
        if base.strip():
            return ours.removesuffix(base) + theirs if ours.endswith(base) else conflict[0]
        return ours if "\n" + theirs in "\n" + ours else ours + theirs

    return CONFLICT.sub(resolved, done.stdout)


def update(folder: Path = HERE) -> None:
    """Bring an edit of `train.py` to the scripts of all techniques and to those composed of them.

    UserError if `train.py` has conflict markers, or a script unmarked differences, such as
    conflicts of an earlier merge: none is written. Or if both sides edit the same lines: all are
    written.
    """
    _, baseline = read_source(folder / BASELINE)
    techniques = find_techniques(folder)
    scripts = {}
    for path in sorted(folder.glob("train_*.py")):
        head, code = split(path.read_text())
        if COMPOSED.search(head) or path.stem.removeprefix("train_") in techniques:
            scripts[path.name] = head, code
    base = find_baseline({name: code for name, (_, code) in scripts.items()}, folder)
    conflicts = []
    for name, (head, code) in scripts.items():
        new = merge(base, baseline, code, "as edited", name)
        if new != code:
            print(f"{name} follows {BASELINE}; commit them together")
            (folder / name).write_text(head + new)
        if CONFLICT.search(new):
            conflicts.append(name)
    if conflicts:
        raise UserError(f"{', '.join(conflicts)}: {IN_CONFLICT}")
    for name in scripts:
        text = (folder / name).read_text()
        written = COMPOSED.search(text)
        if written and not compose(written[1].split(), folder=folder).endswith(split(text)[1]):
            command = f"python -m tools.compose {written[1]} -o {name} --force"
            print(f"{name} is not what its techniques give; to write it again: {command}")


def show(script: str, options: argparse.Namespace) -> None:
    """Write or print a composed script, or its difference from what it was made of."""
    output = options.output
    if options.diff:
        old = options.onto or HERE / BASELINE
        lines = old.read_text().splitlines(), script.splitlines()
        print(*difflib.unified_diff(*lines, old.name, "merged", lineterm=""), sep="\n")
    if output:
        output.write_text(script)
    elif not options.diff:
        print(script, end="")
    if CONFLICT.search(script):
        raise UserError(f"{output or 'the script'}: {IN_CONFLICT}")


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
                print(f"{name:10} {title_of((HERE / f'train_{name}.py').read_text())}")
        elif output and output.exists() and not options.force:
            raise UserError(f"{output} already exists; use another name, or --force to replace it")
        else:
            file = output.name if output else None
            show(compose(options.techniques, options.onto, file), options)
    except (UserError, OSError) as error:
        print(f"tools.compose: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    main()
