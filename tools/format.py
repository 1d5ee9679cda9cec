"""Format the exported cells of the notebooks, from which the package is written: `python -m tools.format [--check]`.

Cell by cell, because the lines that nbdev puts between them are its own; `[tool.ruff]` in pyproject.toml says how. What
is not exported keeps its form: a table or a formula in a page may be laid out for its reader.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nbdev.doclinks import nbdev_export

ROOT = Path(__file__).resolve().parent.parent
RUFF = Path(sysconfig.get_path("scripts")) / "ruff"


def formatted(sources: Mapping[str, str]) -> list[str]:
    "Each source as ruff writes it, with no newline at its end, as cells are stored. SyntaxError says what can't be."
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"{name}.py" for name in sources]
        for file, source in zip(files, sources.values(), strict=True):
            file.write_text(source, encoding="utf-8")
        command = [RUFF, "format", "--no-cache", "--config", ROOT / "pyproject.toml", "."]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            raise SyntaxError(done.stderr)
        return [file.read_text(encoding="utf-8").rstrip("\n") for file in files]


def export() -> None:
    "Write the package from the notebooks. What tells Quarto how to show a cell (`#| code-fold`) stays with the page."
    nbdev_export()
    for module in (ROOT / "annotated_nlp").rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        if (code := re.sub(r"^#\| .*\n", "", text, flags=re.M)) != text:
            module.write_text(code, encoding="utf-8")


def mend(folder: Path = ROOT / "nbs", *, write: bool = True) -> list[Path]:
    "Format what the notebooks of a folder export; give those that were not. `write=False` only looks."
    pages = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("[!.]*.ipynb"))
             if ".ipynb_checkpoints" not in path.parts}
    cells = [(path, cell) for path, page in pages.items() for cell in page["cells"]
             if cell["cell_type"] == "code" and re.search(r"^#\| *exports?\b", "".join(cell["source"]), re.M)]
    now = formatted({f"{path.stem} {cell['id']}": "".join(cell["source"]) for path, cell in cells})
    changed = []
    for (path, cell), source in zip(cells, now, strict=True):
        if source != "".join(cell["source"]):
            cell["source"] = source.splitlines(keepends=True)
            changed.append(path)
    changed = sorted(set(changed))
    for path in changed if write else ():  # as nbdev_clean writes it
        text = json.dumps(pages[path], indent=1, ensure_ascii=False, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
    return changed


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: python -m tools.format [--check]")
    check = sys.argv[1:] == ["--check"]
    for page in (found := mend(write=not check)):
        print("not formatted:" if check else "formatted:", page.relative_to(ROOT))
    sys.exit(bool(check and found))
