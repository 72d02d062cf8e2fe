"""The pages name what there is, their commands are right, and README's picture is fresh."""

import re
import shlex
from html import unescape
from xml.etree import ElementTree

from conf import reference
from conf.cli import load_config
from template.side_by_side import IN_PICTURE, PICTURE, SCRIPTS, WIDTH, draw, draw_page
from tests.helpers import REPOSITORY
from tools.compose import MARKER

PAGES = {
    path: path.read_text()
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
}
COMMAND = re.compile(r"\b(?:python|torchrun\b.*?) (-m [\w.]+|[\w/]+\.py)(?![\w.])(.*)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
WRITTEN_BY_THE_USER = {"mine.py", "my_train.py", "experiment=mine"}


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_link_leads_to_a_file_and_a_heading_in_it() -> None:
    for path, text in PAGES.items():
        for link in re.findall(r"\]\(([^):]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{path.name}: {link}"
            if anchor:
                anchors = [anchor_of(heading) for heading in HEADING.findall(PAGES[target])]
                assert anchor in anchors, f"{path.name}: {link}"


def test_commands_start_what_there_is_with_keys_that_exist() -> None:
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", "".join(PAGES.values()), re.DOTALL)
    commands = COMMAND.findall("\n".join(blocks).replace("\\\n", " "))
    assert len(commands) > 60
    for started, rest in commands:
        file = started.removeprefix("-m ")
        if file != started:
            file = file.replace(".", "/")
            file += ".py" if (REPOSITORY / f"{file}.py").exists() else "/__main__.py"
        assert (REPOSITORY / file).exists() or file in WRITTEN_BY_THE_USER | {"uv.py"}, started
        if re.fullmatch(r"train\w*\.py", file):
            arguments = shlex.split(rest, comments=True)
            load_config([x for x in arguments if "=" in x and x not in WRITTEN_BY_THE_USER])


def test_the_targets_of_make_exist() -> None:
    files = [REPOSITORY / "Makefile", *REPOSITORY.glob("*/*.mk")]
    rules = "\n".join(path.read_text() for path in files)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", "".join(PAGES.values()), re.DOTALL))
    targets = re.findall(r"^make ([\w-]+)", blocks, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", rules, re.MULTILINE), target


def test_the_page_on_the_configuration_has_every_key() -> None:
    text = reference.PAGE.read_text()
    assert text == reference.page(), "run python -m conf.reference"
    assert "| `optimizer.weight_decay` | `0.0` |" in text


def comments_of(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if MARKER in line]


def test_the_picture_shows_the_script_as_it_is_and_fits_its_width() -> None:
    picture = (REPOSITORY / PICTURE).read_text()
    assert picture == draw(), "run make side-by-side"
    root = ElementTree.fromstring(picture)
    texts = {"".join(text.itertext()): int(text.attrib["x"]) for text in root if text.get("x")}
    script = (REPOSITORY / IN_PICTURE).read_text().splitlines()
    assert comments_of(list(texts)) == comments_of(script)
    for text, start in texts.items():
        assert start + 7.23 * len(text) < WIDTH, text  # 12 px monospace


def test_a_page_for_each_script_shows_its_new_lines_beside_the_baseline() -> None:
    for script in SCRIPTS:
        page = unescape(draw_page(script)).replace("\xa0", " ")
        for comment in comments_of((REPOSITORY / script).read_text().splitlines()):
            assert comment in page, comment
