"""The parts of a project: what each one is, and how unwanted ones are removed from its files."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NoReturn

from conf.reference import documented_keys
from template.cut_tests import (
    definitions,
    names_defined,
    names_of,
    parse,
    tables_of,
    without_row,
    without_tests,
)

TEMPLATE = Path(__file__).resolve().parents[1]
DECLARATION = TEMPLATE / "template" / "parts.toml"
WITHOUT = re.compile(r"^( *)# without (\w+): (.*)$")
MARK = re.compile(r" *(?:<!--|#) part: ([\w| ]+?)(?: -->)?$")
CHOICE = r"(?:^| )(\w+)=(\w+)"
PRODUCT = (".py", ".yaml", ".sbatch")
CLOSING = (")", "]", "}")
LISTS = re.compile(
    r"^(from \S+ import \(| *def \w+\()\n((?: +[^\n]+,\n)+) *(\)[^\n]*)$",
    re.MULTILINE,
)
"""Imports and signatures of several lines, one for each name."""
PARAMETERS = re.compile(r"^(@pytest\.mark\.parametrize\()\n +([^\n]+)(?<!,)\n(\))$", re.MULTILINE)
"""Parameters of a test that are on a line of their own."""
LINE_LENGTH = 100


@dataclass(frozen=True)
class Part:
    """A part that a project can do without."""

    group: str
    about: str
    paths: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def refuse(message: str) -> NoReturn:
    sys.exit(f"make project: {message}")


@cache
def read_parts() -> tuple[dict[str, Part], dict[str, list[str]]]:
    """Read the parts by name, and paths with the parts that all have to be there for them."""
    groups = declared()
    together = groups.pop("with")
    groups.pop("core")
    return {
        name: Part(group, **facts)
        for group, parts in groups.items()
        for name, facts in parts.items()
    }, together


def declared() -> dict[str, Any]:
    return tomllib.loads(DECLARATION.read_text())


def with_needs(names: list[str]) -> set[str]:
    """Return parts with all that they need; `core` and parts of earlier versions stand for none, no
    name at all for all of them.

    `images` is one of them, unless there is data of one's own in its place; and so is `scripts`,
    which lines and files need that a project with one merged script does not have.
    """
    parts, _ = read_parts()
    chosen, chooses_nothing = {"scripts"}, {"core", *declared()["core"]["since"]}
    waiting = [name for name in names if name not in chooses_nothing] if names else list(parts)
    if "own" not in waiting:  # without images, it is the only data
        waiting.append("images")
    while waiting:
        name = waiting.pop()
        if name not in parts:
            [nearest] = get_close_matches(name, [*parts, "core"], 1, 0) or [""]
            refuse(f"PARTS: there is no part {name}; did you mean {nearest}? make parts lists them")
        if name not in chosen:
            chosen.add(name)
            waiting += parts[name].needs
    return chosen


def left_out(chosen: set[str]) -> list[str]:
    """Return the paths that a project with these parts does not have."""
    parts, together = read_parts()
    paths = [path for name in parts.keys() - chosen for path in parts[name].paths]
    paths += [path for path, names in together.items() if not are_there(names, chosen)]
    return sorted(paths)


def are_there(names: list[str], chosen: set[str]) -> bool:
    """Return True if all of these parts are chosen; of `a|b`, one of the two."""
    return all(chosen & set(some.split("|")) for some in names)


def cut(folder: Path, chosen: set[str], gone: list[str]) -> None:
    """Take lines that belong to other parts, and all marks, out of the files of a folder.

    Args:
        folder: with a project's files, without those in `gone`.
        chosen: parts of the project.
        gone: files that were there in the template.
    """
    before = texts_in(folder)
    folders = {str(parent) for path in gone for parent in Path(path).parents}
    without = {name for name in folders if not (folder / name).exists()}
    for path, text in without_parts(before, chosen, frozenset([*gone, *without])).items():
        if not text and before[path]:
            (folder / path).unlink()
        elif text != before[path]:
            (folder / path).write_text(tidied(path, text, before[path]))


def texts_in(folder: Path) -> dict[Path, str]:
    """Return the texts in a folder by relative path, without files of another kind."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        with suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.relative_to(folder)] = path.read_text()
    return texts


