"What a contributor is given: a chapter's layout, hooks, documents that agree with the tree, and a resumable run on a GPU."

import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot
import nbformat
import pytest
import test_book
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pre_commit.clientlib import load_config
from test_house import TARGETS, called
from tools import chapters, gpu, new_chapter, solutions

from annotated_nlp import lab

ROOT = Path(__file__).resolve().parents[2]
config = ConfigParser(delimiters=["="])
config.read(ROOT / "settings.ini", encoding="utf-8")
SETTINGS = config["DEFAULT"]
read = lambda name: (ROOT / name).read_text(encoding="utf-8")


# A new chapter


@pytest.fixture
def tree(tmp_path):
    "The sidebar and two chapters, one of them with its module."
    (tmp_path / "nbs").mkdir()
    (tmp_path / "annotated_nlp").mkdir()
    (tmp_path / "_quarto.yml").write_text(read("_quarto.yml"), encoding="utf-8")
    for name in ("01_data", "16_vit"):
        (tmp_path / "nbs" / f"{name}.ipynb").touch()
    (tmp_path / "annotated_nlp" / "lab.py").touch()
    return tmp_path


@pytest.mark.parametrize("name,words", [
    ("", "no chapter's name"), ("13", "e.g. make new-chapter NAME=25_something"), ("3_bert", "two digits"), ("13_Big", "small letters"),
    ("13-big", "underscore"), ("../13_x", "no chapter's name"), ("13_x.ipynb", "no chapter's name"), ("13_x ", "no chapter's name"), ("13_x\n", "no chapter's name"),
    ("13_class", "can't be imported"), ("16_vit", "nbs/16_vit.ipynb exists"), ("16_new", "16 is taken by nbs/16_vit.ipynb"), ("13_lab", "lab.py exists"),
])
def test_a_bad_name_is_refused(name, words, tree):
    assert words in new_chapter.refusal(name, tree)


@pytest.mark.parametrize("name", ["25_something", "02_a2", "99_a_b_c"])
def test_a_good_name_is_not(name, tree):
    assert new_chapter.refusal(name, tree) is None


