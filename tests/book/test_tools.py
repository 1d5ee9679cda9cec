"The machinery behind `make`, on small made notebooks and sites."

import ast
import base64
import io
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from execnb.nbio import dict2nb
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from nbdev.config import get_config
from nbdev.process import NBProcessor
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from tools import away, chapters, check, figures, format, owner, procs, readme, site


@pytest.fixture
def book(tmp_path, monkeypatch):
    "A folder of notebooks: `pad` is defined once, `fit` twice; give what a page's cells become."
    def write(name, *cells):
        path = tmp_path / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(new_notebook(cells=list(cells)), path)
        return path

    def process(name, cell, *processors):
        path = write(name, cell)
        nb = dict2nb(nbformat.read(path, as_version=4))
        nb.path_ = path
        NBProcessor(nb=nb, procs=list(processors)).process()
        return [cell.source for cell in nb.cells]

    monkeypatch.setattr(procs, "get_config", lambda: SimpleNamespace(nbs_path=tmp_path))
    procs._definitions.cache_clear()
    write("01_data", new_code_cell("#| export\ndef pad(): pass\n\n\ndef fit(): pass"))
    write("02_more", new_code_cell("#| export\ndef fit(): pass"), new_code_cell("def shown(): pass"))
    yield process
    procs._definitions.cache_clear()


def linked(book, text, name="03_page"):
    (result,) = book(name, new_markdown_cell(text), procs.link_names)
    return result


@pytest.mark.parametrize("text, link", [
    ("`pad`", "[`pad`](01_data.ipynb#pad)"),
    ("See `pad()`, then `data.pad`.", "See [`pad()`](01_data.ipynb#pad), then [`data.pad`](01_data.ipynb#pad)."),
    ("- a list: `pad`\n", "- a list: [`pad`](01_data.ipynb#pad)\n"),
    ("```\n`pad`\n```\n`pad`", "```\n`pad`\n```\n[`pad`](01_data.ipynb#pad)"),
])
def test_names_become_links(book, text, link):
    assert linked(book, text) == link


def test_links_are_relative_to_the_page(book):
    assert linked(book, "`pad`", "lab/french") == "[`pad`](../01_data.ipynb#pad)"
    assert linked(book, "`pad`", "01_data") == "[`pad`](#pad)"


@pytest.mark.parametrize("text", [
    "```python\npad(`x`)\n`pad`\n```", "``a `pad` b``", "# On `pad`", "## `pad`", "[`pad`](https://pytorch.org)",
    "[as `pad` does](elsewhere.ipynb)", "![a row of `pad` tokens](figure.png)",
    "`pad(ids)`", "`fit`", "`shown`", "`padding`", "pad",
], ids=lambda text: text.split("\n")[0])
def test_everything_else_stays(book, text):
    "Code, headings, links and images; names that two notebooks define, that none exports, or that are no names."
    assert linked(book, text) == text


def test_anchor_before_each_exported_definition(book):
    source = """LIMIT, STEP = 3, [i for i in range(3)]
RATE: float = 0.1
torch.limit = LIMIT
def pad(): local = 1
def _private(): pass
class Corpus:
    def method(self): pass"""
    anchor, code = book("03_page", new_code_cell("#| export\n" + source), procs.show_exported)
    assert anchor == "".join(f'<a id="{name}"></a>' for name in ("LIMIT", "STEP", "RATE", "pad", "Corpus"))
    assert code == source


@pytest.mark.parametrize("source", ["def pad(): pass", "#| export\ndef _private(): pass", "#| export\nimport torch"])
def test_no_anchor_without_an_exported_name(book, source):
    assert len(book("03_page", new_code_cell(source), procs.show_exported)) == 1


@pytest.mark.parametrize("source", ["#| hide\nsecret = 1", "#| default_exp data"])
def test_directives_for_nbdev_alone_are_not_shown(book, source):
    assert book("03_page", new_code_cell(source), procs.show_exported) in ([], [None])


