"The folded solutions of the exercises, as `tools.away` runs them behind their chapters."

import ast

import nbformat
import pytest
from messages import says
from nbdev.test import test_nb as run_notebook
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from tools import away, solutions

CHAPTERS = {path.stem: nbformat.read(path, as_version=4) for path in sorted(solutions.NBS.glob("[0-9]*.ipynb"))}
every_chapter = pytest.mark.parametrize("name", CHAPTERS)


def exercise(number, *blocks, text="Why?"):
    code = "\n\n".join(f"```python\n{block}\n```\n\nSo it is." for block in blocks)
    return f'**{number}.** {text}\n\n::: {{.callout-note collapse="true"}}\n## Solution\n\nBecause.\n\n{code}\n:::'


def page(*exercises, head="## Exercises", tail="## References\n\n```python\ncited\n```"):
    prose = "## Before\n\n```python\nbefore\n```\n\n" + "\n\n".join([head, *exercises, tail])
    return new_notebook(cells=[new_markdown_cell("# Title"), new_code_cell("x = 1"), new_markdown_cell(prose)])


def test_code_of_each_solution_by_its_number():
    "In order; several blocks are one; what stands outside, or in another language, is none of it."
    nb = page(exercise(1, "x\n\ny"), exercise(2, text="```python\nasked\n```"), exercise(10, "if x:\n    y", "z"))
    nb.cells[-1].source = nb.cells[-1].source.replace("Because.", "```\nprinted\n```", 1)
    assert solutions.extract(nb) == {"1": "x\n\ny", "2": "", "10": "if x:\n    y\n\nz"}


def test_exercises_may_span_cells():
    nb = page(exercise(1, "x"), tail="")
    nb.cells += [new_markdown_cell(exercise(2, "y")), new_markdown_cell("## References\n\n" + exercise(3, "z"))]
    assert solutions.extract(nb) == {"1": "x", "2": "y"}
    assert solutions.extract(page(head="## Summary")) == {}


@pytest.mark.parametrize("exercises", [
    [exercise(1, "x"), "**2.** Open."], ["**1.** Open.", exercise(2, "x")],
    [exercise(1, "x"), exercise(2, "y").partition("\n")[2]], [exercise(1, "x").replace("## Solution", "## Hint")],
])
def test_an_exercise_without_its_solution_is_refused(exercises):
    with pytest.raises(ValueError, match=says("each exercise one solution")):
        solutions.extract(page(*exercises))


@pytest.mark.parametrize("code, smaller", [
    ("steps, seeds = 300, 3  # smaller: 5, 1\nfit(steps)", "steps, seeds = 5, 1\nfit(steps)"),
    ("import x\nsteps = 2_000  # smaller: 5", "import x\nsteps = 5"),
    ("sizes, n = (64, 128), 3  # smaller: (8,), 1", "sizes, n = (8,), 1"),
    ("x = 3  # a smaller one", "x = 3  # a smaller one"), ("", ""),
])
def test_smaller_sizes(code, smaller):
    assert solutions.quick(code) == smaller


@pytest.mark.parametrize("code", [
    "steps = 300 # smaller: 5", "steps = 300  # smaller 5", "fit(steps=300)  # smaller: 5", "def f():\n    n = 3  # smaller: 1",
    "steps, seeds = 300, 3  # smaller: 5", "steps, seeds = 300  # smaller: 5, 1", "n = 3  # smaller: 1\nm = 3  # smaller: 1",
    "steps = big  # smaller: 5", "steps = 3  # smaller: three", "steps = 3  # smaller: 3",
])
def test_another_form_of_the_line_is_refused(code):
    "Else a solution would be run in full for want of two spaces, and nobody would know why."
    with pytest.raises(ValueError, match=says("steps, seeds = 300, 3  # smaller: 5, 1")):
        solutions.quick(code)


def test_solutions_are_run_behind_the_chapter():
    nb = page(exercise(1, "y = x + 1"), exercise(2), exercise(3, "n = 300  # smaller: 5\nassert y == 2"))
    cells = solutions.append(nb)
    assert nb.cells[-2:] == cells and [cell.cell_type for cell in nb.cells] == ["markdown", "code", "markdown", "code", "code"]
    assert cells[1].source == "# Solution of exercise 3\nn = 5\nassert y == 2"
    assert solutions.append(page(exercise(1, "n = 300  # smaller: 5")), smaller=False)[0].source.endswith("n = 300  # smaller: 5")


def test_failures_are_counted_and_the_rest_is_run(tmp_path, monkeypatch, capsys):
    "In one namespace, one after the other."
    nb = page(exercise(1, "x = [x]"), exercise(2, "1 / 0"), exercise(3, "n = 30  # smaller: 5\nx, n"))
    nbformat.write(nb, tmp_path / "23_page.ipynb")
    before = (tmp_path / "23_page.ipynb").read_bytes()
    monkeypatch.setattr(solutions, "NBS", tmp_path)
    assert solutions.run("23_page", smaller=True)[1] == 1
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed and "([1], 5)" in printed and "23_page, exercise 3: " in printed
    assert (tmp_path / "23_page.ipynb").read_bytes() == before


@pytest.mark.parametrize("code, passes", [("n = 3  # smaller: 1\nassert (x, n) == (1, 1)", True), ("n = 3  # smaller: 1\nassert n == 3", False)])
def test_a_solution_that_fails_fails_the_page(code, passes, tmp_path):
    "As `tools.away` runs it."
    (tmp_path / "away").mkdir()
    nbformat.write(page(exercise(1, code)), tmp_path / "page.ipynb")
    before = (tmp_path / "page.ipynb").read_bytes()
    away.with_solutions(tmp_path / "page.ipynb", tmp_path / "away")
    assert run_notebook(tmp_path / "away" / "page.ipynb", showerr=False)[0] == passes
    assert (tmp_path / "page.ipynb").read_bytes() == before


@every_chapter
def test_every_solution_is_code(name):
    "Each has some, it parses, and no exercise is without; sizes, where there are some, can be made smaller."
    found = solutions.extract(CHAPTERS[name])
    assert list(found) == [str(number + 1) for number in range(len(found))] and len(found) >= 4
    for number, code in found.items():
        assert code, f"exercise {number} is solved without code"
        ast.parse(solutions.quick(code))
