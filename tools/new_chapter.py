"Lay out a chapter that runs and passes the tests of form: `python -m tools.new_chapter 25_something`."

import keyword
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbdev.clean import nbdev_clean

from . import chapters, colab, format

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "chapter.txt"


def refusal(name: str, root: Path) -> str | None:
    "Why no chapter can have this name; None if one can."
    if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", name):
        return (f"NAME={name!r} is no chapter's name: give two digits, an underscore, and the module's name in small "
                "letters, digits and underscores, e.g. make new-chapter NAME=25_something")
    number, module = name.split("_", 1)
    if keyword.iskeyword(module):
        return f"{module!r} is a word of Python's own and can't be imported: choose another name than {name}"
    for other in sorted(root.glob("nbs/[0-9]*.ipynb")):
        if other.stem == name:
            return f"nbs/{name}.ipynb exists: edit it, or choose another name"
        if other.stem.startswith(number):
            return f"number {number} is taken by nbs/{other.name}: choose another"
    if (root / "annotated_nlp" / f"{module}.py").exists():
        return f"annotated_nlp/{module}.py exists and is another notebook's: choose another name than {name}"
    return None


def notebook(name: str):
    "The template, filled in, as a notebook without outputs."
    number, module = name.split("_", 1)
    text = TEMPLATE.read_text(encoding="utf-8")
    for blank, value in dict(NAME=name, NUMBER=str(int(number)), MODULE=module, TITLE=title(module)).items():
        text = text.replace(f"<{blank}>", value)
    nb = jupytext.reads(text, fmt="py:percent")
    nb.metadata = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    return nb


def title(module: str) -> str:
    return module.replace("_", " ").capitalize()


def listed(sidebar: str, name: str) -> str:
    "The text of _quarto.yml with the chapter after the last one of a smaller number."
    before = [entry for entry in re.finditer(r"^( *)- href: (\d\d_\w+)\.ipynb\n.*\n", sidebar, re.M) if entry[2] < name]
    if not before:
        raise ValueError(f"_quarto.yml lists no chapter before {name}: put it into the sidebar by hand")
    number, module = name.split("_", 1)
    indent, end = before[-1][1], before[-1].end()
    entry = f"{indent}- href: {name}.ipynb\n{indent}  text: {int(number)} {title(module)}\n"
    return sidebar[:end] + entry + sidebar[end:]


def lay_out(name: str, root: Path) -> Path:
    "Write the notebook and its line in the sidebar."
    sidebar, path = root / "_quarto.yml", root / "nbs" / f"{name}.ipynb"
    text = listed(sidebar.read_text(encoding="utf-8"), name)
    nbformat.write(notebook(name), path)
    colab.write([path])
    sidebar.write_text(text, encoding="utf-8")
    return path


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("Which one? make new-chapter NAME=25_something")
    name = sys.argv[1]
    if why := refusal(name, ROOT):
        sys.exit(why)
    path, module = lay_out(name, ROOT), name.split("_", 1)[1]
    nbdev_clean(fname=str(path))
    format.export()
    for page in (path, ROOT / "nbs" / "api.ipynb"):  # the API page lists every module
        print(f"{page.stem}: ran in {chapters.run(page):.0f} s", flush=True)
    print(f"""
nbs/{name}.ipynb stands, runs, and exports annotated_nlp/{module}.py. Now:
  1. write it: what is to be filled in stands in square brackets, in the order of the page;
  2. make chapters NAMES="{name} api"    after each change of code
  3. tests/chapters/test_{module}.py     what is too heavy for the page: other sizes, odd settings, wrong calls
  4. tests/book/test_rooms.py            the module's name on its floor; annotated_nlp/__init__.py, in _MODULES
  5. nbs/index.ipynb                     a line in the table of chapters; CHANGELOG.md, one under Unreleased
  6. make chapters NAMES=how_to_read     its map of the book is read from the package
  7. make test""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
