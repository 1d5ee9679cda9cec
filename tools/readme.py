"Write README.md from nbs/index.ipynb: `python -m tools.readme`."

import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    "The home page as Markdown: links lead to the published site, pictures to the hosted files, so PyPI shows it too."
    cfg = get_config()
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    nb.cells = [cell for cell in nb.cells if "google.colab" not in cell.source]  # Colab opens the notebook, not this
    nb.metadata["language_info"] = {"name": "python"}
    text, _ = MarkdownExporter().from_notebook_node(nb)
    hosted = f"https://raw.githubusercontent.com/{cfg.user}/{cfg.repo}/{cfg.branch}/nbs/images/"
    text = text.replace("](images/", f"]({hosted}")
    site = f"{cfg.doc_host}{cfg.doc_baseurl}"
    return re.sub(r"\]\((?!https?:|#)([\w/]+)\.ipynb", rf"]({site}/\1.html", text).strip() + "\n"


def write() -> None:
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    write()
