"The decks that lecturers get: what is taken from each chapter, whole and in the order of the page."

import json
import re
import struct
import textwrap

import pytest

from tools import slides

CHAPTERS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(slides.NBS.glob("[0-9]*.ipynb"))}
DECKS = {name: slides.extract(nb) for name, nb in CHAPTERS.items()}
every_chapter = pytest.mark.parametrize("name", CHAPTERS)


def of(name, *kinds):
    return [slide for slide in DECKS[name][2] if slide.kind in kinds]


def stored(name):
    return [png for cell in CHAPTERS[name]["cells"] for png in slides.pictures(cell)]


@every_chapter
def test_it_begins_with_a_title_and_a_question(name):
    title, description, found = DECKS[name]
    assert "\n".join([f"# {title}", "", f"> {description}"]) == slides.source(CHAPTERS[name]["cells"][0])
    assert [slide.kind for slide in found].count("question") == 1 and found[0].kind == "question"
    page = next(prose for cell in CHAPTERS[name]["cells"][1:] if cell["cell_type"] == "markdown" and (prose := slides.paragraphs(slides.source(cell))))
    assert 30 <= len(found[0].text.split()) <= 110 and found[0].text.startswith(page[0])
    assert ("?" in found[0].text) == any("?" in text for text in page)


@every_chapter
def test_it_has_every_drawing_with_its_caption(name):
    drawings = of(name, "drawing")
    assert [slide.picture for slide in drawings] == [png for png in stored(name) if slides.DRAWING in slides.head(png)]
    assert len(drawings) >= 3 and all(len(slide.text) > 20 and len(slide.alt) > 20 for slide in drawings)


@every_chapter
def test_it_has_the_figure_of_the_payoff(name):
    "One chart, the first one below the bare model."
    (payoff,) = of(name, "payoff")
    assert payoff.picture in stored(name) and slides.DRAWING not in slides.head(payoff.picture) and len(payoff.text) > 20
    kinds = [slide.kind for slide in DECKS[name][2]]
    assert "code" in kinds[: kinds.index("payoff")] and kinds.index("payoff") < 0.7 * len(kinds)
    assert "The check" not in [slide.title for slide in DECKS[name][2][: kinds.index("payoff")]]


@every_chapter
def test_the_bare_model_is_whole(name):
    "Its slides together are the page's cells, and each can be read at once."
    shown = [re.search(r"^```python\n(.*?)\n```$", slide.text, re.M | re.S)[1] for slide in of(name, "code")]
    lines = [line.strip() for code in shown for line in code.splitlines() if line.strip()]
    cells = [slides.source(cell) for cell in slides.bare_model(CHAPTERS[name]["cells"]).values()]
    assert lines == [line.strip() for cell in cells for line in cell.splitlines() if line.strip()]
    assert all(len(code.splitlines()) <= slides.CODE_LINES for code in shown)
    for slide, code in zip(of(name, "code"), shown):
        size = int(re.search(r"--code: (\d+)px", slide.text)[1])
        assert 13 <= size <= 19 and 0.603 * size * max(map(len, code.splitlines())) < 1280


def balanced(tex: str) -> bool:
    opened = []
    for what, name in re.findall(r"\\(begin|end)\{(\w+)\}", tex):
        if what == "begin":
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    plain = re.sub(r"\\[{}]", "", tex)
    return not opened and plain.count("{") == plain.count("}") and len(re.findall(r"\\left\b", tex)) == len(re.findall(r"\\right\b", tex))


def test_a_broken_formula_would_be_found():
    assert balanced(r"\begin{aligned} a_{i} &= \left( \{ \right) \end{aligned}")
    assert not any(map(balanced, [r"a_{i", r"\begin{aligned} a", r"\left( a", r"\end{a} \begin{a}", r"\begin{a} \begin{b} \end{a} \end{b}"]))


@every_chapter
def test_it_has_every_formula_of_the_page(name):
    "Those of the text, in their order; not those of folded answers."
    prose = "\n\n".join(slides.source(cell) for cell in CHAPTERS[name]["cells"] if cell["cell_type"] == "markdown")
    wanted = re.findall(r"\$\$(.+?)\$\$", slides.CALLOUT.sub("", prose.partition("\n## Exercises\n")[0]), re.S)
    shown = [re.findall(r"\$\$\n(.+?)\n\$\$", slide.text, re.S) for slide in of(name, "formula")]
    assert [tex for (tex,) in shown] == [tex.strip() for tex in wanted] != [] and all(map(balanced, sum(shown, [])))


