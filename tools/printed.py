"""To read away from the browser: `python -m tools.printed epub` writes all chapters as one book, by Pandoc,
and `python -m tools.printed pdf [05_attention ...]` a PDF of each chapter, by Pandoc and Typst.

The EPUB has how to read the book, the chapters and the glossary, with the outputs that are stored: nothing is run. The
laboratory and the appendix stay on the site, and links go there, in a PDF those to other chapters too. What only a
browser or a notebook can do is left out: badges, models that answer in the page, and cells that set it up. A figure
stands without the code that drew it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import yaml

from .slides import CALLOUT, NBS, ROOT, address, option, pictures, source

PRINTED = ROOT / "_printed"
FRONT, BACK = "how_to_read", "glossary"
LINK = re.compile(r"\]\((?!https?:|mailto:)(?:(?:\.\./)?([\w./-]+)\.ipynb)?(#[\w.-]+)?\)")
BADGE = re.compile(r"^\[!\[Open in Colab\].*$\n?", re.M)
CSS = """pre { font-size: 0.75em; }
pre, pre > code.sourceCode { white-space: pre-wrap !important; }
table { font-size: 0.8em; border-collapse: collapse; }
th, td { padding: 0.1em 0.5em; text-align: left; vertical-align: top; }
figure { margin: 1em 0; }
figcaption { font-size: 0.85em; }
"""
ABOUT = """# About this edition

These are the chapters of *The Annotated NLP*, with the figures and numbers that their code gave when it last ran. The
laboratory, the appendix, models that answer you, and notebooks that run are at <{site}>.
"""
BOOK = "annotated_nlp.epub"
TABLES = """-- Tables that pandas wrote as HTML become tables, as wide as what they hold.
function RawBlock(block)
  if block.format == "html" then return pandoc.read(block.text, "html").blocks end
