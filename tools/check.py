"What `make test` and `make check` do: `python -m tools.check sync|mend|test`, `quick [CHAPTER ...]`."

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nbdev.clean import nbdev_clean

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
    format.export()
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
        print("`make export` mends it; look at `git diff` and commit. (nbdev_export and nbdev_clean alone leave the "
              "API page and the README as they were, and lines for Quarto in the package.)", file=sys.stderr)
    if large:
        print("`python -m tools.figures` makes stored figures lighter; or a page that long is two.", file=sys.stderr)
    return 1 if differ or large else 0


def _file(name: str) -> str:
    "A file of tests, in whatever folder of them."
    (path,) = (ROOT / "tests").rglob(f"{name}.py")
    return str(path)


def _run(groups: list[dict[str, list[str]]]) -> int:
    """Run the steps of each group side by side, the groups one after the other; give the number of those that failed.

    Every step is run even after a failure, so that one run shows all that is wrong. The first of a group says at once
    what it does, the others when they are done. How a failing step ended is said again at the end, where it is found.
    """
    # Pages and files of tests run side by side: more threads would only get in each other's way. glibc keeps the
    # memory of freed tensors for the next ones: the kernel's zeroing of new pages is a twentieth of a small training.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30),
           "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26),
           "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def step(name: str, command: list[str], aloud: bool) -> tuple[str, int, float, list[str]]:
        said = [f"\n== {name}: {' '.join(command).replace(sys.executable, 'python')}\n"]
        if aloud:
            print(said[0], end="", flush=True)
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              encoding="utf-8", errors="replace") as process:
            for line in process.stdout:
                said.append(line)
                if aloud:
                    print(line, end="", flush=True)
        if not aloud:
            print(*said, sep="", flush=True)
        return name, process.returncode, time.perf_counter() - started, said[-30:]

    ended = []
    for group in groups:
        with ThreadPoolExecutor(len(group)) as pool:
            ended += [*pool.map(lambda item: step(*item[1], aloud=item[0] == 0), enumerate(group.items()))]
    for name, status, _, last in ended:
        if status:
            print(f"\n== {name} FAILED, and ended so:\n", *last, sep="", flush=True)
    print()
    for name, status, seconds, _ in ended:
        print(f"{name:>9} {seconds:5.0f} s  {'FAILED' if status else 'ok'}")
    return sum(status != 0 for _, status, *_ in ended)


RUFF = ["ruff", "check", "annotated_nlp", "benchmarks", "tests", "tools", "setup.py"]
PYTEST = [sys.executable, "-m", "pytest", "-q"]
WORKERS = str(min(os.cpu_count() or 2, 8))


def test() -> int:
    "Everything; give the number of failed steps. The tests open the site, so it comes first."
    # Tests wait for browsers and subprocesses; with the pages beside them no core is idle.
    # A file's tests share what they set up. The order of the files is that of tests/conftest.py: the longest first.
    each = str(int(WORKERS) // 2 + 1)
    return _run([{"sync": [sys.executable, "-m", "tools.check", "sync"],
                  "site": [sys.executable, "-m", "tools.site", "build"], "ruff": RUFF},
                 {"chapters": [sys.executable, "-m", "tools.away", "--workers", each],
                  "pytest": [*PYTEST, "-n", each, "--dist", "loadfile", "--no-loadscope-reorder", "--durations=5"]}])


def quick(*names: str) -> int:
    "What a change breaks most often: parity, the wheel's imports, a chapter; give the number of failed steps."
    return _run([{"parity": [*PYTEST, "-n", WORKERS, "--dist", "worksteal", _file("test_parity")],
                  "wheel": [*PYTEST, _file("test_wheel")], "ruff": RUFF,
                  "chapter": [sys.executable, "-m", "tools.away", *(names or ["04_decoding"])]}])


if __name__ == "__main__":
    actions = {"sync": sync, "mend": mend, "test": test, "quick": quick}
    action, *names = sys.argv[1:] or [""]
    if action not in actions or names and action != "quick":
        sys.exit("usage: python -m tools.check sync|mend|test, or quick [CHAPTER ...]")
    sys.exit(actions[action](*names))