def without_parts(
    before: dict[Path, str], chosen: set[str], gone: frozenset[str]
) -> dict[Path, str]:
    """Return texts without the marked lines of other parts, and without what names something that
    is gone: imports, entries of tables, tests, and commands and rows of pages.

    Args:
        before: texts of a project's files in the template.
        chosen: parts of the project.
        gone: files and folders that it does not have.

    Returns:
        The texts; those of modules of tests that have no test any more are empty.
    """
    texts = {path: without_marks(text, chosen) for path, text in before.items()}
    for path, text in texts.items():
        if path.suffix == ".md":
            texts[path] = without_commands(without_rows(text, path.parent, gone), gone)
    code = [path for path in texts if path.suffix == ".py"]
    modules = {module_of(Path(path)) for path in gone if path.endswith(".py")}
    lost = {module_of(path): offered_by(before[path]) - offered_by(texts[path]) for path in code}
    schema = Path("conf/schema.py")
    keys = sorted(keys_of(before[schema]) - keys_of(texts[schema]))
    key = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, keys)) or '(?!)'})\b(?!\.)")
    choices = {Path(path).stem for path in gone if re.fullmatch(r"conf/\w+/\w+\.yaml", path)}
    is_changed = True
    while is_changed:
        is_changed = False
        for path in code:
            module = module_of(path)
            text, names = without_imports(texts[path], modules, lost)
            names |= lost[module]
            text = without_entries(text, names, modules)
            if path.parts[0] == "tests":
                text, names = without_tests(
                    text, names, lambda s: bool(key.search(s)) or gone_of(s, gone), choices
                )
                if "\ndef test_" in before[path] and "\ndef test_" not in text:
                    text = ""
                    modules.add(module)
            if text != texts[path]:
                texts[path], lost[module], is_changed = text, names, True
    return texts


def offered_by(text: str) -> set[str]:
    """Return the names that a module defines at its top level, and those that it imports."""
    imported = {bound_name(name) for node in imports_of(text) for name in node.names}
    return imported.union(*map(names_defined, definitions(text)))


def tidied(path: Path, text: str, before: str) -> str:
    """Return a text that was cut as ruff wants it: without unused imports and needless breaks."""
    if path.suffix != ".py":
        return text
    return joined_lines(without_unused(text, names_of(before)))


def keys_of(schema: str) -> set[str]:
    """Return the keys of the configuration, and those of its groups that belong to a part of the
    same name."""
    keys = {key for key, *_ in documented_keys(schema)}
    return keys | ({key.partition(".")[0] for key in keys} & read_parts()[0].keys())