end
"""
SHEET = """#set table(stroke: none, inset: (x: 5pt, y: 3pt))
#show table: set text(size: 8.5pt)
#show raw.where(block: true): set text(size: 7.5pt)
#show raw.where(block: true): block.with(fill: luma(245), inset: 6pt, width: 100%)
#show link: set text(fill: rgb("#175ea8"))
#show figure.caption: set text(size: 9pt)
"""
PDF = ("--from=markdown", "--to=typst", "--standalone", "--lua-filter=tables.lua", "--include-in-header=sheet.typ",
       "--variable=papersize:a4", "--variable=mainfont:Libertinus Serif", "--variable=codefont:DejaVu Sans Mono",
       "--variable=fontsize:10.5pt", "--metadata=lang:en-GB")
HOW = "--from=markdown", "--to=epub3", "--mathml", "--toc", "--toc-depth=2", "--split-level=1", "--css=epub.css"
Parts = list[tuple[str, list[str]]]


def parts() -> Parts:
    "The parts of the book with their chapters, as the site's sidebar has them."
    bar = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    sections = [(of["section"], [Path(page["href"]).stem for page in of["contents"] if "href" in page])
                for of in bar if "section" in of]
    # a part may end in a page of the appendix, which stays on the site
    chapters = [(title, [page for page in pages if re.match(r"\d\d_", page)]) for title, pages in sections]
    return [(title, pages) for title, pages in chapters if pages]


def anchor(heading: str) -> str:
    "The name that Pandoc and Quarto give a heading."
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\s.-]", "", text).strip().lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text)) or "section"


def prose(text: str, page: str, within: set[str], seen: Counter) -> str:
    "A cell's Markdown: every heading with a name of its own in the book, links to where their page now is."
    site, _ = address()

    def there(found: re.Match) -> str:
        of, name = found[1] or page, found[2] or ""
        return f"](#{of}{name.replace('#', '-')})" if of in within else f"]({site}/{of}.html{name})"

    def named(found: re.Match) -> str:
        name = anchor(found[2])
        seen[name] += 1
        name += f"-{seen[name] - 1}" if seen[name] > 1 else ""
        number = f"{int(page[:2])} " if page[0].isdigit() else ""
        return f"# {number}{found[2]} {{#{page}}}" if found[1] == "#" else f"{found[0]} {{#{page}-{name}}}"

    def folded(found: re.Match) -> str:
        return re.sub(r"^#+ (.+)$", r"**\1.**", found[0], flags=re.M)  # a solution is no section

    text = CALLOUT.sub(folded, BADGE.sub("", text))
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    for i in range(0, len(blocks), 2):
        block = re.sub(r"^(#+) (.+)$", named, blocks[i], flags=re.M)
        block = re.sub(r'<a id="([^"]+)"></a>', rf"[]{{#{page}-\1}}", block)
        blocks[i] = LINK.sub(there, block)
    return "".join(blocks).strip()


def shown(cell: dict, page: str, number: int, folder: Path) -> list[str]:
    "A cell of code and what it gave, as Markdown; pictures are written beside it."
    text, found = source(cell), []
    code = re.sub(r"^#\| .*\n?", "", text, flags=re.M).strip()
    if code and "#| code-fold" not in text:
        found.append(f"```python\n{code}\n```")
    for i, png in enumerate(pictures(cell)):
        file = folder / f"{page}_{number}_{i}.png"
        file.write_bytes(png)
        alt = option(text, "fig-alt").replace('"', "'")
        found.append(f'![{option(text, "fig-cap")}]({file.name}){{alt="{alt}"}}')
    for output in cell["outputs"]:
        data = output.get("data", {})
        html = "".join(data.get("text/html", ""))
        runs, sets_up = re.search(r"<(?:script|iframe|button)", html), "#| code-summary" in text and not html
        if "image/png" in data or runs or sets_up:
            continue
        if "<table" in html:  # as XML, which has neither pandas' styles nor a name for a space
            html = re.sub(r'<style.*?</style>| border="1"', "", html, flags=re.S).replace("&nbsp;", "&#160;")
            found.append(f"```{{=html}}\n{html}\n```")
        elif plain := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            found.append(f"```\n{plain}\n```")
    return found


def text_of(page: str, within: set[str], folder: Path) -> str:
    "A page as Pandoc reads it; links to pages `within` stay, the others go to the site. Its pictures go to the folder."
    seen, blocks = Counter(), []
    for i, cell in enumerate(json.loads((NBS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]):
        markdown = cell["cell_type"] == "markdown"
        blocks += [prose(source(cell), page, within, seen)] if markdown else shown(cell, page, i, folder)
    return "\n\n".join(filter(None, blocks)) + "\n"


def linked(text: str, names: set[str]) -> str:
    "With links to a page where the name in it is unknown: the site names functions too."
    return re.sub(r"\]\(#((\w+)-[\w.-]+)\)", lambda m: m[0] if m[1] in names else f"](#{m[2]})", text)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\{#([\w.-]+)\}", text))


def write(folder: Path = PRINTED) -> list[Path]:
    "The book as Pandoc reads it: a file for each page, and its pictures."
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    book = [("", [FRONT]), *parts(), ("", [BACK])]
    within = {page for _, pages in book for page in pages}
    texts = {"about": ABOUT.format(site=address()[0])}
    for title, pages in book:
        if title:
            texts[f"part_{title.split()[0]}"] = f"# Part {title}\n"
        texts |= {page: text_of(page, within, folder) for page in pages}
    names = names_in("".join(texts.values()))
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(linked(text, names), encoding="utf-8")
    return [folder / f"{name}.md" for name in texts]


def pandoc() -> list[str] | None:
    "Pandoc, or the one in Quarto."
    return ["pandoc"] if shutil.which("pandoc") else ["quarto", "pandoc"] if shutil.which("quarto") else None


def compiler() -> Callable[[Path, Path], object] | None:
    "What makes a PDF of a file of Typst: the library of that name, or the one in Quarto."
    if find_spec("typst"):
        return lambda file, pdf: import_module("typst").compile(str(file), output=str(pdf))
    if tool := shutil.which("typst") or shutil.which("quarto"):
        command = [tool, "compile"] if Path(tool).stem == "typst" else [tool, "typst", "compile"]
        return lambda file, pdf: subprocess.run([*command, str(file), str(pdf)], check=True)
    return None


def pdf(page: str, folder: Path, tool: list[str], compile: Callable[[Path, Path], object]) -> Path:
    "A chapter, complete in itself."
    text = text_of(page, {page}, folder)
    title, text = re.match(r"# (.+?) \{#.*\n", text)[1], text.partition("\n")[2]
    text = re.sub(r"\]\(#" + page + r"\)", f"]({address()[0]}/{page}.html)", linked(text, names_in(text)))
    files = {f"{page}.md": text, "tables.lua": TABLES, "sheet.typ": SHEET}
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    about = f"--metadata=title:{title}", f"--output={page}.typ"
    subprocess.run([*tool, f"{page}.md", *PDF, *about], cwd=folder, check=True)
    compile(folder / f"{page}.typ", folder / f"{page}.pdf")
    return folder / f"{page}.pdf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["epub", "pdf"])
    parser.add_argument("names", nargs="*", help="chapters for a PDF each, e.g. 05_attention; none: all")
    args = parser.parse_args()
    known = [page for _, pages in parts() for page in pages]
    names = [name.removesuffix(".ipynb") for name in args.names] or known
    if missing := [name for name in names if name not in known]:
        sys.exit(f"no chapter {', '.join(map(repr, missing))}; there are: {', '.join(known)}")
    if (tool := pandoc()) is None:
        sys.exit("Pandoc writes books and is not installed here: get it from https://pandoc.org/installing.html, or "
                 "Quarto, which has it, and give the same command again")
    if args.what == "pdf":
        if (compile := compiler()) is None:
            sys.exit("Typst sets the pages and is not installed here: give `pip install 'typst<0.15'`, or install "
                     "Quarto, which has it, and give the same command again")
        PRINTED.mkdir(exist_ok=True)
        for name in names:
            print(pdf(name, PRINTED, tool, compile).relative_to(ROOT), flush=True)
        return 0
    files = write()
    (PRINTED / "epub.css").write_text(CSS, encoding="utf-8")
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    about = dict(title=site["title"], subtitle=site["description"], lang="en-GB", author="The annotated_nlp authors")
    about = [f"--metadata={key}={value}" for key, value in about.items()]
    subprocess.run([*tool, *(file.name for file in files), *HOW, *about, f"--output={BOOK}"], cwd=PRINTED, check=True)
    print((PRINTED / BOOK).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
