"Draw the picture that a link to the book shows in a message, from a figure of the book: `python -m tools.preview`."

import base64
import io
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import nbformat
import yaml
from PIL import Image

from annotated_nlp.show.style import style

ROOT = Path(__file__).resolve().parent.parent
PREVIEW = ROOT / "nbs" / "images" / "preview.png"
CHAPTER, CAPTION = "05_attention", "Attention while writing German"


def figure() -> Image.Image:
    "The stored figure whose caption begins with `CAPTION`."
    nb = nbformat.read(ROOT / "nbs" / f"{CHAPTER}.ipynb", as_version=4)
    cell = next(cell for cell in nb.cells if f'fig-cap: "{CAPTION}' in cell.source)
    stored = next(out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {}))
    return Image.open(io.BytesIO(base64.b64decode(stored)))


def draw() -> None:
    "Title and description on the left, the figure on the right, in the size that previews are cut to."
    website = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    style()
    canvas = plt.figure(figsize=(12, 6.3), dpi=100, layout="none")
    canvas.text(0.05, 0.72, "The\nAnnotated\nNLP", fontsize=52, fontweight="bold", va="center", linespacing=1.1)
    canvas.text(0.05, 0.27, fill(website["description"], 30), fontsize=19, va="center", linespacing=1.5)
    axes = canvas.add_axes((0.44, 0.04, 0.54, 0.92))
    axes.imshow(figure(), interpolation="lanczos")
    axes.axis("off")
    plain = io.BytesIO()
    canvas.savefig(plain, dpi=100)
    Image.open(plain).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(PREVIEW, optimize=True)


if __name__ == "__main__":
    draw()