@pytest.mark.parametrize("arguments,words", [([], "Which one?"), (["16_vit"], "exists"), (["13_a", "14_b"], "Which one?")])
def test_the_command_says_what_is_wrong(arguments, words):
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    done = subprocess.run([sys.executable, "-m", "tools.new_chapter", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout == before


@pytest.mark.parametrize("name,after", [("25_big_models", "24_inverse"), ("99_last", "24_inverse"), ("02_more", "01_data")])
def test_it_stands_in_the_sidebar(name, after, tree):
    new_chapter.lay_out(name, tree)
    old, new = (list(entries(file)) for file in (ROOT / "_quarto.yml", tree / "_quarto.yml"))
    assert [entry for entry in new if entry["href"] != f"{name}.ipynb"] == old
    places = [entry["href"] for entry in new]
    assert places.index(f"{name}.ipynb") == places.index(f"{after}.ipynb") + 1
    assert dict(href="25_big_models.ipynb", text="25 Big models") in new or name != "25_big_models"


def entries(file):
    def walk(contents):
        for item in contents:
            yield from [item] if "href" in item else walk(item["contents"])

    return walk(yaml.safe_load(file.read_text(encoding="utf-8"))["website"]["sidebar"]["contents"])


STORED = ("test_stored_outputs_are_a_real_run", "test_figures_are_stored", "test_says_where_it_ran")  # a template was never run
FORM = [name for name in vars(test_book) if name.startswith("test_") and name not in STORED]


@pytest.mark.parametrize("form", FORM)
def test_it_has_the_form_of_a_chapter(form, tree, monkeypatch):
    "The same tests that every chapter takes, but for those that need a run."
    nb = nbformat.read(new_chapter.lay_out("25_something", tree), as_version=4)
    for table in (test_book.NOTEBOOKS, test_book.CHAPTERS):
        monkeypatch.setitem(table, "25_something", nb)
    getattr(test_book, form)("25_something")


def test_it_runs_and_says_what_to_write(monkeypatch):
    "Top to bottom, solutions behind it, in one namespace; what it exports is seen to be checked."
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: None)
    nb, names = new_chapter.notebook("25_something"), {}
    assert len(solutions.append(nb)) == 4
    for cell in nb.cells:
        assert not re.search(r"<[A-Z]+>", cell.source), "a blank of the template"
        if cell.cell_type == "code":
            exec(cell.source, names)
    with pytest.raises(ValueError, match="one entry a token"):
        new_chapter_function(nb)(names["x"], names["mask"][:, :3])
    assert sum(bool(re.search(r"^\W*\[[A-Z]", cell.source, re.M)) for cell in nb.cells if cell.cell_type == "markdown") > 10


def new_chapter_function(nb):
    "As a user has it: without the run-time checks that the tests put on the package."
    names = {}
    for cell in nb.cells:
        if "#| export" in cell.source:
            exec(cell.source, names)
    return names["masked_mean"]


# Hooks


def test_hooks_are_what_pre_commit_reads():
    (repo,) = load_config(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local" and [hook["id"] for hook in repo["hooks"]] == ["clean", "sync", "ruff"]
    for hook in repo["hooks"]:
        program, *arguments = hook["entry"].split()
        assert (ROOT / program).exists()
        assert hook["pass_filenames"] == (hook["id"] == "ruff")
    clean, sync, _ = repo["hooks"]
    assert re.search(clean["files"], "nbs/lab/parity.ipynb") and not re.search(clean["files"], "nbs/styles.css")
    assert all(re.search(sync["files"], file) for file in ("nbs/01_data.ipynb", "annotated_nlp/data.py", "README.md", "settings.ini"))


# Documents


def test_contributing_names_what_exists():
    text = read("CONTRIBUTING.md")
    assert {"test", "chapters", "export", "hooks", "new-chapter", "gpu"} <= called(text) & TARGETS and called(text) <= TARGETS
    named = re.findall(r"`((?:nbs|tests|tools|annotated_nlp|\.github|\.ci)/[\w./-]*|[\w.-]+\.(?:ini|txt|yml|yaml|md))`", text)
    assert len(named) > 8
    for name in set(named):
        assert (ROOT / name).exists(), name
    assert "CONTRIBUTING.md" in read("README.md")


def test_citation_says_what_settings_say():
    "Version, authors, licence and addresses; the form itself was validated with cffconvert."
    cited = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["cff-version"] == "1.2.0"
    assert (cited["title"], str(cited["version"])) == (SETTINGS["title"], SETTINGS["version"])
    assert cited["authors"] == [dict(name=SETTINGS["author"])] and cited["license"] == "Apache-2.0"
    assert cited["repository-code"] == f"https://github.com/{SETTINGS['user']}/{SETTINGS['repo']}"


def test_changelog():
    "In the form of Keep a Changelog; the version that is not released yet is named, or has a heading once it is; every chapter is in it."
    text = read("CHANGELOG.md")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert headings[0] == ("Unreleased", "") and all(date for _, date in headings[1:])
    assert f"Version {SETTINGS['version']}, " in text or SETTINGS["version"] in dict(headings)
    for name in test_book.CHAPTERS:
        number, module = name.split("_", 1)
        assert f"Chapter {int(number)}, `{module}`:" in text


# The run on a GPU


@pytest.fixture
def device(tmp_path, monkeypatch):
    "Two chapters and two laboratory pages, no stored result; running a page takes no time and leaves a list."
    results, nbs, ran = tmp_path / "results", tmp_path / "nbs", []
    (nbs / "lab").mkdir(parents=True)
    results.mkdir()
    for name in ("01_a", "02_b", "api", "lab/c", "lab/d", "lab/index"):
        nbformat.write(new_notebook(cells=[new_code_cell(f"'{name}'")]), nbs / f"{name}.ipynb")

    def run(path, copy):
        ran.append(path.stem)
        assert gpu.os.environ["LAB_RUN"] == ("full" if path.parent.name == "lab" else "") and copy.parent == tmp_path / "runs" / gpu.HERE["device"]
        if path.stem in broken:
            raise chapters.CellExecutionError("", "ZeroDivisionError", "division by zero")
        if path.parent.name == "lab":
            lab.store(gpu.HERE | dict(name=path.stem))
        return 61.4

    broken = set()
    monkeypatch.setenv("LAB_RUN", "")
    monkeypatch.setattr(lab, "_folder", lambda: results)
    monkeypatch.setattr(chapters, "NBS", nbs)
    monkeypatch.setattr(chapters, "run", run)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    return SimpleNamespace(ran=ran, broken=broken, nbs=nbs, results=results)


def test_what_is_done_is_not_done_again(device):
    assert gpu.run() == 0 and device.ran == ["01_a", "02_b", "c", "d"]
    assert gpu.run() == 0 and len(device.ran) == 4
    (stored,) = lab.results("gpu")
    assert stored["command"] == "make gpu" and stored["numbers"]["chapters"]["02_b"]["seconds"] == 61


def test_a_failure_is_tried_again_and_the_rest_is_kept(device, capsys):
    device.broken |= {"01_a", "c"}
    assert gpu.run() == 2 and device.ran == ["01_a", "02_b", "c", "d"]
    assert "01_a, c" in capsys.readouterr().err and set(lab.results("gpu")[0]["numbers"]["chapters"]) == {"02_b"}
    device.broken.clear()
    assert gpu.run() == 0 and device.ran[4:] == ["01_a", "c"]


def test_changed_code_is_run_again_and_changed_text_is_not(device):
    gpu.run()
    path = device.nbs / "01_a.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells.append(new_markdown_cell("A word more."))
    nbformat.write(nb, path)
    assert gpu.left()[:2] == ([], [])
    nb.cells[0].source = "2"
    nbformat.write(nb, path)
    assert gpu.left()[:2] == ([path], [])


def test_another_device_s_results_don_t_count(device):
    lab.store(gpu.HERE | dict(name="c", device="another"))
    assert [path.stem for path in gpu.left()[1]] == ["c", "d"]


def test_without_a_device_nothing_is_run(monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: pytest.fail("run"))
    with pytest.raises(SystemExit, match="Nothing was run"):
        gpu.main()


# The page of results


def test_every_stored_run_is_on_the_page():
    "With hardware, date, commit and command; what no GPU has run says so."
    nb = nbformat.read(ROOT / "nbs" / "results.ipynb", as_version=4)
    shown = "".join(str(output.get("data", {}).get("text/html", "")) for cell in nb.cells for output in cell.get("outputs", []))
    for run in lab.results():
        row = re.search(rf"<th[^>]*>{run['name']}</th>(.*?)</tr>", shown, re.S)
        assert row and all(text in row[1] for text in (run["hardware"], run["when"], run["commit"][:7], run["command"])), (
            f"{run['name']} on {run['device']} is not on the page of results as it is stored; `make chapters NAMES=results` mends it")
    if all(run["device"].startswith("cpu") for run in lab.results()):
        said = "".join(str(output.get("data", {}).get("text/markdown", "")) for cell in nb.cells for output in cell.get("outputs", []))
        n = len(test_book.CHAPTERS)
        assert f"`make gpu` has not yet stored: {n} of {n} chapters" in said
