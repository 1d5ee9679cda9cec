"Spelling: codespell over prose and code, and British forms in the prose."

import re
import subprocess
import sys
from pathlib import Path

import codespell_lib
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {f.relative_to(ROOT / "nbs").with_suffix("").as_posix(): nbformat.read(f, as_version=4)
         for f in sorted((ROOT / "nbs").rglob("[!.]*.ipynb")) if ".ipynb_checkpoints" not in f.parts}
# Surnames, a town, and French words in examples.
KNOWN = "rouge,cleary,gage,parma,pinter,tung,valide,mot,vie,fils,fille"
# Computing's own words, the name of a licence or a title, and words that are British too in another sense.
AMERICAN_ALL_THE_SAME = {"program", "catalog", "catalogs", "license", "color", "story", "practice", "signaling"}
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)]*\)|https?://\S+", re.DOTALL)


def misspelt(text):
    done = subprocess.run([sys.executable, "-m", "codespell_lib", "--ignore-words-list", KNOWN, "-"], input=text, capture_output=True, text=True)
    return done.stdout


def american():
    "American form -> British form, from codespell's own list."
    lines = (Path(codespell_lib.__file__).parent / "data" / "dictionary_en-GB_to_en-US.txt").read_text(encoding="utf-8")
    pairs = (line.split("->") for line in lines.splitlines())
    return {there.split(",")[0].strip(): here for here, there in pairs}


def test_codespell_knows_an_error():
    assert "receive" in misspelt("recieve")


def test_pages_are_spelt_right():
    lines = [f"{name}: {line}" for name, nb in PAGES.items() for cell in nb.cells for line in cell.source.splitlines()]
    assert misspelt("\n".join(lines)) == ""


def test_files_are_spelt_right():
    folders = ("tests", "tools", "benchmarks", ".github")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".yml")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), *ROOT.glob("nbs/*.html"), ROOT / "Makefile", ROOT / "settings.ini"]
    on_purpose = Path(__file__).name, "queries.yml"  # students mistype
    assert misspelt("\n".join(f.read_text(encoding="utf-8") for f in files if f.name not in on_purpose)) == ""


@pytest.mark.parametrize("name", PAGES)
def test_british(name):
    text = "\n\n".join(cell.source for cell in PAGES[name].cells if cell.cell_type == "markdown")
    words = re.findall(r"[a-z]+", NOT_PROSE.sub(" ", text.split("\n## References")[0]).lower())
    forms = american()
    assert {word: forms[word] for word in words if word in forms and word not in AMERICAN_ALL_THE_SAME} == {}
