"nbdev processors: the page shows exported code once, open, in place, and links names to it."

import ast
import posixpath
import re
from functools import lru_cache
from pathlib import Path

from nbdev.config import get_config
from nbdev.process import Processor

_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
_HIDDEN = {"default_exp", "hide"}


def _source(cell) -> str:
    return cell.get("source", "")


def plain_output_file(cell):
    "Let a page keep its notebook's name: both engines then write the same address."
    if cell.cell_type == "raw" and "output-file:" in _source(cell):
        cell.source = re.sub(r"^output-file:.*\n", "", _source(cell), flags=re.M)


def badge_in_line(cell):
    "To Quarto a picture alone in its paragraph is a figure, and loses its text. A space keeps the badge a link."
    if cell.cell_type == "markdown":
        cell.source = re.sub(r"^(\[!\[[^]]*\]\([^)]*colab\.svg\)\]\([^)]*\))$", r"\1&nbsp;", _source(cell), flags=re.M)


def _exported(cell) -> list[str]:
    "Names that an `#| export` cell defines for others: functions, classes, capital constants."
    if cell.cell_type != "code" or not {"export", "exports"} & cell.directives_.keys():
        return []
    names = []
    for node in ast.parse(_source(cell)).body:
        if isinstance(node, _DEFINITIONS):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target)
                      if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    return [name for name in names if not name.startswith("_")]


class show_exported(Processor):
    "Put an anchor before each exported definition; drop `#| hide` and `#| default_exp` cells."

    def cell(self, cell):
        if cell.cell_type == "code" and _HIDDEN & cell.directives_.keys():
            del cell["source"]

    def end(self):
        from execnb.nbio import mk_cell

        cells = []
        for cell in self.nb.cells:
            names = _exported(cell) if _source(cell) else []
            if names:
                cells.append(mk_cell("".join(f'<a id="{name}"></a>' for name in names), "markdown"))
            cells.append(cell)
        self.nb.cells[:] = cells


def _imports(node: ast.stmt) -> bool:
    "Does this do nothing but import? Within `checks.extra` too."
    if isinstance(node, ast.With):
        return all(map(_imports, node.body))
    return isinstance(node, (ast.Import, ast.ImportFrom))


def fold_imports(cell):
    "Fold cells that only import, so that a page begins with its idea."
    if cell.cell_type == "code" and _source(cell) and "code-fold" not in cell.source:
        tree = cell.parsed_()
        if tree and all(map(_imports, tree)):
            cell.source = f'#| code-fold: true\n#| code-summary: "Imports"\n{cell.source}'


@lru_cache(maxsize=1)
def _definitions() -> dict[str, str]:
    "Exported name -> its notebook, for names that one notebook alone defines."
    from execnb.nbio import read_nb
    from nbdev.process import NBProcessor

    root, found = get_config().nbs_path, {}
    for path in sorted(root.rglob("*.ipynb")):
        page = path.relative_to(root).as_posix()
        if any(part.startswith((".", "_")) for part in Path(page).parts):
            continue
        for cell in NBProcessor(nb=read_nb(path)).nb.cells:
            for name in _exported(cell):
                found.setdefault(name, set()).add(page)
    return {name: pages.pop() for name, pages in found.items() if len(pages) == 1}


# What stays as it is (code in double backticks, a link, an image), or a name in backticks, with or without its module
# and call brackets.
_NAME = re.compile(r"``+.*?``+|!?\[[^\]]*\]\([^)]*\)|(?<!\[)`(?:[a-z_0-9]+\.)*([A-Za-z_]\w*)(?:\(\))?`(?!\])")
_FENCE = re.compile(r"(^```.*?^```\s*?$)", re.M | re.S)


class link_names(Processor):
    "Turn `name` in prose into a link to its definition."

    def cell(self, cell):
        if cell.cell_type != "markdown" or not _source(cell):
            return
        here = Path(self.nb.path_).resolve().relative_to(get_config().nbs_path.resolve()).as_posix()

        def link(match):
            page = _definitions().get(match[1])
            if page is None:
                return match[0]
            there = "" if page == here else posixpath.relpath(page, posixpath.dirname(here) or ".")
            return f"[{match[0]}]({there}#{match[1]})"

        parts = _FENCE.split(_source(cell))
        cell.source = "".join(part if i % 2 else "\n".join(
            line if line.startswith("#") else _NAME.sub(link, line) for line in part.split("\n"))
            for i, part in enumerate(parts))
