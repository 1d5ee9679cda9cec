"The house: a module stands on lower floors alone, a name is defined once, and nobody hands on what another defines."

import ast
from collections import defaultdict
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "annotated_nlp"
MODULES = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text(encoding="utf-8"))
           for file in sorted(PACKAGE.rglob("*.py")) if not file.name.startswith("_")}
FLOORS = [  # from the ground
    "checks parts.compact parts.embedding parts.expressions parts.kernels parts.model parts.ngrams parts.pictures parts.pooling "
    "parts.recording parts.recurrent show.style show.diagram show.forest show.viewers corpora.packages corpora.loaders "
    "corpora.scenes corpora.tags tasks.resuming tasks.costs",
    "data tokenization seq2seq decoding attention denoising alignment vectors parts.writing parts.fast parts.speculative",
    "transformer training",
    "gpt bert t5 vit llama contextual",
    "electra bert_family parts.deberta parts.canine parts.xlnet captioning inverse sentences adapting compressing probing parts.heads",
    "lab tasks.tuning tasks.translation tasks.probes show.live show.chat",
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
# The addresses that users were promised, though the thing is defined elsewhere.
PUBLIC = {"data": {"fashion_mnist", "movie_reviews", "review_sentences", "verses"}, "tokenization": {"load", "save"},
          "attention": {"record"}, "bert_family": {"Canine", "Deberta", "DebertaForMaskedLM", "XLNet"}}


def imported(name: str) -> dict[str, set[str]]:
    "Modules of ours that a module imports when it is imported itself, with the names that it takes."
    found = defaultdict(set)
    outside = [node for top in MODULES[name].body if not isinstance(top, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(top)]
    for node in outside:
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join(filter(None, [*name.split(".")[:-node.level], node.module]))
            for alias in node.names:
                whole = f"{source}.{alias.name}".strip(".")
                found[whole if whole in MODULES else source] |= set() if whole in MODULES else {alias.name}
    return found


def defined(name: str) -> set[str]:
    names = set()
    for node in MODULES[name].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names - {"__all__"}


def test_every_module_has_a_floor():
    assert {name for name in MODULES if not name.startswith("hub.")} == FLOOR.keys()


@pytest.mark.parametrize("name", FLOOR)
def test_no_arrow_leads_upwards(name):
    "But for files of others, which stand beside the floors: of them a model knows nothing."
    above = {other for other in imported(name) if other in FLOOR and FLOOR[other] > FLOOR[name]}
    hub = {other for other in imported(name) if other.startswith("hub.")} - ({"hub.tokenizers"} if name in ("tokenization", "show.live") else set())
    assert not above | hub
    if 2 <= FLOOR[name] <= 4 and name not in ("training", "sentences", "inverse"):
        assert not imported(name).keys() & {"training", "data", "lab"}


def test_no_circle():
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, [*open_, name]
        if name not in done:
            open_.append(name)
            for other in imported(name):
                visit(other)
            done.add(open_.pop())

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize("name", MODULES)
def test_a_name_is_imported_from_where_it_is_defined(name):
    for source, names in imported(name).items():
        missing = {one for one in names if one not in defined(source)}
        assert not missing, f"{name} takes {missing} from {source}, which doesn't define them"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_handed_on(name):
    "What a module imports it uses, or it was promised there."
    used = {node.id for node in ast.walk(MODULES[name]) if isinstance(node, ast.Name)}
    text = {node.value for node in ast.walk(MODULES[name]) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    taken = set().union(*imported(name).values(), set())
    kept = {one for one in taken - (used - PUBLIC.get(name, set())) if not any(one in some for some in text if len(some) < 100) or one in PUBLIC.get(name, ())}
    assert kept == PUBLIC.get(name, set())


def test_a_name_stands_for_one_thing():
    homes = defaultdict(list)
    for name in MODULES:
        for one in defined(name):
            if not one.startswith("_"):
                homes[one].append(name)
    special = {"PAD", "UNK", "BOS", "EOS"}  # the same four tokens, by the ids of each vocabulary
    assert {one: names for one, names in homes.items() if len(names) > 1 and one not in special} == {}


def test_one_notebook_to_one_module():
    pages = defaultdict(list)
    for page in (ROOT / "nbs").rglob("[!.]*.ipynb"):
        if ".ipynb_checkpoints" not in page.parts:
            for cell in nbformat.read(page, as_version=4).cells:
                if cell.cell_type == "code" and cell.source.startswith("#| default_exp "):
                    pages[cell.source.split()[2]].append(page.relative_to(ROOT / "nbs").with_suffix("").as_posix())
    assert pages.keys() == MODULES.keys() and all(len(some) == 1 for some in pages.values())
    for module, (page,) in pages.items():
        if module not in ("checks", "lab"):
            assert page.rpartition("/")[0] == "/".join(module.split(".")[:-1]) and page.rpartition("/")[2].lstrip("0123456789_") == module.split(".")[-1]


def test_only_chapters_and_what_leads_to_them_stand_at_the_top():
    there = {page.stem for page in (ROOT / "nbs").glob("*.ipynb") if not page.stem[0].isdigit()}
    assert there == {"index", "how_to_read", "teach", "glossary", "api", "results"}
    assert {path.name for path in (ROOT / "nbs").iterdir() if path.is_dir() and not path.name.startswith((".", "_"))} == {
        "lab", "parts", "hub", "corpora", "tasks", "show", "images", "models"}
