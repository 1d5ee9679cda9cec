"""The package as others get it: a wheel, installed where nothing of the repository is.

`python -m tools.away` runs every page there, each in a folder and a process of its own, as `nbdev_test` would: a
chapter with the solutions of its exercises behind it, in their smaller sizes.
"""

import argparse
import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import nbformat

from . import solutions

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd, **env) -> str:
    "Run a command that must succeed, with nothing of this run in its environment, and give what it printed."
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LAB_RUN", "MPLBACKEND")} | env
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel, built from the sdist beside it, as pip builds what it is given as an sdist.

    From a copy: the repository stays clean. By the setuptools that is here: nothing is fetched.
    """
    skip = shutil.ignore_patterns(".*", "_site", "_slides", "_proc", "build", "dist", "*.egg-info",
                                  "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=skip, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, place: Path) -> Path:
    """The Python of a virtual environment in `place` that has the wheel, the packages of this one, nothing else.

    Its site-packages get a .pth file that names this environment's. A folder named so is searched, but the .pth files
    inside it are not read: the one through which the editable install leads to the repository stays without effect.
    """
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    windows = os.name == "nt"
    python = place / "Scripts" / "python.exe" if windows else place / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--quiet", "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=place)
    (packages,) = place.glob("Lib/site-packages" if windows else "lib/python*/site-packages")
    (packages / "this_environment.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return python


def with_solutions(page: Path, folder: Path) -> None:
    "Copy a page, and put the solutions of its exercises behind it, so that none can fail unseen."
    nb = nbformat.read(page, as_version=4)
    solutions.append(nb)
    nbformat.write(nb, folder / page.name)


# The package that a page would import is the one that it gets.
INSTALLED = """
import sys
from importlib.util import find_spec
assert find_spec("annotated_nlp").origin.startswith(sys.prefix), find_spec("annotated_nlp")
"""


def lay_out(book: Path, root: Path = ROOT, names: Collection[str] = ()) -> None:
    "The pages of these names, or all, with their solutions, each in a folder of its own: none finds another's files."
    for page in (root / "nbs").rglob("[!.]*.ipynb"):
        if ".ipynb_checkpoints" not in page.parts and (not names or page.stem in names):
            folder = book / "nbs" / page.relative_to(root / "nbs").with_suffix("")
            folder.mkdir(parents=True)
            with_solutions(page, folder)
    shutil.copy(root / "settings.ini", book)


def main() -> int:
    "Run the pages; give the exit status of `tools/pages.py`."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="pages, e.g. 05_attention; all when none is named")
    parser.add_argument("--workers", type=int, default=2, help="how many run at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch).resolve()
        python, book = install(build(place), place), place / "book"
        lay_out(book, names={name.removesuffix(".ipynb") for name in args.names})
        run(python, "-c", INSTALLED, cwd=book)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # -P: the tools, beside which the runner stands, may not be found in place of others' modules of their names.
        command = [python, "-P", ROOT / "tools" / "pages.py", "nbs", "--workers", str(args.workers)]
        return subprocess.run(command, cwd=book, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
