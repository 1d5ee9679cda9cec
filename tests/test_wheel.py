"The package as others get it: sdist and wheel, installed away from the repository. (`tools.away` runs the pages so.)"

import ast
import email
import json
import pkgutil
import re
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import annotated_nlp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import away

ROOT = Path(__file__).resolve().parent.parent
config = ConfigParser(delimiters=["="])
config.read(ROOT / "settings.ini", encoding="utf-8")
NEEDS = {key: list(map(Requirement, text.split())) for key, text in config["DEFAULT"].items()
         if key.endswith("requirements")}
RUNTIME = {canonicalize_name(r.name) for r in NEEDS["requirements"]}
MODULES = [m.name for m in pkgutil.iter_modules(annotated_nlp.__path__)]


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
def test_imports_with_the_runtime_requirements_alone(python, tmp_path):
    allowed = closure(RUNTIME) | {"annotated-nlp"}
    hidden = [top for top, owners in packages_distributions().items()
              if allowed.isdisjoint(map(canonicalize_name, owners))]
    assert {"nbdev", "execnb", "fastcore", "IPython", "jupyter_client", "nbformat", "pytest", "beartype", "pandas",
            "sklearn", "num2words", "django", "datasets", "transformers", "sacrebleu"} <= set(hidden)
    place = python.parent.parent
    printed = away.run(python, "-c", IMPORT, json.dumps(hidden), place, *MODULES, cwd=tmp_path)
    assert printed == f"{len(MODULES)} imported\n"


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return away.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    return away.install(wheel, tmp_path_factory.mktemp("place").resolve())


PACKAGE = {file.relative_to(ROOT).as_posix() for file in (ROOT / "annotated_nlp").rglob("*")
           if file.is_file() and file.suffix != ".pyc"}


@pytest.mark.wheel
def test_wheel_holds_the_package_with_its_data(wheel):
    "`py.typed` among it, by which type checkers read the annotations."
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if name.startswith("annotated_nlp/")}
    assert files == PACKAGE and {"annotated_nlp/py.typed", "annotated_nlp/assets/viewers/shell.js"} < files
    assert {name.split("/")[0] for name in names - files} == {f"annotated_nlp-{annotated_nlp.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.wheel
def test_sdist_holds_what_the_wheel_is_built_from(wheel):
    "The package, what setup.py reads, and no tests that couldn't run there; pip can build it."
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
        assert not [member.name for member in tar if member.islnk() or member.issym()]
    assert PACKAGE | {"settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "nbs", "tools"))]


@pytest.mark.wheel
def test_wheel_says_what_it_needs(wheel):
    "Its metadata are those of settings.ini: requirements, extras, the oldest Python, a description that renders."
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    plain = {str(Requirement(text)) for text in told.get_all("Requires-Dist") if "extra ==" not in text}
    assert plain == {str(r) for r in NEEDS["requirements"]}
    assert told["Requires-Python"] == f">={config['DEFAULT']['min_python']}"
    assert set(told.get_all("Provides-Extra")) == {key.split("_")[0] for key in NEEDS} - {"requirements"}
    assert not re.search(r"\]\((?!https?:|#)|src=\"(?!https?:)", told.get_payload()), "a relative address leads nowhere on PyPI"
