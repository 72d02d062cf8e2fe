"""Plant faults in the product, one at a time, and see which test files catch each, and how soon.

    python -m benchmarks.faults                 # the whole table again; faults=3,17: two of them
    python -m benchmarks.faults draw=20 seed=57 paths=loaders,runtime         # adds new faults,
                                # of which those are to be deleted that change nothing on their face

A row of faults.csv is a fault, chosen by a person or drawn, a random change in a random
line: `new` in place of `old`, which `file` has once, else it is `gone`. `caught_by` is the first
test file that fails with it alone and passes without, `also` others that came out besides; `tests`:
these are quick or slow; `seconds`: pytest took so long, up to its first failure in the quick ones.
A row without `caught_by` is still to be measured.

Each fault first meets quick tests, of the files that share most rare words with its own. Those that
survive are planted together for all tests, and the ones that fail are run with each fault alone.
"""

import ast
import csv
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conf.cli import parse_options

TABLE = Path("benchmarks/faults.csv")
PRODUCT = re.compile(r"[^/]*\.py|(conf|loaders|runtime|tasks|models|tools|launch|plain)/.*\.py")
TESTS = ("tests", "template/tests", "benchmarks/tests")
ALIKE: list[Any] = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)]
ALIKE += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub)]
OTHER: dict[Any, Any] = dict(ALIKE) | {b: a for a, b in ALIKE} | {"min": "max", "max": "min"}
SAYS = re.compile(r"(raise|assert|log|print|warnings|add|super)\b")  # statements with messages


def changes(node: Any) -> Iterator[tuple[str, Any, ast.AST]]:
    """Yield the kind of a fault, the node that it replaces, and what stands in its place."""
    match node:
        case ast.Compare(one, [op], others) if type(op) in OTHER:
            yield "comparison", node, ast.Compare(one, [OTHER[type(op)]()], others)
        case ast.BoolOp(op, values):
            yield "and/or", node, ast.BoolOp(OTHER[type(op)](), values)
        case ast.BinOp(one, ast.Add() | ast.Sub() as op, other):
            if not re.search("[\"'[]", ast.unparse(node)):  # of texts and lists
                yield "sign", node, ast.BinOp(one, OTHER[type(op)](), other)
        case ast.Constant(int(value)):
            yield "constant", node, ast.Constant(value + 1 if type(value) is int else not value)
        case ast.keyword("axis" | "dim", ast.Constant(int(value))):
            yield "wrong axis", node.value, ast.Constant(abs(value - 1))
        case ast.Name(name) if name in OTHER:
            yield "min/max", node, ast.Name(OTHER[name])
        case ast.Expr(ast.Call()):
            yield "dropped call", node, ast.Pass()
        case ast.Call(ast.Attribute(attr="gather"), [value]):
            yield "dropped collective", node, ast.List([value])
        case ast.Call(name, [one, other, *rest]) if type(one) is type(other):
            if ast.dump(one) == ast.dump(other):
                return
            yield "swapped arguments", node, ast.Call(name, [other, one, *rest], node.keywords)


def nodes(node: Any) -> Iterator[Any]:
    """Yield the nodes of a syntax tree that compute something: no messages and no types."""
    says = isinstance(node, ast.stmt) and SAYS.match(ast.unparse(node))
    if not says and not isinstance(node, ast.JoinedStr):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from nodes(child)