@every_chapter
def test_a_formula_is_led_to(name):
    for slide in of(name, "formula"):
        before, _, after = slide.text.partition("$$")
        assert 2 <= len(before.split()) <= 80 and len(after.rpartition("$$")[2].split()) <= 60, slide.text


@every_chapter
def test_dollars_and_folds_are_closed(name):
    for slide in DECKS[name][2]:
        for text in (slide.text, slide.notes):
            text = re.sub(r"```.*?```", "", text, flags=re.S)
            assert text.count("$") % 2 == 0 and not re.search(r":::+ \{\.callout|^:::+$", text if slide.kind != "code" else "", re.M)


@every_chapter
def test_the_summary_is_whole(name):
    words = lambda text: re.findall(r"\w+", text)
    prose = "\n\n".join(slides.source(cell) for cell in CHAPTERS[name]["cells"] if cell["cell_type"] == "markdown")
    summary = prose.partition("\n## Summary\n")[2].partition("\n## Exercises\n")[0] if "\n## Summary\n" in prose else None
    shown = of(name, "summary")
    assert words(" ".join(slide.text for slide in shown)) == words(summary) != []
    assert shown == DECKS[name][2][-len(shown) :] and all(len(slide.text.split()) <= 110 for slide in shown)


@every_chapter
def test_a_deck_is_written(name, tmp_path):
    "With its pictures beside it, which fit into 1280 by 720; its links lead to the published book."
    text = slides.write(name, tmp_path).read_text(encoding="utf-8")
    assert text.startswith(f'---\ntitle: "{DECKS[name][0]}"\n') and text.count("\n---\n") == 1
    assert len(re.findall(r"^## ", re.sub(r"```.*?```", "", text, flags=re.S), re.M)) == len(DECKS[name][2]) + 1
    placed = re.findall(r'!\[\]\(([^)]+)\)\{alt="[^"]{20,}" width="(\d+)" height="(\d+)"\}', text)
    assert len(placed) == len(of(name, "drawing", "payoff"))
    for file, *shown in placed:
        width, height = map(int, shown)
        real = struct.unpack(">II", (tmp_path / file).read_bytes()[16:24])
        assert width <= 1180 and height <= 600 and abs(width / height - real[0] / real[1]) < 0.02
    assert not re.findall(r"\]\((?!https?:)[^)]*\.ipynb|\]\(#", text) and f"/{name}.html)" in text


@pytest.mark.parametrize("text, parts", [
    ("One. Two? *Three*: four.", ["One.", "Two?", "*Three*: four."]),
    ("By Ba et al. 2016 and Hinton et al. (2015) it is. $x. Y$ follows.", ["By Ba et al. 2016 and Hinton et al. (2015) it is.", "$x. Y$ follows."]),
    ("See [One. Two](a.b) and `c. D`. End", ["See [One. Two](a.b) and `c. D`.", "End"]),
    ("A number of 2.5 in 3.7 s", ["A number of 2.5 in 3.7 s"]),
])
def test_sentences(text, parts):
    assert slides.sentences(text) == parts


def test_the_last_sentences_lead_to_a_formula():
    assert slides.tail("One two three. Four five. Six:", 4) == "Four five. Six:"
    assert slides.tail("A very long sentence indeed:", 2) == "A very long sentence indeed:"


def test_long_code_is_cut_before_a_definition():
    body = "\n".join(["    x = 1"] * 14)
    code = f"class A:\n    def f():\n{body}\n\n    @no_grad()\n    def g():\n{body}"
    first, second = [slide.text.split("\n", 2)[2].removesuffix("\n```\n:::") for slide in slides.code_slides("T", code)]
    assert second.startswith("@no_grad()\ndef g():") and first.splitlines() + [""] == textwrap.dedent(code).splitlines()[:17]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(slides, "SLIDES", tmp_path / "_slides")
    monkeypatch.setattr(slides, "write", lambda name: tmp_path / "_slides" / f"{name}.qmd")
    return tmp_path / "_slides"


def test_without_quarto_it_says_what_to_install(here, monkeypatch):
    monkeypatch.setattr(slides.shutil, "which", lambda program: None)
    monkeypatch.setattr(slides.sys, "argv", ["slides", "05_attention"])
    with pytest.raises(SystemExit, match=r"1 decks? .*Quarto .* not installed here: get it from https://quarto\.org"):
        slides.main()
    assert "revealjs" in (here / "_quarto.yml").read_text(encoding="utf-8") and (here / "slides.css").exists()


def test_an_unknown_chapter_is_refused(here, monkeypatch):
    monkeypatch.setattr(slides.sys, "argv", ["slides", "99_nothing"])
    with pytest.raises(SystemExit, match="no chapter '99_nothing'; there are: 01_data"):
        slides.main()
    assert not here.exists()
