"""Write into each page's first cell what the page needs in Colab beyond the package: `python -m tools.colab`.

What it needs is read out of its code, the solutions of its exercises among it, and out of the part of the package that
this code reaches: a module's own imports, and those within a function whose name is called for. The bounds are those
of settings.ini, so no page has versions of its own.
"""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from configparser import ConfigParser
from functools import lru_cache
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .solutions import BLOCK, SOLUTION

ROOT = Path(__file__).resolve().parent.parent
MARK = '"google.colab" in sys.modules'
CELL = '''#| code-fold: true
#| code-summary: "In Colab: install the package"
import importlib.util, subprocess, sys

if "google.colab" in sys.modules and importlib.util.find_spec("annotated_nlp") is None:
    needs = [{needs}]
    package = "annotated_nlp @ git+https://github.com/{user}/{repo}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", package, *needs]
    subprocess.run(command, check=True)'''
OTHERWISE = {"sklearn": "scikit-learn", "PIL": "pillow"}  # where the package on PyPI has another name than its module
# Functions whose first argument, if it is written out, names a module or a package.
BY_NAME = {"import_module", "find_spec", "files", "package_files", "version", "_require"}


def settings(root: Path = ROOT):
    config = ConfigParser(delimiters=["="])
    config.read(root / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


@lru_cache(maxsize=1)
def optional(root: Path = ROOT) -> dict[str, str]:
    "What the package itself doesn't require but an extra for pages brings, with its bound, by its name."
    lines = [line for extra in ("train", "book", "live") for line in settings(root)[f"{extra}_requirements"].split()]
    return {canonicalize_name(Requirement(line).name): line for line in lines}


class Use(NamedTuple):
    "What some code mentions: names, modules of ours, and packages that it can't do without."

    names: set[str]
    modules: set[str]
    packages: set[str]

    def add(self, other: "Use") -> None:
        for mine, new in zip(self, other):
            mine |= new


def package(module: str) -> set[str]:
    "The optional package that brings a module; a beginning such as jupyterlab_language_pack_ stands for several."
    name = canonicalize_name(OTHERWISE.get(module.split(".")[0], module.split(".")[0]))
    if module.endswith(("_", "-")):
        return {known for known in optional() if known.startswith(name)}
    return {name} & optional().keys()


def own(name: str, module: str) -> str:
    return f"{module.split('.')[-1]}.{name}" if name.startswith("_") else name


def source_of(node: ast.ImportFrom, here: str) -> str | None:
    "The module of ours, dotted, from which the module `here` or a page imports; None if it is another package's."
    if node.level:
        return ".".join(filter(None, [*here.split(".")[:-node.level], node.module]))
    first, _, rest = (node.module or "").partition(".")
    return rest if first == "annotated_nlp" else None


def used(*code: ast.AST, here: str = "") -> Use:
    "What code of the module `here`, or of a page, mentions. A private name goes with its module's, and counts there."
    use = Use(set(), set(), set())
    for node in (inner for tree in code for inner in ast.walk(tree)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name.startswith("_"):
                use.names.update({own(name, here), own(name, module)})
            case ast.Attribute(value=ast.Name(id="annotated_nlp"), attr="load"):  # which imports when it is called
                use.modules.add("hub.checkpoints")
                use.names.add("model_and_tokenizer")
            case ast.Name(id=name) | ast.Attribute(attr=name):
                use.names.add(own(name, here))
            case ast.Import(names=names):
                for name in names:
                    first, _, rest = name.name.partition(".")
                    use.packages.update(package(first))
                    use.modules.update({rest} if first == "annotated_nlp" else ())
            case ast.ImportFrom(names=names):
                source = source_of(node, here)
                if source is None:
                    use.packages.update(package((node.module or "").partition(".")[0]))
                else:  # names among the modules are modules, the others aren't
                    use.modules.update({source}, (f"{source}.{name.name}".strip(".") for name in names))
                # An imported name calls for nothing until it is used; under another name it is taken as used.
                use.names.update(own(name.name, source or "") for name in names
                                 if name.name.startswith("_") or name.asname not in (None, name.name))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
                use.packages.update(package(text) if name in BY_NAME else ())
            case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                use.packages.update(package(text) if re.fullmatch(r"[a-z]+([-_][a-z]+)+[-_]", text) else ())
    return use


class Module(NamedTuple):
    "What a module uses when it is imported, and each of its parts when it is called: (names that call for it, use)."

    always: Use
    parts: list[tuple[frozenset[str], Use]]


@lru_cache(maxsize=1)
def package_modules(root: Path = ROOT) -> dict[str, Module]:
    found = {}
    for file in sorted((root / "annotated_nlp").rglob("*.py")):
        here, rest, parts = ".".join(file.relative_to(root / "annotated_nlp").with_suffix("").parts), [], []
        if file.stem.startswith("_"):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                parts.append((frozenset({own(node.name, here)}), used(node, here=here)))
            elif isinstance(node, ast.ClassDef):
                called = own(node.name, here)
                methods, body = [], []
                for item in ast.iter_child_nodes(node):
                    method = isinstance(item, ast.FunctionDef) and not item.name.startswith("__")
                    (methods if method else body).append(item)
                parts += [(frozenset({called, own(method.name, here)}), used(method, here=here)) for method in methods]
                parts.append((frozenset({called}), used(*body, here=here)))
            elif not ast.unparse(node).startswith("_all_ ="):  # nbdev's list of what is handed on
                rest.append(node)
        found[here] = Module(used(*rest, here=here), parts)
    return found


def code(nb: dict) -> Iterator[ast.AST]:
    "The page's code, and that of the solutions, parsed."
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and MARK not in source:
            yield ast.parse(source)
        elif cell["cell_type"] == "markdown":
            yield from map(ast.parse, (block for answer in SOLUTION.findall(source) for block in BLOCK.findall(answer)))


def needs(nb: dict) -> list[str]:
    "The requirements of a page beyond those of the package, in the order of the alphabet."
    every, use, imported, called = package_modules(), used(*code(nb)), set(), defaultdict(set)
    while True:
        before = [len(some) for some in use]
        for name in use.modules & every.keys():
            if name not in imported:
                imported.add(name)
                use.add(every[name].always)
            for i, (names, part) in enumerate(every[name].parts):
                if i not in called[name] and names <= use.names:
                    called[name].add(i)
                    use.add(part)
        if before == [len(some) for some in use]:
            return sorted((optional()[name] for name in use.packages), key=str.lower)


def cell(nb: dict, root: Path = ROOT) -> str:
    "The source of the page's first cell."
    cfg = settings(root)
    listed = ", ".join(f'"{need}"' for need in needs(nb))
    listed = fill(listed, 91, initial_indent=" " * 13, subsequent_indent=" " * 13, break_on_hyphens=False)
    return CELL.format(needs=listed.strip(), user=cfg["user"], repo=cfg["repo"])


def pages(root: Path = ROOT) -> list[Path]:
    return sorted(f for f in root.glob("nbs/**/[!.]*.ipynb") if ".ipynb_checkpoints" not in f.parts)


def write(files: list[Path] | None = None) -> list[Path]:
    "Mend that cell of every page, and nothing else of it; give the pages that changed."
    changed = []
    for file in pages() if files is None else files:
        nb = json.loads(file.read_text(encoding="utf-8"))
        for first in nb["cells"]:
            if first["cell_type"] == "code" and MARK in "".join(first["source"]):
                source = cell(nb).splitlines(keepends=True)
                if source != first["source"]:
                    first["source"] = source
                    text = json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True)
                    file.write_text(text + "\n", encoding="utf-8")
                    changed.append(file)
                break
    return changed


if __name__ == "__main__":
    for page in write():
        print(page.relative_to(ROOT))
