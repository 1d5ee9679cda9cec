"Run notebooks in place and store what they print: `python -m tools.chapters [NAME ...]`, `--lab NAME` in full."

import argparse
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import nbdev_clean

from . import figures

NBS = Path(__file__).resolve().parent.parent / "nbs"


def chapters() -> list[Path]:
    "The notebooks whose outputs a plain run stores: all but the laboratory's, which take longer. Chapters come first."
    pages = [path for path in NBS.rglob("[!.]*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    plain = [path for path in pages if path.parent != NBS / "lab" or path.stem == "index"]
    return sorted(plain, key=lambda path: (path.parent != NBS, path))


def page(name: str) -> Path:
    "The notebook of this name, `03_seq2seq`, `kernels` or `parts/kernels`; in `nbs` itself if there is none."
    name = name.removesuffix(".ipynb")
    found = [path for path in chapters() if name in (path.stem, path.relative_to(NBS).with_suffix("").as_posix())]
    return min(found, key=lambda path: len(path.parts), default=NBS / f"{name}.ipynb")


def _without_debris(cell) -> None:
    "Drop what progress bars and warnings leave on the error stream: the page shows results."
    kept = []
    for output in cell.get("outputs", []):
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            continue  # where ipywidgets is installed, a bar is a widget, and dead on a page
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r", "", output.text)
        if output.output_type != "stream" or output.name == "stdout" and output.text.strip():
            kept.append(output)
    cell.outputs = kept


def run(path: Path, copy: Path | None = None) -> float:
    """Execute the notebook at `path`, store its outputs, and give the seconds it took. A failing cell stores nothing.

    With `copy`, the notebook stays as it is and the executed one is written there.
    """
    nb = nbformat.read(path, as_version=4)
    os.environ.pop("MPLBACKEND", None)  # a backend for scripts, such as agg, would leave the page without its figures
    client = NotebookClient(nb, timeout=None, kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(path.parent)}})
    started = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - started
    for cell in nb.cells:
        if cell.cell_type == "code":
            _without_debris(cell)
            figures.lighten(cell)
    nb.metadata = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    target = copy or path
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, target)
    nbdev_clean(fname=str(target))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="chapters, e.g. 03_seq2seq; all when none is named")
    parser.add_argument("--lab", metavar="NAME", help="one laboratory notebook, in full")
    args = parser.parse_args()
    if args.lab is not None:
        os.environ["LAB_RUN"] = "full"
        paths = [NBS / "lab" / f"{args.lab}.ipynb", NBS / "results.ipynb"]  # which lists each run with its date
    else:
        paths = [page(name) for name in args.names] or chapters()
    missing = [p for p in paths if not p.exists()]
    if missing:
        folder = NBS if args.lab is None else NBS / "lab"
        known = ", ".join(sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("[!.]*.ipynb")))
        sys.exit(f"no notebook {', '.join(repr(p.stem.removesuffix('.ipynb')) for p in missing)}; there are: {known}")
    for i, path in enumerate(paths, 1):
        name = path.relative_to(NBS).with_suffix("").as_posix()
        print(f"[{i}/{len(paths)}] {name} ...", end=" ", flush=True)
        try:
            print(f"{run(path):.0f} s", flush=True)
        except CellExecutionError as error:
            print("failed; its stored outputs are unchanged\n", flush=True)
            sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