@pytest.mark.parametrize("source, folded", [
    ("import torch\nfrom torch import nn", True), ('import torch\nwith extra("train"):\n    import tqdm', True),
    ('with extra("train"):\n    import tqdm\n    rate = 1', False), ("import torch\nrate = 1", False), ("# nothing", False),
])
def test_cells_that_only_import_are_folded(book, source, folded):
    (cell,) = book("03_page", new_code_cell(source), procs.fold_imports)
    assert cell == ('#| code-fold: true\n#| code-summary: "Imports"\n' if folded else "") + source


LOOSE = "#| export\ndef f( x ):\n  return {'a':x,\n  }\n"
TIDY = '#| export\ndef f(x):\n    return {\n        "a": x,\n    }'


def page_of(*cells):
    return nbformat.writes(new_notebook(cells=list(cells)))


def test_exported_cells_are_formatted(tmp_path):
    "They alone, and nothing else of the page changes; a second time there is nothing left to do."
    others = new_code_cell("x = {'a':1}"), new_markdown_cell("`f( x )`"), new_code_cell("f( 1 )", outputs=[new_output("stream", text="1")])
    loose, tidy = tmp_path / "loose.ipynb", tmp_path / "lab" / "tidy.ipynb"
    tidy.parent.mkdir()
    loose.write_text(page_of(new_code_cell(LOOSE), *others), encoding="utf-8")
    tidy.write_text(page_of(new_code_cell(TIDY), *others).replace("\n ", "\n"), encoding="utf-8")
    before = loose.read_bytes(), tidy.read_bytes()
    assert format.mend(tmp_path, write=False) == [loose] and (loose.read_bytes(), tidy.read_bytes()) == before
    assert format.mend(tmp_path) == [loose] and tidy.read_bytes() == before[1]
    was, now = nbformat.reads(before[0].decode(), as_version=4), nbformat.read(loose, as_version=4)
    assert now.cells[0].source == TIDY and now.cells[1:] == was.cells[1:] and now.metadata == was.metadata
    assert format.mend(tmp_path) == []


def test_what_ruff_cannot_read_stays(tmp_path):
    page = tmp_path / "page.ipynb"
    page.write_text(page_of(new_code_cell(LOOSE), new_code_cell("#| export\ndef f(:")), encoding="utf-8")
    before = page.read_bytes()
    with pytest.raises(SyntaxError, match=r"page [0-9a-f]+\.py:2"):
        format.mend(tmp_path)
    assert page.read_bytes() == before


def made_site(folder, **pages):
    for name, body in pages.items():
        file = folder / f"{name.replace('__', '/')}.html"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"<html><body>{body}</body></html>", encoding="utf-8")
    return site.broken_links(folder)


def test_whole_links_pass(tmp_path):
    (tmp_path / "a picture.png").write_bytes(b"")
    assert made_site(
        tmp_path,
        index='<a href="one.html#here"></a><a href="lab/"></a><a href="#"></a><img src="a%20picture.png?v=1">',
        one='<h2 id="here"></h2><a href="#h%65re"></a><a href="https://x.org/no.html"></a><a href="mailto:a@b"></a>',
        lab__index='<a href="../one.html#here"></a><a href="/index.html"></a><a name="old"></a><a href="#old"></a>',
    ) == []


@pytest.mark.parametrize("link, why", [
    ("two.html", "no such file"), ("one.html#there", "no such anchor"), ("#there", "no such anchor"),
    ("lab/one.html", "no such file"), ("../secret.html", "no such file"), ("/lab", "no such file"),
])
def test_broken_links_are_found(tmp_path, link, why):
    "Also one that leads to a file of this machine beside the site."
    (tmp_path / "secret.html").write_text("", encoding="utf-8")
    folder = tmp_path / "site"
    folder.mkdir()
    found = made_site(folder, index=f'<a href="{link}"></a>', one='<h2 id="here"></h2>')
    assert found == [f"index.html: {link} ({why})"]