def draw(count: int, seed: int, paths: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yield random faults in files below `paths`: each line is as likely as another one."""
    names = [name for name in sorted(map(str, Path().rglob("*.py"))) if PRODUCT.fullmatch(name)]
    texts = {name: Path(name).read_bytes() for name in names if name.startswith(paths)}
    places = [(name, n) for name, text in texts.items() for n in range(text.count(b"\n"))]
    rng = random.Random(seed)
    while count:
        name, first = rng.choice(places)
        found = [change for node in nodes(ast.parse(texts[name])) for change in changes(node)]
        if found := [change for change in found if change[1].lineno == first + 1]:
            kind, node, changed = rng.choice(found)
            lines = texts[name].splitlines(keepends=True)
            old = b"".join(lines[first : node.end_lineno])
            new = lines[first][: node.col_offset] + ast.unparse(changed).encode()
            new += lines[node.end_lineno - 1][node.end_col_offset :]
            while texts[name].count(old) > 1:  # with lines above it, the file has it once
                first -= 1
                old, new = lines[first] + old, lines[first] + new
            count -= 1
            yield {"kind": f"drawn: {kind}", "file": name, "old": old.decode(), "new": new.decode()}


def nearest(file: str) -> list[str]:
    """Return arguments of pytest: the five test files that share most rare words with a file."""
    tests = [str(path) for folder in TESTS for path in Path(folder).rglob("test_*.py")]
    words = {x: set(re.findall("[a-z_]{4,}", Path(x).read_text() + x)) for x in (file, *tests)}
    number = Counter(word for test in tests for word in words[test])
    score = {x: sum(1 / number[w] for w in words[file] & words[x]) / len(words[x]) for x in tests}
    return ["-x", *sorted(tests, key=lambda test: -score[test])[:5]]


def failing(faults: list[dict[str, str]], *options: str) -> tuple[list[str], str]:
    """Return the tests that fail with these faults, and the seconds up to the end of pytest."""
    command = ["timeout", "-s", "KILL", "3600", sys.executable, "-m", "pytest", "--tb=no", "-rfE"]
    left_out = shutil.ignore_patterns(".venv", "outputs", "__pycache__", ".*_cache")
    with TemporaryDirectory() as folder:
        copy = shutil.copytree(Path(), Path(folder, "copy"), True, left_out)
        for fault in faults:  # of two at one place, the second is left out
            file = copy / fault["file"]
            file.write_text(file.read_text().replace(fault["old"], fault["new"]))
        begin = time.monotonic()
        told = subprocess.run([*command, *options], cwd=copy, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told.stdout + told.stderr, re.M)
    print(*[fault["number"] for fault in faults], "fails", failed, flush=True)
    return failed, f"{time.monotonic() - begin:.0f}"


def meet(faults: list[dict[str, str]]) -> None:
    """Note in each fault which tests catch it."""
    for fault in faults:
        text = "".join(path.read_text() for path in Path().glob(fault["file"]))
        fault["caught_by"] = "nothing" if text.count(fault["old"]) == 1 else "gone"
    for marks, is_near in (("not slow", True), ("not slow", False), ("slow", False)):
        left = [fault for fault in faults if fault["caught_by"] == "nothing"]
        if not left:
            return
        options = ["-m", marks, "--timeout=150"]
        tests = [] if is_near else failing(left, *options, "-n2", "--dist=loadfile", *TESTS)[0]
        left = left if is_near or tests else []
        met = [(f, *failing([f], *options, *(tests or nearest(f["file"])))) for f in left]
        failed = {test for _, some, _ in met for test in some}
        broken = failing([], *failed)[0] if failed else []  # without a fault
        for fault, some, seconds in met:
            if files := [*dict.fromkeys(x.partition("::")[0] for x in some if x not in broken)]:
                fault |= {"caught_by": files[0], "also": " ".join(files[1:]), "seconds": seconds}
                fault["tests"] = marks.replace("not slow", "quick")


if __name__ == "__main__":
    given, _ = parse_options(__doc__, sys.argv[1:], faults="", draw="0", seed="57", paths="")
    with TABLE.open(newline="") as file:
        table = list(csv.DictReader(file))
    table += draw(int(given["draw"]), int(given["seed"]), tuple(given["paths"].split(",")))
    if given["draw"] == "0":
        meet([x for x in table if x["number"] in (given["faults"] or x["number"]).split(",")])
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"number": str(n)} for n, row in enumerate(table, start=1))
