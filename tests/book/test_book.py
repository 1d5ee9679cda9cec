"The form of the notebooks: what every chapter promises its reader, whoever writes it."

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {f.relative_to(ROOT / "nbs").with_suffix("").as_posix(): nbformat.read(f, as_version=4)
             for f in sorted((ROOT / "nbs").rglob("[!.]*.ipynb")) if ".ipynb_checkpoints" not in f.parts}
CHAPTERS = {name: nb for name, nb in NOTEBOOKS.items() if name[0].isdigit()}
HEADINGS = ["The check", "The experiment", "Where the code departs from the paper", "Summary", "Exercises",
            "References"]
every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
every_chapter = pytest.mark.parametrize("name", CHAPTERS)


def code(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]


def prose(nb):
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


@every_notebook
def test_stored_outputs_are_a_real_run(name):
    outputs = [output for cell in code(NOTEBOOKS[name]) for output in cell.outputs]
    assert outputs, f"no stored output; run `make chapters NAMES={name}`"
    assert not [output.ename for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"], "debris on the error stream"


@every_notebook
def test_figures_are_described(name):
    "A cell that shows a picture says what is to be seen, to those who see it and to those who don't."
    for cell in code(NOTEBOOKS[name]):
        pictures = [o for o in cell.outputs if {"image/png", "image/svg+xml"} & set(o.get("data", {}))]
        if pictures:
            for option in ("fig-alt", "fig-cap"):
                text = re.search(rf"^#\| {option}: (.+)$", cell.source, re.MULTILINE)
                assert text and len(text[1]) > 20, f"{option} missing: {cell.source[:200]}"


@every_notebook
def test_figures_are_stored(name):
    "A cell with a caption has its picture: a run under a backend that shows nothing would leave none."
    for cell in code(NOTEBOOKS[name]):
        if re.search(r"^#\| fig-cap:", cell.source, re.MULTILINE):
            assert any({"image/png", "image/svg+xml"} & set(o.get("data", {})) for o in cell.outputs), cell.source[:200]


@every_notebook
def test_no_text_is_missing(name):
    "A line of capitals alone marks a place where a result was to be described."
    assert not re.findall(r"^[A-Z][A-Z0-9_-]{2,}$", prose(NOTEBOOKS[name]), re.MULTILINE)


@every_notebook
def test_begins_with_title_and_badge(name):
    first, second = NOTEBOOKS[name].cells[:2]
    assert re.fullmatch(r"# .+\n\n> .{20,}", first.source), "the first cell is the title and one line of description"
    cfg = get_config()
    assert f"colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/{cfg.branch}/nbs/{name}.ipynb" in second.source


@every_notebook
def test_runs_in_colab(name):
    "The first cell that runs installs the package where it is missing in Colab."
    cells = [cell.source for cell in code(NOTEBOOKS[name]) if "default_exp" not in cell.source]
    assert '"google.colab" in sys.modules' in cells[0] and "pip" in cells[0]


@every_notebook
def test_says_nothing_of_this_machine(name):
    text = nbformat.writes(NOTEBOOKS[name])
    assert not re.search(r"/(home|root|Users|work|tmp)/\w", text)


@every_chapter
def test_headings_stand_in_order(name):
    found = [h for h in re.findall(r"^## (.+?)\s*$", prose(CHAPTERS[name]), re.MULTILINE) if h in HEADINGS]
    assert found == HEADINGS


@every_chapter
def test_explains_more_than_it_programs(name):
    "60 to 110 words of text to a code cell."
    nb = CHAPTERS[name]
    assert 60 <= len(prose(nb).split()) / len(code(nb)) <= 110


@every_chapter
def test_says_where_it_ran(name):
    assert any("lab.machine()" in cell.source and cell.outputs for cell in code(CHAPTERS[name]))


@every_chapter
def test_exercises_have_solutions(name):
    exercises = prose(CHAPTERS[name]).split("## Exercises")[1].split("\n## References")[0]
    assert len(re.findall(r'^::: \{\.callout-note collapse="true"\}', exercises, re.MULTILINE)) >= 4


@every_chapter
def test_imports_stand_apart(name):
    "nbdev runs import cells when it makes the documentation, so they must hold nothing else."
    for cell in code(CHAPTERS[name])[2:]:
        kinds = {type(node) in (ast.Import, ast.ImportFrom) for node in ast.parse(cell.source).body}
        assert len(kinds) == 1, cell.source[:200]


@every_chapter
def test_exported_code_is_checked(name):
    assert sum("assert" in cell.source for cell in code(CHAPTERS[name]) if "#| export" not in cell.source) >= 5


@every_chapter
def test_reshapes_with_einops(name):
    exported = "\n".join(cell.source for cell in code(CHAPTERS[name]) if "#| export" in cell.source)
    assert not re.findall(r"\.(?:view|transpose|permute|reshape)\(", exported)