def test_missing_pictures_are_found(tmp_path):
    assert made_site(tmp_path, index='<img src="gone.png">') == ["index.html: gone.png (no such file)"]


def test_a_lighter_figure_has_the_same_pixels(tmp_path):
    "An alpha channel goes where it says nothing, and stays where something shows through; inches stay inches."
    colours = np.random.default_rng(0).integers(0, 256, (60, 80, 4), dtype=np.uint8)
    for name, alpha in (("opaque", 255), ("clear", colours[:, :, 3].copy())):
        colours[:, :, 3] = alpha
        path = tmp_path / f"{name}.png"
        Image.fromarray(colours).save(path, dpi=(220, 220))
        before = path.read_bytes()
        site._lighten(path)
        with Image.open(path) as image:
            assert image.mode == ("RGB" if name == "opaque" else "RGBA") and round(image.info["dpi"][0]) == 220
            assert np.array_equal(np.asarray(image.convert("RGBA")), colours)
        assert len(path.read_bytes()) < len(before) if name == "opaque" else path.read_bytes() == before


def test_copies_for_models_name_the_page_s_own_figures(tmp_path, monkeypatch):
    "As where Quarto has made the page: the same picture under another name, and one that it hasn't; smaller sections too."
    made, shown = tmp_path / "_proc" / "_site", tmp_path / "_site"
    whole, part = {"href": "lab/a.html"}, {"href": "lab/a.html#b"}
    for file, content in {made / "search.json": json.dumps([whole, part]).encode(),
                          shown / "search.json": json.dumps([whole | {"crumbs": ["A"]}]).encode(),
                          made / "llms.txt": b"# Book\n", made / "lab" / "a_files" / "a_1_0.png": b"one",
                          made / "lab" / "a_files" / "a_2_0.png": b"two", made / "lab" / "a.llms.md":
                          b"$x$ ![1](a_files/a_1_0.png) ![2](a_files/a_2_0.png)\n",
                          shown / "lab" / "a_files" / "figure-html" / "cell-2-output-1.png": b"one"}.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    monkeypatch.setattr(site, "PROC", tmp_path / "_proc")
    monkeypatch.setattr(site, "SITE", shown)
    monkeypatch.setattr(site, "_smalldocs", lambda: None)
    site._copies_for_models()
    assert site._sections(shown) == [whole | {"crumbs": ["A"]}, part | {"crumbs": ["A"]}]
    text = (shown / "lab" / "a.llms.md").read_text(encoding="utf-8")
    assert text == "$x$ ![1](a_files/figure-html/cell-2-output-1.png) ![2](a_files/a_2_0.png)\n"
    assert (shown / "lab" / "a_files" / "a_2_0.png").read_bytes() == b"two"
    assert (shown / "llms.txt").read_text(encoding="utf-8") == "# Book\n"


