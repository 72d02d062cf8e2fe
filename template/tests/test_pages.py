"""README's picture and the pages that show each script beside train.py are fresh and valid."""

from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from compose import BASELINE, MARKER
from template.side_by_side import IN_PICTURE, PICTURE, SCRIPTS, WIDTH, drawn, page_of
from tests.helpers import REPOSITORY

FILES = drawn()
HTML = {  # what each element may hold
    **{tag: {"span"} for tag in ("h1", "h2", "a", "span", "summary")},
    **{tag: {"div", "ins", "del", "span", "h2"} for tag in ("div", "ins", "del")},
    **{"title": set(), "style": set(), "meta": set(), "header": {"h1", "nav"}, "nav": {"a"}},
    **{"details": {"summary", "div"}, "main": {"div", "details"}, "body": {"header", "main"}},
    **{"head": {"meta", "title", "style"}, "html": {"head", "body"}},
}


def lines_of(script: str) -> list[str]:
    return (REPOSITORY / script).read_text().splitlines()


def comments_of(script: str) -> list[str]:
    return [line.strip() for line in lines_of(script) if MARKER in line]


def page(script: str) -> Element:
    return ElementTree.fromstring(FILES[page_of(script)])


def shown(element: Element) -> list[str]:
    found = [line for line in element.iter("div") if line.get("class") == "line"]
    return ["".join(line.itertext()) for line in found]


def test_the_picture_and_the_pages_show_the_scripts_as_they_are() -> None:
    folder = (REPOSITORY / PICTURE).with_suffix("")
    there = [REPOSITORY / PICTURE, *folder.iterdir()]
    found = {str(path.relative_to(REPOSITORY)): path.read_text() for path in there}
    assert found.keys() == FILES.keys()
    stale = [name for name in FILES if found[name] != FILES[name]]
    assert not stale, "run python -m template.side_by_side"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_is_valid_html_that_loads_nothing(script: str) -> None:
    root = page(script)  # XML is stricter than HTML: each element ends, attributes are unique
    assert FILES[page_of(script)].startswith('<!DOCTYPE html>\n<html lang="en">')
    assert [child.tag for child in root] == ["head", "body"]
    for element in root.iter():
        assert {child.tag for child in element} <= HTML[element.tag], element.tag
        assert element.tag != "details" or [child.tag for child in element] == ["summary", "div"]
        assert not element.get("src")
    assert root.findtext("head/title")
    links = [link.attrib["href"] for link in root.iter("a")]
    assert links == [Path(page_of(other)).name for other in SCRIPTS]
    assert "url(" not in FILES[page_of(script)].split("</style>")[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_both_files_in_full_and_each_comment_beside_its_line(script: str) -> None:
    root = page(script)
    rows = [row for row in root.iter("div") if row.get("class") == "row"]
    old, new, comments = [], [], []
    for left, right in rows:
        if left.get("class") == "twin":
            old += shown(left)
        for part in left:
            if part.tag == "del":
                old += shown(part)
            if part.tag == "ins":
                comments += shown(part)
                new += shown(part)
                assert shown(right)
        new += shown(right)
    assert (old, new) == (lines_of(BASELINE), lines_of(script))
    assert [text.strip() for text in comments if MARKER in text] == comments_of(script)


def test_the_picture_has_each_comment_and_fits_its_width() -> None:
    root = ElementTree.fromstring(FILES[PICTURE])
    texts = [element for element in root if element.tag.endswith("}text")]
    found = ["".join(text.itertext()) for text in texts]
    assert [text.strip() for text in found if MARKER in text] == comments_of(IN_PICTURE)
    for element, text in zip(texts, found, strict=True):
        assert int(element.attrib["x"]) + 7.23 * len(text) < WIDTH, text  # 12 px monospace


@pytest.mark.parametrize("name", FILES)
def test_all_have_colours_for_dark_screens(name: str) -> None:
    assert "prefers-color-scheme: dark" in FILES[name]
