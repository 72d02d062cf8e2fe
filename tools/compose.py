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
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from conf.errors import UserError, unknown_name

HERE = Path(__file__).parents[1]
BASELINE = "train.py"
MARKER = "# new #: "
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that git sets in hooks, which would point it to the hook's repository."""
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


def read(path: Path) -> tuple[str, str]:
    """Split a script, which nothing is merged into while it has conflict markers."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("<<<<<<< "):
            raise UserError(f"{path.name}:{number}: {IN_CONFLICT}")
    return split(text)


def title_of(head: str) -> str:
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
    """Run git and return what it prints, without the last line's end; UserError if it fails."""
    env = {key: value for key, value in os.environ.items() if key not in OF_A_HOOK}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, env=env, text=True)
    if done.returncode:
        raise UserError(f"git {arguments[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.removesuffix("\n")


def find_baseline(scripts: dict[str, str], folder: Path) -> str:
    """Return the code of the `train.py` that scripts, code by name, were last made of.

    UserError if they fit no committed one nor, if they were edited since, that on disk.
    """
    commits = git(folder, "log", "--format=%H", "--", *scripts).split()
    texts: Iterable[str] = (git(folder, "show", f"{commit}:./{BASELINE}") for commit in commits)
    if git(folder, "status", "--porcelain", "--", *scripts):
        texts = itertools.chain([(folder / BASELINE).read_text()], texts)
    misfits: list[list[str]] = []
    for text in texts:
        _, baseline = split(text)
        changes = [[name, *unmarked_lines(baseline, code)] for name, code in scripts.items()]
        unmarked = [change for change in changes if len(change) > 1]
        if not unmarked:
            return baseline
        misfits = misfits or unmarked
    name, *lines = misfits[0] if misfits else [", ".join(scripts), "not in git"]
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
            raise unknown_name("technique", name, techniques)
        if others := techniques[name] & set(names):
            raise UserError(f"{name} does not combine with {', '.join(others)}; leave one out")
    files = [f"train_{name}.py" for name in sorted(set(names))]
    heads, codes = zip(*(read(folder / file) for file in files), strict=True)
    scripts = dict(zip(files, codes, strict=True))
    baseline = find_baseline(scripts, folder)
    path = onto or folder / BASELINE
    head, merged = read(path)
    for file, code in scripts.items():
        merged = merge(baseline, merged, code, path.name, file)
    if onto:
        return head + merged
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

    UserError if a script has conflict markers or unmarked differences: none is written. Or if both
    sides edit the same lines: all are written.
    """
    _, baseline = read(folder / BASELINE)
    techniques = {f"train_{name}.py" for name in find_techniques(folder)}
    heads, codes = {}, {}
    for path in sorted(folder.glob("train_*.py")):
        head, code = split(path.read_text())
        if path.name in techniques or COMPOSED.search(head):
            heads[path.name], codes[path.name] = head, code
    base = find_baseline(codes, folder)
    merged = {name: merge(base, baseline, code, "as edited", name) for name, code in codes.items()}
    for name, code in merged.items():
        if code != codes[name]:
            print(f"{name} follows {BASELINE}; commit them together")
            (folder / name).write_text(heads[name] + code)
    if conflicts := [name for name, code in merged.items() if CONFLICT.search(code)]:
        raise UserError(f"{', '.join(conflicts)}: {IN_CONFLICT}")
    for name, head in heads.items():
        written = COMPOSED.search(head)
        if written and split(compose(written[1].split(), folder=folder))[1] != merged[name]:
            command = f"python -m tools.compose {written[1]} -o {name} --force"
            print(f"{name} is not what its techniques give; to write it again: {command}")


def write(options: argparse.Namespace) -> None:
    """Write or print a composed script, or its difference from what it was made of."""
    output = options.output
    if output and output.exists() and not options.force:
        raise UserError(f"{output} already exists; use another name, or --force to replace it")
    script = compose(options.techniques, options.onto, output and output.name)
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
    try:
        if options.update:
            update()
        elif options.techniques:
            write(options)
        else:
            for name in find_techniques():
                print(f"{name:10} {title_of((HERE / f'train_{name}.py').read_text())}")
    except (UserError, OSError) as error:
        print(f"tools.compose: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    main()