def test_the_site_is_built_with_what_reading_installs():
    "`make book` installs `site_requirements` alone; a checkout that has run the tests has more, and would not notice."
    owners, needed = metadata.packages_distributions(), set()
    ask = [Requirement(line) for line in get_config()["site_requirements"].split()]
    while ask:
        one = ask.pop()
        name = canonicalize_name(one.name)
        if name not in needed and (one.marker is None or one.marker.evaluate({"extra": ""})):
            needed.add(name)
            ask += map(Requirement, metadata.requires(name) or ())
    assert "smalldocs" in needed and "torch" not in needed
    for file in ("site.py", "procs.py"):
        nodes = list(ast.walk(ast.parse((site.ROOT / "tools" / file).read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        others = {name.split(".")[0] for name in names} - sys.stdlib_module_names
        missing = [name for name in others if not {canonicalize_name(d) for d in owners[name]} & needed]
        assert others and not missing, f"tools/{file} imports {missing}: add them to site_requirements in settings.ini"


def test_outputs_are_stored_without_debris():
    "Progress bars and warnings go; results stay."
    warning = new_output("stream", name="stderr", text="warning")
    printed = new_output("stream", name="stdout", text="a\n10%\r90%\rdone\nb\n")
    result = new_output("execute_result", data={"text/plain": "3"})
    bar = new_output("display_data", data={"text/plain": "0%", "application/vnd.jupyter.widget-view+json": {"model_id": "x"}})
    cell = new_code_cell("", outputs=[warning, bar, printed, result])
    chapters._without_debris(cell)
    assert [output.get("text") for output in cell.outputs] == ["a\ndone\nb\n", None] and cell.outputs[1] == result


def drawn(image):
    file = io.BytesIO()
    image.save(file, "PNG", dpi=(220, 220))
    return file.getvalue()


def test_a_stored_figure_is_lighter_and_looks_the_same():
    "Letters, lines and a shade, as matplotlib draws them: less than half the bytes, hardly a pixel off, and as many inches."
    canvas = Figure((4, 3), dpi=220)
    axes = canvas.add_subplot()
    axes.plot([3, 1, 2])
    axes.set_title("Attention while writing German")
    axes.imshow(np.linspace(0, 1, 40).reshape(5, 8), extent=(0, 1, 1, 2))
    FigureCanvasAgg(canvas)
    file = io.BytesIO()
    canvas.savefig(file, format="png", dpi=220)
    cell = new_code_cell("", outputs=[new_output("display_data", data={"image/png": base64.b64encode(file.getvalue()).decode()})])
    figures.lighten(cell)
    small = base64.b64decode(cell.outputs[0].data["image/png"])
    assert len(small) < len(file.getvalue()) / 2
    with Image.open(io.BytesIO(small)) as after, Image.open(file) as before:
        assert round(after.info["dpi"][0]) == 220
        off = np.abs(np.asarray(after.convert("RGB")).astype(int) - np.asarray(before.convert("RGB")).astype(int))
    assert off.mean() < 0.1 and (off < 16).mean() > 0.999
    assert figures.lighter(small) is small, "a second time there is nothing left to do"


def test_a_picture_of_many_colours_stays_as_it_is():
    "And one that something shows through."
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 4), dtype=np.uint8)
    opaque = noise.copy()
    opaque[:, :, 3] = 255
    for png in (drawn(Image.fromarray(noise)), drawn(Image.fromarray(opaque))):
        assert figures.lighter(png) is png


def test_a_failing_notebook_keeps_its_stored_outputs(tmp_path):
    cell = new_code_cell("1 / 0", outputs=[new_output("stream", name="stdout", text="as it was\n")])
    path = tmp_path / "page.ipynb"
    nbformat.write(new_notebook(cells=[cell]), path)
    before = path.read_bytes()
    with pytest.raises(chapters.CellExecutionError, match="ZeroDivisionError"):
        chapters.run(path)
    assert path.read_bytes() == before


def test_all_chapters_are_run_in_order():
    names = [path.relative_to(chapters.NBS).as_posix() for path in chapters.chapters()]
    assert names[:4] == ["01_data.ipynb", "02_tokenization.ipynb", "03_seq2seq.ipynb", "04_decoding.ipynb"]
    assert {"api.ipynb", "show/style.ipynb", "lab/index.ipynb"} <= set(names) and "lab/parity.ipynb" not in names


def test_a_page_is_found_in_its_folder(tmp_path, monkeypatch):
    "By its name alone or with the folder; a chapter before a page of the same name, and the laboratory's long pages not at all."
    for name in ("05_attention", "parts/kernels", "index", "lab/index", "lab/gates"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").touch()
    monkeypatch.setattr(chapters, "NBS", tmp_path)
    asked = {"05_attention": "05_attention", "kernels": "parts/kernels", "parts/kernels.ipynb": "parts/kernels", "index": "index", "lab/index": "lab/index"}
    for name, place in asked.items():
        assert chapters.page(name) == tmp_path / f"{place}.ipynb"
    assert not chapters.page("gates").exists()
    assert [path.stem for path in chapters.chapters()] == ["05_attention", "index", "index", "kernels"]


def home(tmp_path, monkeypatch, *cells):
    (tmp_path / "nbs").mkdir()
    nbformat.write(new_notebook(cells=list(cells)), tmp_path / "nbs" / "index.ipynb")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    settings = SimpleNamespace(doc_host="https://us.org", doc_baseurl="/book", user="us", repo="book", branch="main")
    monkeypatch.setattr(readme, "get_config", lambda: settings)


def test_readme_leads_to_the_site(tmp_path, monkeypatch):
    "Links to notebooks lead to the published pages, pictures to the hosted files; the rest stays, folded cells go."
    text = "[a](01_data.ipynb) [b](lab/index.ipynb#rules) [c](http://x.org/y.ipynb) [d](#at) ![e](images/f.svg) `f`"
    folded = new_code_cell('#| code-fold: true\nif "google.colab" in sys.modules: pass')
    home(tmp_path, monkeypatch, new_markdown_cell("# Title"), folded, new_markdown_cell(text))
    assert readme.readme() == (
        "# Title\n\n[a](https://us.org/book/01_data.html) [b](https://us.org/book/lab/index.html#rules) "
        "[c](http://x.org/y.ipynb) [d](#at) ![e](https://raw.githubusercontent.com/us/book/main/nbs/images/f.svg) `f`\n")


def test_readme_shows_the_front_page_s_figures(tmp_path, monkeypatch):
    "As pictures beside the book's, with alternative text and caption; what is live only on the site goes, and so do its frames."
    figure = new_output("display_data", data={"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"})
    drawn = '#| echo: false\n#| fig-cap: "What is seen."\n#| fig-alt: "Three boxes."\ndrawing'
    live = new_code_cell("#| echo: false\nlive", outputs=[new_output("display_data", data={"text/html": "<script>"})])
    frame, end = new_markdown_cell("::::: {.front}\n::: {.doors}\n- one\n:::"), new_markdown_cell(":::::\n\nText.")
    home(tmp_path, monkeypatch, frame, new_code_cell(drawn, outputs=[figure]), live, end, new_code_cell("shown = 1"))
    hosted = "https://raw.githubusercontent.com/us/book/main/nbs/images/front_1.png"
    assert readme.readme() == f"- one\n\n![Three boxes.]({hosted})\n\n*What is seen.*\n\nText.\n\n\n```python\nshown = 1\n```\n"
    (tmp_path / "nbs" / "images").mkdir()
    readme.write()
    assert (tmp_path / "nbs" / "images" / "front_1.png").read_bytes() == b"\x89PNG\r\n\x1a\n"


def test_the_owner_is_written_everywhere_from_the_settings(tmp_path, monkeypatch):
    "A fork changes one line, and no address of the old owner is left in what it publishes; others' addresses stay."
    for file in owner.files():
        copy = tmp_path / file.relative_to(owner.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    settings = owner.get_config()
    old = f"{settings.user}/{settings.repo}"
    before = sum(file.read_text(encoding="utf-8").count(old) for file in owner.files(tmp_path))
    fork = SimpleNamespace(user="someone-else", repo=settings.repo, branch="trunk")
    monkeypatch.setattr(owner, "get_config", lambda: fork)
    assert len(owner.write(tmp_path)) == len(owner.files(tmp_path))
    texts = [file.read_text(encoding="utf-8") for file in owner.files(tmp_path)]
    assert before > len(texts) and sum(text.count(f"someone-else/{settings.repo}") for text in texts) == before
    assert not any(old in text or f"{settings.user}.github.io" in text for text in texts)
    assert all(f"/blob/trunk/nbs/{file.relative_to(tmp_path / 'nbs').as_posix()}" in text
               for file, text in zip(owner.files(tmp_path), texts) if file.suffix == ".ipynb")
    assert owner.write(tmp_path) == []


@pytest.mark.parametrize("address", [
    "https://github.com/huggingface/transformers", "annotated-nlp/reviews-bert", "https://karpathy.github.io/annotated",
    "https://github.com/other/annotated_nlp_too/blob/dev/x",
])
def test_addresses_of_others_stay(address):
    assert owner.renamed(address, "someone", "annotated_nlp", "main") == address


def test_sync_compares_every_address():
    "`make sync` runs `mend` on a copy and compares these files, so an address that names another owner is noticed."
    assert {file.relative_to(owner.ROOT) for file in owner.files()} <= set(check._generated(owner.ROOT))


# Pages, each in a process of its own


GOOD = ["x = 1", "#| eval: false\n1 / 0", "#| gpu\n1 / 0", "assert x == 1"]
MADE = {
    "good": GOOD, "lab/good": GOOD, "lab/bad": ["x = 1", "assert x == 2, 'a wrong sum'", "1 / 0"],
    "crash": ["import ctypes, faulthandler", "faulthandler.disable()\nctypes.string_at(0)"], "leave": ["import os", "os._exit(0)"],
    "a": ["import os, sys, torch", "os.environ['LEFT'] = sys.left = torch.left = 'x'  # the largest page, and therefore the first: " + 500 * "-"],
    "b": ["import os, sys, torch", "assert 'LEFT' not in os.environ and not hasattr(sys, 'left') and not hasattr(torch, 'left')"],
    "figure": ["import matplotlib.pyplot as plt\nfrom pathlib import Path", "assert 'inline' in plt.get_backend() and Path('figure.ipynb').exists()"],
    "fit": ["from annotated_nlp.show.diagram import Diagram", "d = Diagram()\na = d.box('a')\nd.arrow(a, d.box('b', right_of=a, gap=60), 'on')\nd"],
    "unfit": ["from annotated_nlp.show.diagram import Diagram", "d = Diagram()\na = d.box('a')\nd.arrow(a, d.box('b', right_of=a, gap=14), 'far too long')\nd"],
    "tiny": ["from annotated_nlp.show.diagram import Diagram", "d = Diagram()\nd.text('small', size=5)\nd"],
    **{f"page{i}": GOOD for i in range(4)},
}
FAIL = {"lab/bad", "crash", "leave", "unfit", "tiny"}


def test_every_step_is_run_and_each_failure_counts(capfd):
    "Also of those that run beside another, whose words are shown too."
    say = lambda word, status: [sys.executable, "-c", f"print({word!r}); raise SystemExit({status})"]
    assert check._run([{"one": say("first", 1), "two": say("second", 0), "three": say("third", 2)}, {"four": say("last", 0)}]) == 2
    out = capfd.readouterr().out
    assert all(re.search(rf"^{word}$", out, re.M) for word in ("first", "second", "third", "last"))
    assert re.findall(r"^ +(\w+) +\d+ s  (ok|FAILED)$", out, re.M) == [("one", "FAILED"), ("two", "ok"), ("three", "FAILED"), ("four", "ok")]
    assert re.findall(r"^== (\w+) FAILED, and ended so:\n+== .*\n(\w+)$", out, re.M) == [("one", "first"), ("three", "third")], "at the end once more"


def run_pages(folder, names):
    "What `tools/pages.py` leaves, run on pages of these cells as `tools.away` runs it."
    for name in names:
        path = folder / "nbs" / name / f"{name.rpartition('/')[2]}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(new_notebook(cells=list(map(new_code_cell, MADE[name]))), path)
    shutil.copy(away.ROOT / "settings.ini", folder)
    command = [sys.executable, "-P", away.ROOT / "tools" / "pages.py", "nbs"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run_of_pages(tmp_path_factory):
    return run_pages(tmp_path_factory.mktemp("pages"), MADE)


def test_a_failing_page_fails_the_run(run_of_pages):
    "With its name, its cell and what went wrong, and no cell after it; the other pages run all the same."
    assert run_of_pages.returncode == 1 and f"{len(MADE) - len(FAIL)} of {len(MADE)} pages passed" in run_of_pages.stdout
    assert re.findall(r"^ {2}(\S+)$", run_of_pages.stderr.partition("These failed:")[2], re.M) == re.findall(r"^FAILED (\S+):", run_of_pages.stdout, re.M)
    assert "While Executing Cell #2" in run_of_pages.stderr and "AssertionError: a wrong sum" in run_of_pages.stderr
    assert "ZeroDivisionError" not in run_of_pages.stderr


@pytest.mark.parametrize("name", MADE)
def test_how_each_page_ends(run_of_pages, name):
    "What nbdev skips is skipped; one that takes its process along has failed; nothing of one reaches another; each draws in its folder."
    assert re.search(rf"^{'FAILED' if name in FAIL else 'passed'} {name}: [\d.]+ s, computing [\d.]+ s$", run_of_pages.stdout, re.M)


def test_an_unfit_drawing_fails_its_page(run_of_pages):
    "Where things touch, and where a phone's reader can't read it."
    assert re.search(r"touching \[.*'far too long'.*\]; its smallest text is 1\d\.\d pixels", run_of_pages.stderr)
    assert re.search(r"touching \[\]; its smallest text is [1-8]\.\d pixels", run_of_pages.stderr)


def test_a_page_that_takes_its_process_along_is_told_of(run_of_pages):
    "Also one that gives the exit status of success."
    assert run_of_pages.stderr.count("The process ended before the page did, with exit code ") == 2
    assert "with exit code 0." in run_of_pages.stderr


def test_the_ten_slowest_are_named(run_of_pages):
    slowest = re.findall(r"^ +([\d.]+) s  \S+$", run_of_pages.stdout.partition("The slowest:\n")[2], re.M)
    assert len(slowest) == 10 and slowest == sorted(slowest, key=float, reverse=True)


def test_pages_that_all_pass_pass(tmp_path):
    done = run_pages(tmp_path, ["good", "lab/good"])
    assert done.returncode == 0 and "2 of 2 pages passed" in done.stdout and not done.stderr


def test_no_page_at_all_is_a_failure(tmp_path):
    (tmp_path / "nbs").mkdir()
    assert run_pages(tmp_path, []).returncode == 1


def test_pages_are_laid_out_with_their_solutions(tmp_path):
    "Each in a folder of its own, whatever folder it stands in."
    for name in ("05_a", "lab/b", "parts/deep/c", ".ipynb_checkpoints/d"):
        path = tmp_path / "nbs" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=[new_code_cell("x = 1")]), path)
    (tmp_path / "settings.ini").write_text("", encoding="utf-8")
    away.lay_out(tmp_path / "book", tmp_path)
    found = sorted(path.relative_to(tmp_path / "book" / "nbs").as_posix() for path in (tmp_path / "book").rglob("*.ipynb"))
    assert found == ["05_a/05_a.ipynb", "lab/b/b.ipynb", "parts/deep/c/c.ipynb"]
    away.lay_out(tmp_path / "few", tmp_path, {"b"})
    assert [path.stem for path in (tmp_path / "few").rglob("*.ipynb")] == ["b"]


def test_the_card_names_the_cell_that_mixes_devices(tmp_path):
    cells = ["import torch\nfrom annotated_nlp import lab", "x = torch.ones(2, device=lab.device())", "x + torch.ones(2)", "x + torch.ones(2, device=x.device)", "1 / 0"]
    page = tmp_path / "page.ipynb"
    nbformat.write(new_notebook(cells=list(map(new_code_cell, cells))), page)
    asked = "import os, sys; from pathlib import Path; from tools import card; found, others = card.mixed(Path(sys.argv[1])); print(*found, others, sep='\\n', flush=True); os._exit(0)"
    ran = subprocess.run([sys.executable, "-c", asked, str(page)], cwd=away.ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    cell, others = ran.stdout.splitlines()
    assert cell.startswith("page, cell 2, RuntimeError") and others == "1"
