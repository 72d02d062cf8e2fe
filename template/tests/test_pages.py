"""README's picture and the pages that show each script beside train.py are fresh and valid."""

from xml.etree import ElementTree

import pytest

from template.side_by_side import IN_PICTURE, PICTURE, SCRIPTS, WIDTH, drawn, page_of
from tests.helpers import REPOSITORY
from tools.compose import BASELINE, MARKER

FILES = drawn()


def comments_of(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if MARKER in line]


def test_the_picture_and_the_pages_show_the_scripts_as_they_are() -> None:
    there = [REPOSITORY / PICTURE, *(REPOSITORY / PICTURE).with_suffix("").iterdir()]
    found = {str(path.relative_to(REPOSITORY)): path.read_text() for path in there}
    assert found == FILES, "run python -m template.side_by_side"
    assert all("prefers-color-scheme: dark" in text for text in FILES.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_is_valid_loads_nothing_and_has_both_files_in_full(script: str) -> None:
    root = ElementTree.fromstring(FILES[page_of(script)])  # each element ends
    assert not [element for element in root.iter() if element.get("src")]
    links = [f"docs/side_by_side/{link.attrib['href']}" for link in root.iter("a")]
    assert links == [page_of(other) for other in SCRIPTS]
    lines: dict[str, list[str]] = {"left": [], "right": []}
    for left, right in root.iterfind(".//div[@class='row']"):
        notes = left.findall("ins")
        old = left.iter("div") if left.get("class") == "twin" else left.iterfind("del/div")
        new = [*(line for note in notes for line in note), *right.iter("div")]
        for side, found in (("left", old), ("right", new)):
            lines[side] += ["".join(x.itertext()) for x in found if x.get("class") == "line"]
    assert lines["left"] == (REPOSITORY / BASELINE).read_text().splitlines()
    assert lines["right"] == (REPOSITORY / script).read_text().splitlines()


def test_the_picture_has_each_comment_and_fits_its_width() -> None:
    root = ElementTree.fromstring(FILES[PICTURE])
    texts = {"".join(text.itertext()): int(text.attrib["x"]) for text in root if text.get("x")}
    script = (REPOSITORY / IN_PICTURE).read_text().splitlines()
    assert comments_of(list(texts)) == comments_of(script)
    for text, start in texts.items():
        assert start + 7.23 * len(text) < WIDTH, text  # 12 px monospace
