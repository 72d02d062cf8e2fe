"""Cut a module of tests to the parts of a project: a test or table row goes with what it names."""

import ast
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import chain

parse = cache(ast.parse)
PARAMETRIZE = "pytest.mark.parametrize"
INCIDENTAL = ("data.cache_dir=", "loader=synthetic")
"""Overrides that tests pass beside what they are about: such a one goes alone."""


def without_tests(
    text: str, lost: set[str], is_gone: Callable[[str], bool], choices: set[str]
) -> tuple[str, set[str]]:
    """Return the text of a module without what uses a name that is lost or a string that names what
    is gone.

    Of tables, and of the parameters of tests, only such rows go, unless none would be left.

    Args:
        text: of the module.
        lost: names that it does not import any more.
        is_gone: returns True for strings that name what is gone.
        choices: strings that are rows of their own and are gone, such as `dali`.

    Returns:
        The text, and `lost` with the names that it does not define any more.
    """

    def is_doomed(node: ast.AST, kept: Collection[ast.AST] = ()) -> bool:
        for inner in walk(node, kept):
            name = inner.id if isinstance(inner, ast.Name) else getattr(inner, "arg", None)
            if name in lost or (isinstance(inner, ast.Constant) and is_gone(str(inner.value))):
                return True
        return isinstance(node, ast.Constant) and node.value in choices

    lost, used_before = set(lost), names_of(text)
    text = without_incidental(text, is_gone)
    before = ""
    while text != before:
        before = text
        for statement in reversed(definitions(text)):  # what is above keeps its lines
            tables = tables_of(statement)
            doomed = [
                [row for row in rows if any(is_doomed(n) for n in row[1:])] for rows in tables
            ]
            are_left = all(len(rows) > len(d) for rows, d in zip(tables, doomed, strict=True))
            nodes = {node for rows in tables for row in rows for node in row}
            if not are_left or is_doomed(statement, nodes):
                text = without_statement(text, statement)
                lost |= names_defined(statement)
                continue
            for row in sorted(chain(*doomed), key=lambda row: (-row[0].lineno, -row[0].col_offset)):
                text = without_row(text, row)
        unused = used_before - names_of(text)  # helpers that nobody uses any more
        for statement in reversed(definitions(text)):
            if is_autouse(statement):
                continue
            if names_defined(statement) and names_defined(statement) <= unused:
                text = without_statement(text, statement)
                lost |= names_defined(statement)
    return text, lost


def without_incidental(text: str, is_gone: Callable[[str], bool]) -> str:
    """Return the text without overrides, in lists and arguments, that are `INCIDENTAL` and gone."""

    def is_doomed(node: ast.expr) -> bool:
        start = node.values[0] if isinstance(node, ast.JoinedStr) else node
        value = start.value if isinstance(start, ast.Constant) else ""
        return str(value).startswith(INCIDENTAL) and is_gone(str(value))

    lists: list[list[ast.expr]] = []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.List | ast.Tuple):
            is_safe = isinstance(node, ast.List) or len(node.elts) > 2  # else it needs a comma
            lists += [node.elts] * is_safe
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "make_config":
            lists.append(node.args)
    rows = [row for rows in lists for row in rows if is_doomed(row)]
    for row in sorted(rows, key=lambda row: (-row.lineno, -row.col_offset)):
        text = without_row(text, [row, row])
    return text


def is_autouse(statement: ast.stmt) -> bool:
    """Return True for a fixture that pytest uses by itself."""
    return any("autouse=True" in ast.unparse(d) for d in getattr(statement, "decorator_list", []))


def walk(node: ast.AST, without: Collection[ast.AST] = ()) -> Iterator[ast.AST]:
    """Yield a node and all below it, but for some of them and for docstrings."""
    if node in without:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from walk(inner, without)


@cache
def names_of(text: str) -> set[str]:
    """Return the names that a module uses, fixtures too."""
    nodes = list(walk(parse(text)))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    strings = {str(n.value) for n in nodes if isinstance(n, ast.Constant)}
    return names | strings | {n.arg for n in nodes if isinstance(n, ast.arg)}


def definitions(text: str) -> list[ast.stmt]:
    kinds = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign
    return [statement for statement in parse(text).body if isinstance(statement, kinds)]


def names_defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines; none for `x += ...`, which only adds to one."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    if isinstance(statement, ast.AugAssign):
        return set()
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def tables_of(statement: ast.stmt) -> list[list[list[ast.expr]]]:
    """Return the rows, each with its first and its last node, of a table or of the parameters of a
    test."""
    if isinstance(statement, ast.FunctionDef):
        calls = [call for call in statement.decorator_list if isinstance(call, ast.Call)]
        values = [call.args[1] for call in calls if ast.unparse(call.func) == PARAMETRIZE]
    else:
        values = [value for value in [getattr(statement, "value", None)] if value]
    tables: list[list[list[ast.expr]]] = []
    for value in values:
        if isinstance(value, ast.List | ast.Tuple | ast.Set):
            tables.append([[row, row] for row in value.elts])
        elif isinstance(value, ast.Dict):
            rows = zip(value.keys, value.values, strict=True)
            tables.append([[key or row, row] for key, row in rows])
    return [rows for rows in tables if rows]


def without_statement(text: str, statement: ast.stmt) -> str:
    """Return the text without a statement, the comments above it and the docstring below it."""
    lines = text.split("\n")
    decorators = getattr(statement, "decorator_list", [])
    first = min(node.lineno for node in [statement, *decorators]) - 1
    last = statement.end_lineno or statement.lineno
    while lines[first - 1].startswith("#"):
        first -= 1
    if lines[last].startswith('"""') and not decorators:
        while not lines[last].endswith('"""') or lines[last] == '"""':
            last += 1
        last += 1
    above = first
    while above and (not lines[above - 1] or lines[above - 1].startswith("#")):
        above -= 1
    below = last
    while below < len(lines) and not lines[below]:
        below += 1
    blank = min(2, max(first - above, below - last)) if below < len(lines) else 1
    imports = [n.end_lineno for n in parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    if above in imports and not "".join(lines[below:]).startswith(("def ", "class ", "@")):
        blank = 1  # between the imports and what is assigned
    return "\n".join([*lines[:above], *[""] * blank, *lines[below:]])


def without_row(text: str, row: list[ast.expr]) -> str:
    """Return the text without a row of a table."""
    lines = [line.encode() for line in text.split("\n")]
    first, last = row[0].lineno - 1, (row[-1].end_lineno or row[-1].lineno) - 1
    before = lines[first][: row[0].col_offset]
    after = lines[last][row[-1].end_col_offset or 0 :]
    if not before.strip() and after.startswith(b","):
        lines[first : last + 1] = []
    elif after.startswith(b", "):
        lines[first : last + 1] = [before + after[2:]]
    else:
        lines[first : last + 1] = [before.removesuffix(b", ") + after]
    return b"\n".join(lines).decode()
