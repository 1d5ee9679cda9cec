"The house: workflows, Makefile, settings and sidebar agree with each other."

import ast
import re
from configparser import ConfigParser
from pathlib import Path

import hypothesis
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
             for file in (ROOT / ".github" / "workflows").glob("*.yml")}
STEPS = [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job["steps"]]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
every_workflow = pytest.mark.parametrize("name", WORKFLOWS)


def settings():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def called(text):
    "The targets of every call of make in a shell command or a text's code."
    return {word for call in re.findall(r"(?:^|`|&& |@)make +([^`\n#&|;]+)", text, re.MULTILINE)
            for word in call.split() if "=" not in word}


def test_workflows_call_targets_that_exist():
    targets = set().union(*(called(step.get("run", "")) for step in STEPS))
    assert {"test", "book"} <= targets <= TARGETS


def test_readme_names_targets_that_exist():
    targets = called((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"book", "test"} <= targets <= TARGETS


def test_continuous_integration_calls_the_readme_command():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\nmake test")


def test_make_alone_explains_every_target():
    explained = set(re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert TARGETS == explained
    assert re.search(r"^\.DEFAULT_GOAL := help$", MAKEFILE, re.MULTILINE)


def test_the_package_has_no_lines_for_quarto():
    modules = [*(ROOT / "annotated_nlp").rglob("*.py")]
    assert len(modules) > 50 and not [file.name for file in modules if "\n#|" in file.read_text(encoding="utf-8")]


def test_python_versions():
    "The workflows' oldest Python is the oldest that the package admits; all three systems are tested."
    matrix = WORKFLOWS["test"]["jobs"]["test"]["strategy"]["matrix"]
    oldest = tuple(map(int, settings()["min_python"].split(".")))
    versions = [tuple(map(int, version.split("."))) for version in matrix["python"]]
    assert min(versions) == oldest and versions == sorted(set(versions)) and len(versions) >= 3
    assert {"ubuntu-latest", "macos-latest", "windows-latest"} == set(matrix["os"])
    named = [str(step["with"]["python-version"]) for step in STEPS if "setup-python" in step.get("uses", "")]
    assert all(tuple(map(int, v.split("."))) >= oldest for v in named if not v.startswith("${{"))


@every_workflow
def test_workflow_is_bounded(name):
    "Pinned actions, least permissions, a time limit for every job, one run at a time for a branch."
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 45
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w./-]+@v\d+(\.\d+\.\d+)?", step["uses"])


def test_site_is_published_from_main_alone():
    deploy = WORKFLOWS["site"]["jobs"]["deploy"]
    assert "refs/heads/main" in deploy["if"] and deploy["needs"] == "build"
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}


TEST_CALLS = [(f"{file.name}, line {node.lineno}", node) for file in (ROOT / "tests").rglob("test_*.py")
              for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def test_one_profile_for_hypothesis():
    "conftest.py alone says how long an example may take (as long as it likes) and whether chance is repeated (it is)."
    assert hypothesis.settings.get_current_profile_name() == "book"
    assert hypothesis.settings.default.deadline is None and hypothesis.settings.default.derandomize
    assert not [where for where, call in TEST_CALLS if {"deadline", "derandomize"} & {word.arg for word in call.keywords}]


def test_no_test_looks_at_a_clock():
    "What must hold on a busy machine counts operations, or waits for what happens; and nothing is given up after seconds."
    clocks = {"perf_counter", "monotonic", "process_time", "time", "timeit"}
    assert not [where for where, call in TEST_CALLS if isinstance(call.func, ast.Attribute) and call.func.attr in clocks]
    limits = [(where, word.value) for where, call in TEST_CALLS for word in call.keywords if word.arg == "timeout"]
    assert not [where for where, value in limits if not (isinstance(value, ast.Constant) and value.value is None)]


def entries(contents):
    "Every address of a sidebar, sections within sections included."
    for item in contents:
        if "href" in item:
            yield item["href"]
        yield from entries(item.get("contents", []))


def test_sidebar_lists_every_notebook():
    book = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    listed = list(entries(book["website"]["sidebar"]["contents"]))
    notebooks = {f.relative_to(ROOT / "nbs").as_posix() for f in (ROOT / "nbs").rglob("[!.]*.ipynb")
                 if ".ipynb_checkpoints" not in f.parts}
    assert len(listed) == len(set(listed)) and set(listed) == notebooks
    numbered = [page for page in listed if page[0].isdigit()]
    assert numbered == sorted(numbered)


def test_one_site_configuration():
    link = ROOT / "nbs" / "_quarto.yml"
    assert link.is_symlink() and link.readlink() == Path("../_quarto.yml")


def test_repository_is_named_alike_everywhere():
    "nbdev, Quarto and the badges lead to the same repository."
    cfg = settings()
    book = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    assert book["repo-url"] == f"https://github.com/{cfg['user']}/{cfg['repo']}"
    assert book["site-url"] == f"https://{cfg['user']}.github.io/{cfg['repo']}"
    assert (book["repo-branch"], book["repo-subdir"], book["title"]) == (cfg["branch"], cfg["nbs_path"], cfg["title"])


def test_a_release_is_what_the_settings_say():
    "The citation has their version, licence and title; the workflow asks for these before it builds, and publishes without a password."
    cite = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cite["version"] == settings()["version"] and cite["title"] == settings()["title"]
    assert cite["license"] == "Apache-2.0" and settings()["license"] == "apache2"
    workflow = WORKFLOWS["release"]
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML reads the key `on` as a truth
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["environment"] == "pypi" and publish["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in publish["steps"])
    assert all(step["uses"].startswith("actions/") or re.search(r"@v\d+\.\d+\.\d+$", step["uses"]) for step in publish["steps"])


def test_make_finds_the_environment_on_every_system():
    "Windows keeps an environment's programs in Scripts; no recipe may name the folder itself."
    assert not re.search(r"^\t.*\.venv/bin", MAKEFILE, re.MULTILINE)
    assert re.search(r"^BIN := \.venv/Scripts$", MAKEFILE, re.MULTILINE) and re.search(r"^BIN := \.venv/bin$", MAKEFILE, re.MULTILINE)
