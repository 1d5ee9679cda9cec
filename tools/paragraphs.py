"""Write the book's paragraphs into the package, for its search: `python -m tools.paragraphs`.

One JSON line a paragraph: page, its title, the heading above, the text without Markdown.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
FILE = Path("annotated_nlp/assets/search/paragraphs.jsonl")
LEFT_OUT = {"api", "glossary", "results"}  # lists, made of what other pages say
END = {"Exercises", "References"}
LONGEST = 400


def plain(text: str) -> str:
    "A paragraph without Markdown's marks, cut behind a word."
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(\*\*|__)(.+?)\1", r"\2", text)
    text = re.sub(r"(?<![\w*])[*_](?=\S)(.+?)(?<=\S)[*_](?![\w*])", r"\1", text)
    text = re.sub(r"\s+", " ", text.replace("`", "")).strip()
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " …"


def of_page(path: Path) -> Iterator[tuple[str, str]]:
    "Heading and text of each paragraph of prose: no lists, tables, formulas, code, and nothing behind the summary."
    heading = ""
    for cell in nbformat.read(path, as_version=4).cells[1:]:
        if cell.cell_type != "markdown":
            continue
        source = re.sub(r"^(```|\$\$).*?\1$", "", cell.source, flags=re.MULTILINE | re.DOTALL)
        for block in re.split(r"\n\s*\n", source):
            block = block.strip()
            if found := re.match(r"#+ +(.+)", block):
                heading, block = plain(found[1]), block[found.end() :].strip()
                if heading in END:
                    return
            if re.match(r"[\w*`$\"'(]", block) and not re.match(r"(\* |\d+\. |\$\$)", block) and len(block) > 80:
                yield heading, plain(block)


def lines(root: Path = ROOT) -> str:
    "The file's content."
    found = []
    for path in sorted(root.glob("nbs/**/[!._]*.ipynb")):
        page = path.relative_to(root / "nbs").with_suffix("").as_posix()
        if page in LEFT_OUT or ".ipynb_checkpoints" in path.parts:
            continue
        title = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        found += [json.dumps([page, title, *paragraph], ensure_ascii=False) for paragraph in of_page(path)]
    return "\n".join(found) + "\n"


def write(root: Path = ROOT) -> None:
    (root / FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(lines(root), encoding="utf-8")


if __name__ == "__main__":
    write()
