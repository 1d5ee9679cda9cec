"The API page is computed from the package, and what is stored is computed from the package as it now is."

import importlib
import pkgutil
from pathlib import Path

import annotated_nlp
import nbformat
import pytest
from nbclient import NotebookClient

PAGE = Path(__file__).resolve().parents[2] / "nbs" / "api.ipynb"
MODULES = [m.name.removeprefix("annotated_nlp.") for m in pkgutil.walk_packages(annotated_nlp.__path__, "annotated_nlp.") if not m.ispkg
           and "._" not in m.name]
MEND = "the API page is stale; `make export` mends it"


def written(nb) -> list[str]:
    "The page's computed text: one output for each module."
    return [output.data["text/markdown"] for output in nb.cells[-1].outputs]


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_has_an_entry(module):
    text = "\n".join(written(nbformat.read(PAGE, as_version=4)))
    names = importlib.import_module(f"annotated_nlp.{module}").__all__
    missing = [name for name in names if f'<a id="{module}.{name}"></a>' not in text]
    assert names and not missing, f"{module}: {missing}; {MEND}"


def test_the_page_is_up_to_date():
    "Signatures, docstrings and line numbers too: the page is made again and compared."
    nb = nbformat.read(PAGE, as_version=4)
    stored = written(nb)
    NotebookClient(nb, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(PAGE.parent)}}).execute()
    assert written(nb) == stored, MEND


def test_one_entry_in_full():
    "Keyword-only marks, types with their contents, comments from the source and both links are on the page."
    decoding = next(text for text in written(nbformat.read(PAGE, as_version=4)) if text.startswith("## decoding"))
    sample = decoding.split("### sample\n")[1].split("\n### ")[0]
    assert "    *,\n    max_new_tokens: int,\n    stop_id: int | None = None,\n" in sample
    assert "| `top_k` | `int` or `None` | `None` |" in sample
    assert "[explained](04_decoding.ipynb#sample) · [source](https://github.com/" in sample
    assert '| `scores` | `Float[Tensor, "b"]` | sums of natural log-probabilities' in decoding
