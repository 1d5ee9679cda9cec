"The edition for a reader without a browser: whole pages, names and links that hold, outputs that are XML."

import json
import re
import subprocess
import zipfile
from collections import Counter
from xml.etree import ElementTree

import pytest

from tools import printed, slides

CHAPTERS = sorted(file.stem for file in slides.NBS.glob("[0-9]*.ipynb"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("printed")
    return folder, {file.stem: file.read_text(encoding="utf-8") for file in printed.write(folder)}


def cells(page):
    return json.loads((slides.NBS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_it_has_every_chapter_in_order(texts):
    names = [*texts[1]]
    assert [name for name in names if name[:2].isdigit()] == CHAPTERS and names[:2] == ["about", "how_to_read"]
    assert names[-1] == "glossary" and sum(name.startswith("part_") for name in names) == 4


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_is_whole(texts, page):
    "All prose, formulas and pictures; code that isn't folded; and nothing that only a notebook understands."
    folder, of = texts[0], texts[1][page]
    title = slides.source(cells(page)[0]).splitlines()[0]
    assert of.startswith(f"# {int(page[:2])} {title[2:]} {{#{page}}}\n")
    prose = "\n".join(slides.source(cell) for cell in cells(page) if cell["cell_type"] == "markdown")
    assert of.count("$$") == prose.count("$$") and len(of.split()) > 0.9 * len(prose.split())
    wanted = [png for cell in cells(page) for png in slides.pictures(cell)]
    files = re.findall(r"\]\((\w+\.png)\)\{alt=\"(.*)\"\}", of)
    assert [(folder / name).read_bytes() for name, _ in files] == wanted and all(len(alt) > 20 for _, alt in files)
    code = [slides.source(cell) for cell in cells(page) if cell["cell_type"] == "code"]
    assert of.count("```python") >= sum("code-fold" not in text for text in code) > 5
    assert not re.search(r"^#\| |colab\.svg|<script|<style|&nbsp;|\.ipynb\)", of, re.M)


def test_names_are_unique_and_links_lead_to_them(texts):
    book = "\n".join(texts[1].values())
    names = Counter(re.findall(r"\{#([\w.-]+)\}", book))
    assert max(names.values()) == 1 and len(names) > 500
    links = re.findall(r"\]\(#([^)]+)\)", book)
    assert len(links) > 200 and {*links} <= {*names}
    deep = [link for link in links if "-" in link]
    assert len(deep) > len(links) / 2  # most lead to a section, not only to a page


def test_tables_are_xml(texts):
    tables = re.findall(r"```\{=html\}\n(.*?)\n```", "\n".join(texts[1].values()), re.S)
    assert len(tables) > 100
    for table in tables:
        ElementTree.fromstring(f"<div>{table}</div>")


@pytest.mark.parametrize("heading, name", [
    ("The check", "the-check"), ("Which `mask`, and why?", "which-mask-and-why"), ("2 to the [power](x.ipynb)", "to-the-power"),
])
def test_names_of_headings(heading, name):
    assert printed.anchor(heading) == name


@pytest.mark.parametrize("what, tool, words", [
    (["epub"], None, "get it from https://pandoc.org"), (["pdf", "05_attention"], None, "get it from https://pandoc.org"),
    (["pdf", "05_attention"], ["pandoc"], "pip install 'typst<0.15'"), (["pdf", "5"], ["pandoc"], "no chapter '5'; there are: 01_data"),
])
def test_what_is_missing_is_said(monkeypatch, what, tool, words):
    monkeypatch.setattr(printed, "pandoc", lambda: tool)
    monkeypatch.setattr(printed, "compiler", lambda: None)
    monkeypatch.setattr("sys.argv", ["printed", *what])
    with pytest.raises(SystemExit, match=re.escape(words)):
        printed.main()


@pytest.mark.skipif(not (printed.pandoc() and printed.compiler()), reason="no Pandoc, or no Typst, is installed")
def test_a_chapter_becomes_a_pdf(tmp_path):
    "Its tables and pictures are in it, and its links to other chapters lead to the site."
    file = printed.pdf("05_attention", tmp_path, printed.pandoc(), printed.compiler())
    assert file.read_bytes().startswith(b"%PDF")
    text = file.with_suffix(".typ").read_text(encoding="utf-8")
    assert text.count("image(") == sum(len(slides.pictures(cell)) for cell in cells("05_attention"))
    assert text.count("#table(") > 5 and f'#link("{slides.address()[0]}/03_seq2seq.html")' in text


@pytest.mark.skipif(printed.pandoc() is None, reason="neither Pandoc nor Quarto is installed")
def test_pandoc_makes_a_book_of_it(texts, tmp_path):
    "One chapter: XML throughout, formulas as MathML."
    folder = texts[0]
    (folder / "epub.css").write_text(printed.CSS, encoding="utf-8")
    subprocess.run([*printed.pandoc(), "05_attention.md", *printed.HOW, f"--output={tmp_path / 'one.epub'}"], cwd=folder, check=True)
    with zipfile.ZipFile(tmp_path / "one.epub") as book:
        pages = [book.read(name) for name in book.namelist() if name.endswith(".xhtml")]
    trees = [ElementTree.fromstring(page) for page in pages]
    assert sum(len(tree.findall(".//{http://www.w3.org/1998/Math/MathML}math")) for tree in trees) > 20
