"""Write README.md from nbs/index.ipynb, and its pictures into nbs/images: `python -m tools.readme`.

Cells that the site folds or hides stay away, but for their figures: those are pictures, and text is what it is.
"""

import base64
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = re.compile(r"^#\| (?:echo: false|code-fold: true)", re.M)


def pictures(nb) -> dict[str, bytes]:
    "The front page's figures, by the name that each gets in nbs/images."
    found = [output.data["image/png"] for cell in nb.cells for output in cell.get("outputs", ())
             if "image/png" in output.get("data", {})]
    return {f"front_{i}.png": base64.b64decode(png) for i, png in enumerate(found, 1)}


def readme(root: Path | None = None) -> str:
    "The home page as Markdown: links lead to the published site, pictures to the hosted files, so PyPI shows it too."
    cfg, shown, kept = get_config(), 0, []
    nb = nbformat.read((root or ROOT) / "nbs" / "index.ipynb", as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^:{3,}.*\n?", "", cell.source, flags=re.M).strip()
        figures = [output for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
        if cell.cell_type == "code" and (HIDDEN.search(cell.source) or figures):
            for _ in figures:
                shown += 1
                told = (re.search(rf'^#\| {name}: "(.+)"$', cell.source, re.M) for name in ("fig-alt", "fig-cap"))
                alt, caption = (found[1] for found in told)
                kept.append(nbformat.v4.new_markdown_cell(f"![{alt}](images/front_{shown}.png)\n\n*{caption}*"))
        elif cell.source:
            kept.append(cell)
    nb.cells = kept
    nb.metadata["language_info"] = {"name": "python"}
    text, _ = MarkdownExporter().from_notebook_node(nb)
    hosted = f"https://raw.githubusercontent.com/{cfg.user}/{cfg.repo}/{cfg.branch}/nbs/images/"
    text = text.replace("](images/", f"]({hosted}")
    site = f"{cfg.doc_host}{cfg.doc_baseurl}"
    return re.sub(r"\]\((?!https?:|#)([\w/]+)\.ipynb", rf"]({site}/\1.html", text).strip() + "\n"


def write() -> None:
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    for name, png in pictures(nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)).items():
        (ROOT / "nbs" / "images" / name).write_bytes(png)


if __name__ == "__main__":
    write()
