"The glossary agrees with the book: its letters with the legend, its links with the site, its order with the alphabet."

import re
from pathlib import Path

import nbformat
import pytest

from tools import site

NBS = Path(__file__).resolve().parents[2] / "nbs"
ENTRY = re.compile(r'^- <a id="(term-[a-z0-9-]+)"></a>\*\*(.+?)\*\*: (.+) \[(.+?)\]\(([\w/]+)\.ipynb#([\w-]+)\)$', re.MULTILINE)


def prose(name):
    nb = nbformat.read(NBS / f"{name}.ipynb", as_version=4)
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


GLOSSARY = prose("glossary")
ENTRIES = ENTRY.findall(GLOSSARY)


def letters(text):
    "Letter -> axis, from the table of letters for shapes."
    return dict(re.findall(r"^\| `(\w)` \| ([^|]+) \|", text, re.MULTILINE))


def test_every_entry_is_well_formed():
    assert len(ENTRIES) == len(re.findall(r"^- ", GLOSSARY, re.MULTILINE)) >= 80
    for anchor, term, text, *_ in ENTRIES:
        assert anchor == "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")
        assert 5 <= len(text.split()) <= 45 and text[-1] in ".?", term


def test_alphabetical():
    terms = [term.casefold() for _, term, *_ in ENTRIES]
    assert terms == sorted(set(terms))
    headings = re.findall(r"^## ([A-Z])$", GLOSSARY, re.MULTILINE)
    assert headings == sorted({term[0].upper() for term in terms})


def test_every_chapter_gives_terms():
    assert {page for *_, page, _ in ENTRIES} >= {path.stem for path in NBS.glob("[0-9]*.ipynb")}


def test_letters_agree_with_the_legend():
    assert letters(GLOSSARY) == letters(prose("index")) and set(letters(GLOSSARY)) == set("bnmdhkvc")


@pytest.mark.parametrize("page", sorted({page for *_, page, _ in ENTRIES}))
def test_links_lead_to_explanations(page):
    "The page is built, has the anchor, and uses a word of the term."
    html = (site.SITE / f"{page}.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    for _, term, _, _, there, anchor in ENTRIES:
        if there == page:
            assert anchor in ids, f"{term}: {page}#{anchor}"
            assert any(word[:5].casefold() in html.casefold() for word in re.findall(r"\w{2,}", term)), term
