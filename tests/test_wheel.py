"The package as others get it: a wheel, installed away from the repository, with every page run against it."

import ast
import json
import os
import pkgutil
import shutil
import site
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import annotated_nlp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
config = ConfigParser(delimiters=["="])
config.read(ROOT / "settings.ini", encoding="utf-8")
NEEDS = {key: list(map(Requirement, text.split())) for key, text in config["DEFAULT"].items()
         if key.endswith("requirements")}
RUNTIME = {canonicalize_name(r.name) for r in NEEDS["requirements"]}
MODULES = [m.name for m in pkgutil.iter_modules(annotated_nlp.__path__)]
PAGES = sorted(f.relative_to(ROOT / "nbs").as_posix() for f in (ROOT / "nbs").rglob("[!.]*.ipynb")
               if ".ipynb_checkpoints" not in f.parts)


def run(*command, cwd, timeout=600, **env) -> str:
    "Run a command that must succeed, with nothing of this test run in its environment, and give what it printed."
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LAB_RUN", "MPLBACKEND")} | env
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# What the package needs to run


def test_requirements_are_what_the_modules_import():
    "Every third-party import of a module is a requirement of the package, and there is no other requirement."
    owners, imported = packages_distributions(), {}
    for file in (ROOT / "annotated_nlp").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"annotated_nlp"}:
                imported[canonicalize_name(owners[top][0])] = file.name
    assert imported.keys() == RUNTIME, imported


def test_constraints_pin_what_is_required():
    "Each requirement of each extra has one exact version in constraints.txt, and that version meets its bounds."
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines)
    wrong = {str(r): pins.get(canonicalize_name(r.name)) for needs in NEEDS.values() for r in needs
             if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))}
    assert not wrong


def closure(names) -> set[str]:
    "The distributions `names` and all that they require here."
    found, left = set(), set(names)
    while left:
        found.add(name := left.pop())
        try:
            needs = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
        left |= {canonicalize_name(r.name) for r in needs if not r.marker or r.marker.evaluate({"extra": ""})} - found
    return found


# Imports every module while the import system finds nothing of the packages named on the command line.
IMPORT = """
import importlib.util, json, sys
from importlib.machinery import PathFinder
hidden = set(json.loads(sys.argv[1]))
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
assert importlib.util.find_spec("pytest") is None and hidden.isdisjoint(sys.modules)
for name in sys.argv[3:]:
    module = importlib.import_module(f"annotated_nlp.{name}")
    assert module.__file__.startswith(sys.argv[2]), module.__file__
print(len(sys.argv[3:]), "imported")
"""


@pytest.mark.wheel
def test_imports_with_the_runtime_requirements_alone(place):
    allowed = closure(RUNTIME) | {"annotated-nlp"}
    hidden = [top for top, owners in packages_distributions().items()
              if allowed.isdisjoint(map(canonicalize_name, owners))]
    assert {"nbdev", "execnb", "fastcore", "IPython", "jupyter_client", "nbformat", "pytest", "beartype", "pandas",
            "sklearn", "num2words", "django", "datasets", "transformers", "sacrebleu"} <= set(hidden)
    printed = run(place / "bin" / "python", "-c", IMPORT, json.dumps(hidden), place, *MODULES, cwd=place / "empty")
    assert printed == f"{len(MODULES)} imported\n"


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "Built from a copy: the repository stays clean. By the setuptools that is here: nothing is fetched."
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "_site", "_proc", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=skip, symlinks=True)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=folder / "source")
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """A virtual environment that has the wheel, the packages of this environment, and nothing of the repository.

    Its site-packages get a .pth file that names this environment's. A folder named so is searched, but the .pth files
    inside it are not read: the one through which the editable install leads to the repository stays without effect.
    """
    place = tmp_path_factory.mktemp("place").resolve()
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    run(sys.executable, "-m", "pip", "--python", place / "bin" / "python",
        "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "this_environment.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    run(place / "bin" / "python", "-m", "ipykernel", "install", "--sys-prefix", cwd=place)
    (place / "empty").mkdir()
    return place


@pytest.mark.wheel
def test_wheel_holds_the_package_and_its_results(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if name.startswith("annotated_nlp/")}
    package = [*(ROOT / "annotated_nlp").glob("*.py"), *(ROOT / "annotated_nlp" / "results").glob("*.json")]
    assert files == {file.relative_to(ROOT).as_posix() for file in package}
    assert {name.split("/")[0] for name in names - files} == {f"annotated_nlp-{annotated_nlp.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


# Runs one notebook with a kernel of the environment; the kernel itself first says whose package it has.
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], as_version=4)
nb.cells.insert(0, nbformat.v4.new_code_cell(f"import annotated_nlp, os\\n"
    f"assert annotated_nlp.__file__.startswith({sys.prefix!r}) and not os.listdir(), annotated_nlp"))
NotebookClient(nb, timeout=None, kernel_name="python3").execute()
"""


@pytest.fixture(scope="module")
def outcomes(place, request, tmp_path_factory):
    "The chosen pages, two at a time from empty folders, while the tests wait for them one by one."
    chosen = [item.callspec.params["page"] for item in request.session.items
              if item.path == request.path and "page" in getattr(getattr(item, "callspec", None), "params", {})]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {page: pool.submit(run, place / "bin" / "python", "-c", NOTEBOOK, ROOT / "nbs" / page,
                                 cwd=tmp_path_factory.mktemp("empty"), OMP_NUM_THREADS="1") for page in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.wheel
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_away_from_the_repository(outcomes, page):
    outcomes[page].result()
