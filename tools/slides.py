"""Slides for lecturers, a deck a chapter: `python -m tools.slides [05_attention ...]`.

A deck has the chapter's question, its drawings, its displayed formulas with the sentences that lead to them, the bare
model, the figure of its payoff and the summary, in the order of the page. Pictures are the stored ones: nothing is run.
What the page says below a figure goes into the speaker's notes. Quarto makes one file of each deck, with all in it.
"""

import argparse
import base64
import json
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NBS, SLIDES, STYLE = ROOT / "nbs", ROOT / "_slides", Path(__file__).with_name("slides.css")
DRAWING = b"pHYs" + struct.pack(">II", 8661, 8661)  # `show.diagram.Diagram` has 220 pixels to an inch, a chart has 110
BARE = re.compile(r"^(?:class|def) \w*bare", re.I | re.M)
PROTECTED = re.compile(r"\$[^$]+\$|`[^`]+`|!?\[[^]]*\]\([^)]*\)")
CALLOUT = re.compile(r"^:::+ \{.*?^:::+$", re.M | re.S)
PIECE = re.compile(r"^#{2,4} (?P<heading>[^\n]+)$|\$\$(?P<formula>.+?)\$\$", re.M | re.S)
CODE_LINES, WORDS, LONGEST = 24, 85, 110  # to a slide; the last for a question
PROJECT = """project:
  type: default
format:
  revealjs:
    lang: en-GB
    width: 1280
    height: 720
    margin: 0.05
    theme: default
    css: slides.css
    slide-number: true
    auto-stretch: false
    code-line-numbers: false
    embed-resources: true
    html-math-method: mathml
"""


class Slide(NamedTuple):
    "Of one kind: question, drawing, formula, code, payoff or summary. `picture` is a PNG, `text` is Markdown."

    kind: str
    title: str
    text: str
    notes: str = ""
    picture: bytes = b""
    alt: str = ""


def head(png: bytes) -> bytes:
    "What a picture says of itself, before its pixels."
    return png.partition(b"IDAT")[0]


def address() -> tuple[str, str]:
    "Where the book is published, and where Colab opens its notebooks."
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    cfg = config["DEFAULT"]
    notebooks = f"https://colab.research.google.com/github/{cfg['user']}/{cfg['repo']}/blob/{cfg['branch']}/nbs"
    return f"{cfg['doc_host']}{cfg['doc_baseurl']}", notebooks


def source(cell: dict) -> str:
    return "".join(cell["source"])


def sentences(text: str) -> list[str]:
    "The sentences of a paragraph; what is between dollars, backticks or in a link is never cut."
    kept: list[str] = []
    hidden = PROTECTED.sub(lambda found: kept.append(found[0]) or f"\0{len(kept) - 1}\0", " ".join(text.split()))
    parts = re.split(r"(?<=[.!?:])(?<!et al\.)(?<!i\.e\.)(?<!e\.g\.) (?=[A-Z*\0(])", hidden)
    return [re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], part) for part in parts]


def tail(text: str, words: int = 45) -> str:
    "The last sentences of a text, one at least, and no more than so many words."
    *before, chosen = sentences(text) or [""]
    while before and len((before[-1] + chosen).split()) < words:
        chosen = f"{before.pop()} {chosen}"
    return chosen


def paragraphs(text: str) -> list[str]:
    "Its paragraphs of plain prose, without the Colab badge."
    blocks = re.split(r"\n\s*\n", CALLOUT.sub("", text))
    return [block for block in map(str.strip, blocks) if re.match(r"[\w*`$\"'(\[]", block) and "colab.svg" not in block]


def option(text: str, name: str) -> str:
    "A cell's option, such as fig-cap, without its quotes."
    found = re.search(rf"^#\| {name}: (.+)$", text, re.M)
    value = found[1].strip() if found else ""
    return json.loads(value) if value.startswith('"') else value.strip("'")


def pictures(cell: dict) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in cell.get("outputs", [])]
    return [base64.b64decode("".join(png)) for png in found if png]