@cache
def imports_of(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [n for n in ast.walk(parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]


def bound_name(name: ast.alias) -> str:
    """Return the name that an import defines."""
    return name.asname or name.name.partition(".")[0]


def without_marks(text: str, chosen: set[str]) -> str:
    """Return a file's text without the lines and blocks that are marked as those of other parts,
    and without marks."""
    lines, kept = text.split("\n"), list[str]()
    number = 0
    while number < len(lines):
        if (other := WITHOUT.match(lines[number])) is not None:
            kept += [other[1] + other[3]] * (other[2] not in chosen)
            number += 1
            continue
        mark = MARK.search(lines[number])
        line = MARK.sub("", lines[number])
        wanted = mark is None or are_there(mark[1].split(), chosen)
        if mark is None or (wanted and line):
            kept.append(line)
        number += 1
        if wanted:
            continue
        number = end_of_block(lines, number - 1, line)
        # Of the empty lines around the block, the longer gap stays.
        if kept and not kept[-1].strip():
            above, below = num_empty(reversed(kept)), num_empty(lines[number:])
            number += below
            kept += [""] * (below - above)
    return "\n".join(kept).rstrip("\n") + "\n" * text.endswith("\n")


def num_empty(lines: Iterable[str]) -> int:
    """Return the number of empty lines at the start."""
    return sum(1 for _ in takewhile(lambda line: not line.strip(), lines))


def end_of_block(lines: list[str], number: int, first: str) -> int:
    """Return the number of the line behind the block that a marked line opens; a line that opens
    none is a block itself."""
    if first.startswith("#"):  # a heading: to the next one that is as high
        level = len(first) - len(first.lstrip("#"))
        ends = (
            n
            for n in range(number + 1, len(lines))
            if re.match(rf"#{{1,{level}}} ", lines[n]) and not in_code(lines, n)
        )
        return next(ends, len(lines))
    if not first:  # a mark above a paragraph, a list or a fenced block
        number += 1
        if lines[number].lstrip().startswith(("@", "def ", "class ")):
            return end_of_block(lines, number, lines[number])
        is_code = lines[number].startswith("```")
        while lines[number].strip() or is_code:
            number += 1
            if is_code and lines[number].startswith("```"):
                return number + 1
        return number
    indent = len(first) - len(first.lstrip())
    opens = first.rstrip().endswith((":", "(", "[", "{"))
    number += 1
    is_key = not opens and bool(lines[number : number + 1])
    if is_key and re.match(r' *"""', lines[number]):  # of a configuration key
        while not lines[number].endswith('"""') or lines[number].strip() == '"""':
            number += 1
        return number + 1
    if first.lstrip().startswith("@"):
        while not lines[number - 1].lstrip().startswith(("def ", "class ")):
            number += 1
        opens = True
    while opens and number < len(lines):
        line = lines[number]
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            if not line.lstrip().startswith(CLOSING):
                break
            number += 1
            if line.rstrip().endswith((":", "(", "[", "{")):
                continue
            break
        number += 1
    while not lines[number - 1].strip():
        number -= 1
    return number


def in_code(lines: list[str], number: int) -> bool:
    """Return True for a line of a fenced block."""
    return sum(line.lstrip().startswith("```") for line in lines[:number]) % 2 == 1


def without_rows(text: str, folder: Path, gone: frozenset[str]) -> str:
    """Return a page without the rows of tables that name or link to a file that is gone."""
    kept = []
    for line in text.split("\n"):
        names = re.findall(r"`([\w./]+)`", line) + re.findall(r"\]\(([^)#:]+)", line)
        choice = re.match(r"\| [^|]*?`(\w+)=(\w+)", line)
        names += [f"conf/{choice[1]}/{choice[2]}.yaml"] if choice else []
        places = {
            p.lstrip("./").rstrip("/") for n in names for p in (n, f"tests/{n}", f"{folder}/{n}")
        }
        if not (line.startswith("| ") and any(path in gone for path in places)):
            kept.append(line)
    return "\n".join(kept)


def without_commands(text: str, gone: frozenset[str]) -> str:
    """Return a page without the commands that need a file that is gone, and without blocks that had
    no others."""

    def block(match: re.Match[str]) -> str:
        commands = re.findall(r"(?:.*\\\n)*.*\n", match[1])
        kept = [command for command in commands if not gone_of(command, gone)]
        return "```bash\n" + "".join(kept) + f"{match[2]}```\n" if kept or not commands else ""

    return re.sub(r"```bash\n(.*?)( *)```\n", block, text, flags=re.DOTALL)


@cache
def gone_of(command: str, gone: frozenset[str]) -> bool:
    """Return True if a command names a script, module or choice of configuration that is gone."""
    names = re.findall(r"[\w./]+\.(?:py|sbatch)\b", command)
    modules = re.findall(r"(?:-m|from|import) ([\w.]+)", command)
    names += [name.replace(".", "/") + end for name in modules for end in (".py", "/__init__.py")]
    names += [
        f"{name.replace('.', '/')}/__main__.py" for name in re.findall(r"-m ([\w.]+)", command)
    ]
    names += [f"conf/{key}/{value}.yaml" for key, value in re.findall(CHOICE, command)]
    merged = [n for n in names if n.startswith("train_") and not (TEMPLATE / n).exists()]
    if merged:  # by compose.py, of techniques
        techniques = [name for n in merged for name in Path(n).stem.split("_")[1:]]
        names += ["compose.py", *(f"train_{name}.py" for name in techniques)]
    return any(name in gone for name in names)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def without_imports(text: str, gone: set[str], lost: dict[str, set[str]]) -> tuple[str, set[str]]:
    """Return the text without imports of what is gone, and the names that they brought."""

    def is_gone(module: str, name: str) -> bool:
        return module in gone or f"{module}.{name}" in gone or name in lost.get(module, ())

    return with_fewer_imports(text, lambda module, name: is_gone(module or name.name, name.name))


def without_unused(text: str, used_before: set[str]) -> str:
    """Return the text without imports of names that it used before, and now does not."""
    lost = used_before - names_of(text)
    return with_fewer_imports(text, lambda module, name: bound_name(name) in lost)[0]


def joined_lines(text: str) -> str:
    """Return the text with what `LISTS` and `PARAMETERS` find on one line, where it fits."""

    def joined(match: re.Match[str]) -> str:
        items = [line.strip().removesuffix(",") for line in match[2].splitlines()]
        line = f"{match[1]}{', '.join(items)}{match[3]}"
        if match[1].endswith(" import ("):
            line = line.replace("(", "").replace(")", "")
        return match[0] if len(line) > LINE_LENGTH or "#" in line else line

    return PARAMETERS.sub(joined, LISTS.sub(joined, text))


def with_fewer_imports(
    text: str, is_gone: Callable[[str, ast.alias], bool]
) -> tuple[str, set[str]]:
    """Return the text without some of the names that it imports, and these names.

    Args:
        text: text of a module.
        is_gone: function of a module (empty in `import a`) and a name that is imported from it.
    """
    lines, names = text.split("\n"), set[str]()
    for node in sorted(imports_of(text), key=lambda node: -node.lineno):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        kept = [name for name in node.names if not is_gone(module, name)]
        if len(kept) < len(node.names):
            names |= {bound_name(name) for name in node.names if name not in kept}
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            around = [*lines[first - 1 : first], *lines[last : last + 1]]
            last += not kept and around == ["", ""]  # a section less
            lines[first:last] = shown_import(node, kept)
    return "\n".join(lines), names


def shown_import(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> list[str]:
    """Return the lines of an import as the formatter writes it."""
    if not names:
        return []
    shown = [ast.unparse(name) for name in names]
    start = " " * node.col_offset
    start += f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
    if len(line := start + ", ".join(shown)) <= 100:
        return [line]
    inner = " " * (node.col_offset + 4)
    return [f"{start}(", *(f"{inner}{name}," for name in shown), " " * node.col_offset + ")"]


def without_entries(text: str, names: set[str], gone: set[str]) -> str:
    """Return the text without the rows of tables at its top level that name something that is
    gone."""

    def is_gone(node: ast.AST) -> bool:
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        strings = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
        return bool((used | strings) & names or {s.rpartition(".")[0] for s in strings} & gone)

    for statement in reversed(parse(text).body):  # what is above keeps its lines
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for row in reversed([row for rows in tables_of(statement) for row in rows]):
                text = without_row(text, row) if is_gone(row[-1]) else text
    return text


def listing(root: Path, files: list[str]) -> str:
    """List the core and the parts by group: the lines of Python and YAML, what each part is, and
    what it needs.

    Args:
        root: folder of the template.
        files: files of a project with all parts.
    """
    product = {
        Path(file): (root / file).read_text()
        for file in files
        if file.endswith(PRODUCT) and not file.startswith("tests/")
    }

    @cache
    def size(*names: str, without_images: bool = False) -> int:
        chosen = with_needs(["core", *names])
        return size_of(product, chosen - {"images"} if without_images else chosen | {"images"})

    parts, _ = read_parts()
    core, own = size(), size("own", without_images=True)
    lines = [
        "Lines of Python, YAML and batch scripts outside tests/. alone: what the part adds to a",
        "project that has what it needs; all: what it adds to the core, with what it needs.",
        "",
        f"core       {core:6,}  what PARTS=core has, images with them; all parts: {size(*parts):,}",
        f"           {own:6,}  what PARTS=own has, without images",
        "",
        "                   alone    all",
    ]
    for group, of_group in groupby(parts.items(), lambda item: item[1].group):
        lines += ["", group]
        for name, part in of_group:
            needs = f" (needs {', '.join(part.needs)})" if part.needs else ""
            base = core if name != "images" else size(without_images=True)
            alone = size(name) - (size(*part.needs) if part.needs else base)
            numbers = f"{alone:7,}{size(name) - base:7,}"
            lines.append(f"  {name:16}{numbers}  {part.about}{needs}")
    return "\n".join(lines)


def size_of(product: dict[Path, str], chosen: set[str]) -> int:
    """Return the lines of a project with these parts.

    Args:
        product: texts of the files that are counted, of a project with all parts.
        chosen: names of parts.
    """
    out = left_out(chosen)
    gone = {p for p in map(str, product) if any(f"{p}/".startswith(f"{o}/") for o in out)}
    before = {path: text for path, text in product.items() if str(path) not in gone}
    texts = without_parts(before, chosen, frozenset(gone))
    cut = (
        text if text == product[path] else tidied(path, text, product[path])
        for path, text in texts.items()
    )
    return sum(len(text.splitlines()) for text in cut)


def parts_table(chosen: set[str], files: Path) -> str:
    """Return the rows of the table of a project's parts: name, what it is, and its files."""
    rows = []
    for name, part in read_parts()[0].items():
        if name in chosen:
            paths = ", ".join(f"`{path}`" for path in part.paths if (files / path).exists())
            rows.append(f"| {name} | {part.about} | {paths} |\n")
    return "".join(rows) or "| none | | |\n"


def owner_of(file: str) -> str:
    """Return the part that a file belongs to; `core` if it belongs to none."""
    paths = {path: name for name, part in read_parts()[0].items() for path in part.paths}
    around = [path for path in paths if f"{file}/".startswith(f"{path}/")]
    return paths[max(around, key=len)] if around else "core"
