"What `make test` checks: `python -m tools.check sync|mend|test`."

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbdev_export

from . import chapters, colab, format, owner, paragraphs, readme

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK_LIMIT = 1_000_000  # bytes: GitHub shows none that is larger


def _generated(root: Path) -> dict[Path, bytes]:
    "Everything that a tool writes in whole or part and that is committed: notebooks, package, README, pictures."
    files = [*owner.files(root), *root.glob("annotated_nlp/**/*.py"), root / "README.md", root / paragraphs.FILE,
             *root.glob("nbs/images/front_*.png")]
    return {f.relative_to(root): f.read_bytes() for f in files if f.exists()}


def mend() -> None:
    "Format and export the package, clean the notebooks; write addresses, first cells, README, paragraphs and API page."
    owner.write()
    format.mend()
    nbdev_clean()
    nbdev_export()
    colab.write()  # it reads the package
    readme.write()
    paragraphs.write()
    chapters.run(chapters.NBS / "api.ipynb")  # signatures, docstrings and the lines that they stand in


def sync() -> int:
    "Mend a copy of the tree, compare, and say what differs; the tree itself stays as it is."
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / ROOT.name
        ignore = shutil.ignore_patterns(".venv", ".git", "_site", "_slides", "_proc", "__pycache__",
                                        ".ipynb_checkpoints", "runs")
        shutil.copytree(ROOT, copy, ignore=ignore, symlinks=True)
        subprocess.run([sys.executable, "-m", "tools.check", "mend"], cwd=copy, check=True,
                       env={**os.environ, "PYTHONPATH": str(copy)}, stdout=subprocess.DEVNULL)
        mended = _generated(copy)
    now = _generated(ROOT)
    differ = sorted(f for f in now.keys() | mended.keys() if now.get(f) != mended.get(f))
    large = [f"{f}: {len(text):,} bytes, the limit is {NOTEBOOK_LIMIT:,}" for f, text in now.items()
             if f.suffix == ".ipynb" and len(text) > NOTEBOOK_LIMIT]
    for file in differ:
        print(f"out of sync or not clean: {file}", file=sys.stderr)
    for line in large:
        print(f"too large: {line}", file=sys.stderr)
    if differ:
        print("`make export` mends it; look at `git diff` and commit.", file=sys.stderr)
    if large:
        print("`python -m tools.figures` makes stored figures lighter; or a page that long is two.", file=sys.stderr)
    return 1 if differ or large else 0


def test() -> int:
    "Run every step even after a failure, so that one run shows all that is wrong; give the number of failed steps."
    steps = {
        "chapters": [sys.executable, "-m", "tools.away"],
        "site": [sys.executable, "-m", "tools.site", "build"],
        "ruff": ["ruff", "check", "annotated_nlp", "benchmarks", "tests", "tools", "setup.py"],
        "pytest": [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--durations=5"],
    }
    # Two chapters, or two files of tests, run side by side: more threads would only get in each other's way.
    env = {**os.environ, "OMP_NUM_THREADS": "1",
           "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    failed, times = [], {}
    for name, command in steps.items():
        print(f"\n== {name}: {' '.join(command).replace(sys.executable, 'python')}", flush=True)
        started = time.perf_counter()
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            failed.append(name)
        times[name] = time.perf_counter() - started
    print("\n" + "\n".join(f"{name:>9} {seconds:5.0f} s  {'FAILED' if name in failed else 'ok'}"
                           for name, seconds in times.items()))
    return len(failed)


if __name__ == "__main__":
    actions = {"sync": sync, "mend": mend, "test": test}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(f"usage: python -m tools.check {'|'.join(actions)}")
    sys.exit(actions[sys.argv[1]]())
