"""All that wants a GPU, resumable: `python -m tools.gpu` runs the tests, the chapters and the laboratory there.

What this device has a stored result of is skipped. Notebooks keep the outputs that their text speaks of: executed
copies go to runs/DEVICE/, numbers to annotated_nlp/results/. `make lab-run NAME=...` stores a page's outputs in itself.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import torch
from annotated_nlp import lab

from . import chapters

ROOT = Path(__file__).resolve().parent.parent
WHAT = dict(name="gpu", command="make gpu", settings=dict(chapters="at the sizes that each chooses on the device"))
HERE = lab.new_record(**WHAT, numbers={}, seconds=0.0)  # device, commit and date


def digest(path: Path) -> str:
    "Of a notebook's code: an edit of its text needs no new run."
    cells = nbformat.read(path, as_version=4).cells
    return hashlib.sha256("\0".join(c.source for c in cells if c.cell_type == "code").encode()).hexdigest()[:12]


def left() -> tuple[list[Path], list[Path], dict]:
    "Chapters whose present code has no run on this device, laboratory pages without its result, and the runs so far."
    stored = {result["name"]: result["numbers"] for result in lab.results() if result["device"] == HERE["device"]}
    ran = stored.get("gpu", {"chapters": {}})["chapters"]
    new = [path for path in sorted(chapters.NBS.glob("[0-9]*.ipynb"))
           if ran.get(path.stem, {}).get("code") != digest(path)]
    pages = [path for path in sorted((chapters.NBS / "lab").glob("[!.]*.ipynb")) if path.stem not in {"index", *stored}]
    return new, pages, ran


def run() -> int:
    "Run what is left, store each result at once, and give the number of pages that failed."
    (new, pages, ran), started, failed = left(), time.perf_counter(), []
    copies = ROOT / "runs" / HERE["device"]
    print(f"{lab.machine()}\n{len(new)} chapters and {len(pages)} laboratory pages to run, copies in {copies}")
    for path in new + pages:
        os.environ["LAB_RUN"] = "full" if path in pages else ""
        print(f"{path.stem} ...", end=" ", flush=True)
        try:
            seconds = chapters.run(path, copies / path.name)
        except chapters.CellExecutionError as error:
            failed.append(path.stem)
            print(f"failed\n{error}", flush=True)
            continue
        print(f"{seconds:.0f} s", flush=True)
        if path in new:  # a laboratory page stores its own
            ran[path.stem] = dict(code=digest(path), seconds=round(seconds), when=HERE["when"], commit=HERE["commit"])
            lab.store(lab.new_record(**WHAT, numbers=dict(chapters=ran), seconds=time.perf_counter() - started))
    if failed:
        print(f"failed: {', '.join(failed)}. The rest is stored; `make gpu` tries these again.", file=sys.stderr)
    return len(failed)


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit(f"No CUDA device here: PyTorch {torch.__version__} sees none. Nothing was run.")
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], cwd=ROOT).returncode
    return run() + bool(tests)


if __name__ == "__main__":
    sys.exit(main())