def bare_model(cells: list[dict]) -> dict[int, dict]:
    """The cells of the bare model, by their place: they say so in a name, or the heading above one says so.

    Else it is the longest cell of definitions in front of the first chart.
    """
    places, heading, charts = {}, "", []
    for i, cell in enumerate(cells):
        text = source(cell)
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.+)$", text, re.M) or [heading])[-1]
        elif any(DRAWING not in head(png) for png in pictures(cell)):
            charts.append(i)
        elif re.search(r"^(?:class|def) ", text, re.M) and not re.search(r"^#\| (?:export|code-fold)", text, re.M):
            places[i] = bool(BARE.search(text)), "bare" in heading.lower(), len(text.splitlines())
    named = [i for i, (by_name, _, _) in places.items() if by_name]
    if named:
        end = next((i for i in charts if i > named[0]), len(cells))
        return {i: cells[i] for i in named if i < end}
    below = [i for i, (_, by_heading, _) in places.items() if by_heading]
    first = below[0] if below else max((i for i in places if i < charts[0]), key=lambda i: places[i][2])
    return {first: cells[first]}


def code_slides(title: str, text: str) -> Iterator[Slide]:
    "The code as it stands, cut before a definition where it is too long for one slide."
    lines, cut = text.strip().splitlines(), []
    while len(lines) > CODE_LINES:
        begins = [bool(re.match(r"\s*(?:class|def|@)", line)) for line in lines]
        ends = [i for i in range(5, CODE_LINES + 1) if begins[i] and not lines[i - 1].lstrip().startswith("@")]
        end = ends[-1] if ends else CODE_LINES
        cut.append(lines[:end])
        lines = lines[end:]
    for part in [*cut, lines]:
        code = textwrap.dedent("\n".join(part).strip("\n"))
        size = min(19, 2100 // max(map(len, code.splitlines())))  # 1,270 pixels for letters 0.6 as wide as high
        yield Slide("code", title, f'::: {{style="--code: {size}px"}}\n```python\n{code}\n```\n:::')


def question(prose: list[str]) -> str:
    "The page's first paragraphs, as far as a question, if they are short enough; else the first one."
    asked = [i for i, text in enumerate(prose) if "?" in text and len(" ".join(prose[: i + 1]).split()) <= LONGEST]
    return "\n\n".join(prose[: asked[-1] + 1] if asked else prose[:1])


def formula_slides(title: str, text: str, found: re.Match) -> Slide:
    before, after = text[: found.start()].rstrip(), text[found.end() :].strip()
    before = re.split(r"\n\s*\n|\$\$", before)[-1].strip()
    after = re.split(r"\n\s*\n|\$\$", after)[0].strip()
    goes_on = re.match(r"[a-z]|Here |With |Where ", after)
    parts = [tail(before) if paragraphs(before) else "", f"$$\n{found['formula'].strip()}\n$$"]
    parts.append(sentences(after)[0] if goes_on else "")
    notes = " ".join(sentences(after)[bool(goes_on) :]) if paragraphs(after) else ""
    return Slide("formula", title, "\n\n".join(filter(None, parts)), notes)


def summary_slides(text: str) -> Iterator[Slide]:
    "A point a sentence, unless the page has points already; as many slides as they need."
    points = []
    for block in re.split(r"\n\s*\n", text.strip()):
        items = re.split(r"^- ", block, flags=re.M)[1:] if block.startswith("- ") else sentences(block)
        points += [" ".join(item.split()) for item in items]
    shown = []
    for point in points:
        if shown and len(" ".join([*shown, point]).split()) > WORDS:
            yield Slide("summary", "Summary", "\n".join(f"- {item}" for item in shown))
            shown = []
        shown.append(point)
    yield Slide("summary", "Summary", "\n".join(f"- {item}" for item in shown))


def extract(nb: dict) -> tuple[str, str, list[Slide]]:
    "A chapter's title, the line below it, and its slides."
    cells, found = nb["cells"], []
    title, description = re.fullmatch(r"# (.+)\n\n> (.+)", source(cells[0]).strip(), re.S).groups()
    bare, payoff, heading = bare_model(cells), False, title
    for i, cell in enumerate(cells[1:], 1):
        text = source(cell)
        if cell["cell_type"] == "markdown":
            text, _, _ = text.partition("## Exercises\n")
            body, _, summary = text.partition("## Summary\n")
            prose = paragraphs(body)
            if prose and not any(slide.kind == "question" for slide in found):
                found.append(Slide("question", "The question", question(prose)))
            body = CALLOUT.sub("", body)
            for piece in PIECE.finditer(body):
                if piece["heading"]:
                    heading = piece["heading"].strip()
                else:
                    found.append(formula_slides(heading, body, piece))
            if summary:
                found += summary_slides(summary)
            continue
        if i in bare:
            found += code_slides(heading, text)
        for png in pictures(cell):
            drawing = DRAWING in head(png)
            if drawing or not payoff and i > min(bare):
                payoff = payoff or not drawing
                below = paragraphs(source(cells[i + 1])) if cells[i + 1]["cell_type"] == "markdown" else []
                notes = "\n\n".join(text for text in below[:2] if text[-1] in ".?!)")
                caption, alt = option(text, "fig-cap"), option(text, "fig-alt")
                found.append(Slide("drawing" if drawing else "payoff", heading, caption, notes, png, alt))
    return title, description, found


def with_addresses(text: str, page: str) -> str:
    "Links to other pages, and within this one, as links to the published book."
    site, _ = address()
    text = re.sub(r"\]\(#", f"]({site}/{page}.html#", text)
    return re.sub(r"\]\((?!https?:)([\w./]+)\.ipynb", rf"]({site}/\1.html", text)


def laid_out(slide: Slide, name: str) -> str:
    "The slide's Markdown. A wide picture stands above its caption, another one beside it."
    if not slide.picture:
        return slide.text
    width, height = struct.unpack(">II", slide.picture[16:24])
    scale = 2 if DRAWING in head(slide.picture) else 1
    beside = width < 1.75 * height
    room = (760, 590) if beside else (1180, 470)
    larger = min(room[0] / width, room[1] / height, 1.8 / scale)
    alt, wide, high = slide.alt.replace('"', "'"), width * larger, height * larger
    picture = f'![]({name}){{alt="{alt}" width="{wide:.0f}" height="{high:.0f}"}}'
    caption = f"::: {{.caption}}\n{slide.text}\n:::"
    if not beside:
        return f"{picture}\n\n{caption}"
    share = 100 * (wide + 40) / 1180
    columns = [f':::: {{.column width="{part:.0f}%"}}\n{body}\n::::'
               for part, body in ((share, picture), (99 - share, caption))]
    return "\n".join(["::::: {.columns}", *columns, ":::::"])


def write(page: str, folder: Path = SLIDES) -> Path:
    "Write a chapter's deck as Quarto reads it, with its pictures beside it."
    title, description, found = extract(json.loads((NBS / f"{page}.ipynb").read_text(encoding="utf-8")))
    site, notebooks = address()
    number, beside = int(page[:2]), folder / f"{page}_pictures"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    head = dict(title=title, subtitle=description, author=f"The Annotated NLP, chapter {number}", pagetitle=title)
    settings = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    parts = ["\n".join(["---", *settings, "---"])]
    for i, slide in enumerate(found):
        name = f"{beside.name}/{i:02}.png"
        if slide.picture:
            (folder / name).write_bytes(slide.picture)
        notes = f"\n\n::: {{.notes}}\n{slide.notes}\n:::" if slide.notes else ""
        parts.append(f"## {slide.title} {{.{slide.kind}}}\n\n{laid_out(slide, name)}{notes}")
    parts.append(f"## Read on\n\n[The chapter]({site}/{page}.html) has all code, the check and the exercises.\n\n"
                 f"[In Colab it runs]({notebooks}/{page}.ipynb).")
    file = folder / f"{page}.qmd"
    file.write_text(with_addresses("\n\n".join(parts), page) + "\n", encoding="utf-8")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="chapters, e.g. 05_attention; all when none is named")
    args = parser.parse_args()
    known = sorted(file.stem for file in NBS.glob("[0-9]*.ipynb"))
    names = [name.removesuffix(".ipynb") for name in args.names] or known
    if missing := [name for name in names if name not in known]:
        sys.exit(f"no chapter {', '.join(map(repr, missing))}; there are: {', '.join(known)}")
    SLIDES.mkdir(exist_ok=True)
    (SLIDES / "_quarto.yml").write_text(PROJECT, encoding="utf-8")
    shutil.copy(STYLE, SLIDES / "slides.css")
    decks = [write(name) for name in names]
    if not shutil.which("quarto"):
        sys.exit(f"{len(decks)} decks are in {SLIDES.name}/, as *.qmd. Quarto makes slides of them and is not "
                 "installed here: get it from https://quarto.org/docs/get-started/ and give the same command again")
    for deck in decks:
        subprocess.run(["quarto", "render", deck.name, "--no-execute", "--quiet"], cwd=SLIDES, check=True)
        print(deck.with_suffix(".html").relative_to(ROOT), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
