"The viewers as a reader handles them: keys, fingers, two colour schemes, several hosts, and no scripts at all."

import base64
import json
import re
import shutil
import subprocess
from html import unescape
from importlib.resources import files
from pathlib import Path

import nbformat
import pytest
import torch
from annotated_nlp.llama import Rotary
from annotated_nlp.show import viewers
from annotated_nlp.show.viewers import Candidate, Viewer, attention_viewer, choose
from annotated_nlp.show.viewers import merges_viewer, patch_viewer, search_viewer, turning_viewer
from axe_playwright_python.sync_playwright import Axe
from nbconvert import HTMLExporter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tools import web

ASSETS = Path(str(files("annotated_nlp") / "assets" / "viewers"))
NBS = Path(__file__).resolve().parents[2] / "nbs"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PAPER = {"light": "background: #ffffff; color: #212529", "dark": "background: #222222; color: #ffffff"}

torch.manual_seed(0)
WORDS = "[CLS] the post ##man rang the bell because the robin had its nest in the letter ##box . [SEP]".split()
SELF = (3 * torch.randn(6, 12, len(WORDS), len(WORDS))).softmax(-1)
GERMAN, ENGLISH = ["vier", "undzwan", "zig", "[EOS]"], ["twenty", "four"]
CROSS = (3 * torch.randn(1, 1, 4, 2)).softmax(-1)
IMAGE, LOOKS = torch.rand(1, 8, 8), (2 * torch.randn(2, 4, 17, 17)).softmax(-1)
STEPS = [
    [Candidate(("he",), -0.6, "kept"), Candidate(("it",), -0.8, "kept")],
    [Candidate(("he", "was"), -1.5, "dropped"), Candidate(("it", "rained"), -1.0, "kept"), Candidate(("he", "sang"), -1.4, "ended")],
    [Candidate(("it", "rained", "END"), -1.02, "ended"), Candidate(("it", "rained", "hard"), -3.0, "dropped")],
]

# The order in which `tokenizers` learns, and words with unknown letters, doubles and nothing to join.
READ = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3 + ["aaaa"] * 2


def learned(n=12):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(READ)], trainers.BpeTrainer(vocab_size=11 + n, show_progress=False))
    return tokenizer, [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


BPE, MERGES = learned()


# In Python


def stored(viewer, name=""):
    "The weights that a viewer's page will show."
    view = viewer.views[name]
    levels = torch.frombuffer(bytearray(base64.b64decode(view["weights"])), dtype=torch.uint8)
    shape = view["layers"], view["heads"], len(view["queries"]), len(view["keys"] or view["queries"])
    return (levels.view(shape) / 255) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_come_back(dtype):
    weights = torch.cat([torch.linspace(0, 1, 95), torch.logspace(-5, 0, 49)]).to(dtype).view(1, 1, 12, 12)
    back = stored(attention_viewer(weights.requires_grad_(), list("abcdefghijkl")))
    assert (back - weights.detach().float()).abs().max() < 0.004
    small = weights.detach().float() < 0.01
    assert (back - weights.detach().float())[small].abs().max() < 0.0005


def test_what_attention_maps_recorded():
    "A dictionary of one text's layers is the same picture as the tensor made of it."
    maps = {f"layer {i}": weights for i, weights in enumerate(SELF.split(1))}
    assert attention_viewer(maps, WORDS)._repr_html_() == attention_viewer(SELF, WORDS)._repr_html_()


def test_numbers_and_pictures_stay_small():
    assert len(attention_viewer(SELF, WORDS)._repr_html_()) < 60_000
    with pytest.raises(ValueError, match=r"1,435,933 numbers.*weights\[\[0, -1\]\]"):
        patch_viewer(torch.full((37, 1, 197, 197), 1 / 197), torch.rand(3, 224, 224), 16)


WRONG = {
    "axes": (lambda: viewers._check(SELF[0], WORDS, WORDS), "weights must be a floating-point tensor with the axes"),
    "integers": (lambda: viewers._check(SELF.long(), WORDS, WORDS), "torch.int64"),
    "queries": (lambda: attention_viewer(SELF, WORDS[:-1]), "queries must be a list of 19 strings"),
    "keys": (lambda: attention_viewer(CROSS, GERMAN, GERMAN), "keys must be a list of 2 strings"),
    "a string": (lambda: attention_viewer(CROSS, "vier", ENGLISH), "queries must be a list of 4 strings"),
    "scores": (lambda: attention_viewer(SELF * 40, WORDS), "weights must lie between 0 and 1.*after the softmax"),
    "NaN": (lambda: attention_viewer(SELF * float("nan"), WORDS), "weights must lie between 0 and 1, got nan"),
    "nothing": (lambda: attention_viewer(SELF[:0], WORDS), "weights must not be empty"),
    "two texts": (lambda: attention_viewer({"a": SELF[:2], "b": SELF[:2]}, WORDS), r"maps of 2 texts: choose one, as in torch.stack"),
    "kinds of maps": (lambda: attention_viewer({"self": SELF[:1], "cross": SELF[:1, :, :3]}, WORDS), "those of one kind of attention"),
    "no maps": (lambda: attention_viewer({}, WORDS), "those of one kind of attention, at least one"),
    "patch size": (lambda: patch_viewer(LOOKS, IMAGE, 3), "patch_size=3 must divide the image's 8 by 8 pixels"),
    "patches": (lambda: patch_viewer(LOOKS, IMAGE, 4), "queries must be a list of 17 strings"),
    "channels": (lambda: patch_viewer(LOOKS, IMAGE.repeat(2, 1, 1), 2), r"channels \(1 or 3\)"),
    "kinds": (lambda: choose({"a": attention_viewer(CROSS, GERMAN, ENGLISH), "b": search_viewer(STEPS)}), "one kind of viewer"),
    "none": (lambda: choose({}), "one kind of viewer, got none"),
    "no steps": (lambda: search_viewer([]), "steps must hold the candidates of at least one step"),
    "orphan": (lambda: search_viewer([STEPS[0], [Candidate(("she", "was"), -1.0, "kept")]]), r"steps\[1\] has tokens=\('she', 'was'\)"),
    "fate": (lambda: search_viewer([[Candidate(("he",), -1.0, "lost")]]), "fate must be one of"),
    "no word": (lambda: merges_viewer(MERGES, " "), "word must be a single word"),
    "two words": (lambda: merges_viewer(MERGES, "new west"), "word must be a single word without spaces, got 'new west'"),
    "no merges": (lambda: merges_viewer([], "low"), "merges has 0 pairs: give 1 to 5,000"),
    "a merge with a space": (lambda: merges_viewer([("e", "s"), ("e s", "t")], "low"), r"merges\[1\] must be two pieces without white space"),
    "no pairs": (lambda: turning_viewer({}), "angles must name at least one pair"),
    "an angle": (lambda: turning_viewer({"pair 0": float("nan")}), "with a finite angle"),
    "a position": (lambda: turning_viewer({"pair 0": 1.0}, key=300), r"key=300 must be a number in \[0, 200\]"),
    "score": (lambda: search_viewer([[Candidate(("he",), float("-inf"), "kept")]]), "score a finite number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_to_do(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_tree_is_laid_out_without_crossings():
    "Leaves have rows of their own, in the order of the tree; a parent stands at the middle of its children."
    nodes = search_viewer(STEPS).views[""]["nodes"]
    row = {i + 1: node[3] for i, node in enumerate(nodes)}
    parents = {node[1] for node in nodes}
    leaves = [i for i in row if i not in parents]
    assert sorted(row[i] for i in leaves) == list(range(len(leaves)))
    for parent in parents - {0}:
        below = [row[i + 1] for i, node in enumerate(nodes) if node[1] == parent]
        assert row[parent] == sum(below) / len(below)
    for depth in (1, 2, 3):  # edges of one column keep their parents' order
        edges = sorted((row[i + 1], row.get(node[1], 0)) for i, node in enumerate(nodes) if node[2] == depth)
        assert [a for _, a in edges] == sorted(a for _, a in edges)


@pytest.mark.parametrize("word", ["lowest", "aaaaa", "newer", "wow"])
def test_merges_as_the_library_replays_them(word):
    last = viewers._replayed(MERGES, word)[-1].rpartition(": ")[2].split()
    assert last == BPE.encode(word).tokens


# Scripts and style


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
@pytest.mark.parametrize("part", ["attention.js", "merges.js", "search.js", "shell.js", "turning.js", "the whole"])
def test_scripts_are_javascript(part, tmp_path):
    script = tmp_path / "script.js"
    (whole,) = re.findall("<script>(.*)</script>", search_viewer(STEPS)._repr_html_(), re.DOTALL)
    script.write_text(whole if part == "the whole" else (ASSETS / part).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["node", "--check", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("viewer", [attention_viewer(CROSS, GERMAN, ENGLISH), search_viewer(STEPS), merges_viewer(MERGES, "lowest"),
                                    turning_viewer({"pair 0": 1.0})])
def test_comments_stay_in_the_files(viewer):
    "Each file begins with one; no viewer carries one, and each carries the scripts of its kind alone."
    page = viewer._repr_html_()
    for file in ASSETS.iterdir():
        first, *code = file.read_text(encoding="utf-8").splitlines()
        assert first.startswith(("//", "/*")) and first not in page
        if file.suffix == ".js":
            carried = all(line.strip() in page for line in code if not line.startswith("//"))
            assert carried == (file.name in (f"{viewer.kind}.js", "shell.js"))
    assert not re.search(r"(?m)^\s*//|/\*", page)


# What the notebooks hold

LIVE = [file.stem for file in (NBS.parent / "annotated_nlp" / "assets" / "live").glob("*.js")]  # test_live.py has these
STORED = [
    (file.stem, output["data"])
    for file in sorted(NBS.rglob("[!.]*.ipynb")) for cell in nbformat.read(file, as_version=4).cells
    for output in cell.get("outputs", []) if "annotated-viewer" in (html := str(output.get("data", {}).get("text/html"))) and not any(f'data-kind="{kind}"' in html for kind in LIVE)
]


def test_chapters_use_the_viewers():
    assert {"02_tokenization", "04_decoding", "05_attention", "11_bert", "16_vit", "17_llama"} <= {name for name, _ in STORED}


@pytest.mark.parametrize("name, data", STORED, ids=[name for name, _ in STORED])
def test_stored_viewers_are_small_and_current(name, data):
    page = data["text/html"]
    kind, views = re.search(r'data-kind="(\w+)" data-views="([^"]*)"', page).groups()
    assert page == Viewer(kind, dict(json.loads(unescape(views))), data["text/plain"])._repr_html_(), f"stale; `make chapters NAMES={name}`"
    assert len(page.encode()) < 64_000


# In a browser


@pytest.fixture
def show(browser, tmp_path):
    "A page that shows some HTML, or viewers one below the other; everything that goes wrong on it is in `page.wrong`."
    contexts = []

    def go(*shown, scheme="light", **options):
        context = web.context(browser, color_scheme=scheme, **options)
        contexts.append(context)
        body = "\n".join(v if isinstance(v, str) else v._repr_html_() for v in shown)
        (tmp_path / "page.html").write_text(
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Viewers</title>'
            '<meta name="viewport" content="width=device-width"></head>'
            f'<body style="{PAPER[scheme]}; font-family: sans-serif; margin: 1rem"><main>{body}</main></body></html>')
        page = context.new_page()
        page.wrong = []
        page.on("console", lambda m: m.type in ("error", "warning") and page.wrong.append(m.text))
        page.on("pageerror", lambda e: page.wrong.append(str(e)))
        page.on("request", lambda r: r.url.startswith("http") and page.wrong.append(f"asked for {r.url}"))
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield go
    for context in contexts:
        context.close()


def said(page):
    return page.get_by_role("status").inner_text()


def says(page, query, weights, keys, head=""):
    "Is this what the viewer says: who looks, and the largest weight, which is stored to half a percent?"
    share = 100 * weights.max().item()
    text = re.escape(f"{head}{query} looks at {keys[weights.argmax()]} ")
    found = re.search(rf"{text}(\d+)%", said(page).replace("“", "").replace("”", ""))
    return found is not None and abs(int(found[1]) - share) < 1


@pytest.mark.browser
def test_keys_move_the_look(show):
    page = show(attention_viewer(SELF, WORDS))
    assert says(page, WORDS[0], SELF[0, 0, 0], WORDS)
    page.get_by_role("radio").first.focus()
    for key, query in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", 18), ("ArrowRight", 18), ("Home", 0)):
        page.keyboard.press(key)
        assert says(page, WORDS[query], SELF[0, 0, query], WORDS)
        assert page.evaluate("document.querySelector('.annotated-viewer').shadowRoot.activeElement.innerText.split('\\n').at(-1)") == WORDS[query]
    page.get_by_label("Layer").select_option("5")
    page.get_by_label("Head").select_option("12")
    assert says(page, "[CLS]", SELF[4, 11, 0], WORDS, head="In layer 5, head 12, ")
    heights = page.locator(".well i").evaluate_all("bars => bars.map(bar => parseFloat(bar.style.height))")
    assert torch.allclose(torch.tensor(heights) / 3, SELF[4, 11, 0], atol=0.004)
    assert page.wrong == []


@pytest.mark.browser
def test_fingers_move_the_look(show):
    page = show(choose({"24": attention_viewer(CROSS, GERMAN, ENGLISH), "post": attention_viewer(SELF, WORDS)}),
                viewport=PHONE, has_touch=True)
    page.get_by_role("radio", name="zig").tap()
    assert says(page, "zig", CROSS[0, 0, 2], ENGLISH)
    page.get_by_label("Example").select_option("post")
    page.get_by_role("radio", name="robin").tap()
    page.get_by_title("layer 3, head 7", exact=True).tap()
    assert says(page, "robin", SELF[2, 6, 9], WORDS, head="In layer 3, head 7, ")
    assert page.wrong == []


@pytest.mark.browser
def test_patches(show):
    "From the class token down into the picture, along a row, and to another head; the shade is the weight's share of the largest."
    page = show(patch_viewer(LOOKS, IMAGE, 2))
    page.get_by_role("radio").first.focus()
    for key, query in (("ArrowDown", 1), ("ArrowDown", 5), ("ArrowRight", 6), ("ArrowUp", 2)):
        page.keyboard.press(key)
        names = ["[CLS]", *(f"row {y}, column {x}" for y in range(1, 5) for x in range(1, 5))]
        assert says(page, names[query], LOOKS[0, 0, query], names)
    page.get_by_label("Layer").select_option("2")
    shades = page.locator("span.cell").evaluate_all("cells => cells.map(c => +(getComputedStyle(c).backgroundColor.match(/[\\d.]+/g)[3] ?? 1))")
    row = LOOKS[1, 0, 2]
    assert torch.allclose(torch.tensor(shades), row[1:] / row.max(), atol=0.02)
    assert page.wrong == []


@pytest.mark.browser
def test_search_steps_forward_and_back(show):
    page = show(choose({"one": search_viewer(STEPS), "two": search_viewer(STEPS[:1])}))
    visible = page.locator("svg g:not([hidden])")
    table = page.locator("tbody")
    assert visible.count() == 0 and "Steps to come: 3" in said(page)
    page.get_by_role("button", name="Forward").click()
    assert visible.count() == 2 and "grow: 2 continuations" in said(page) and "?" in table.inner_text()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert visible.count() == 5 and "Step 2 of 3, choose: 1 kept, 1 dropped, 1 ended. Best that has ended: he sang." in said(page)
    assert table.locator("tr").all_inner_texts() == ["it rained\t−1.00\tkept", "he sang\t−1.40\tended", "he was\t−1.50\tdropped"]
    assert page.locator("svg g.dropped").count() == 1 and page.locator("svg g.ended").count() == 1
    page.get_by_role("button", name="Back").click()
    assert page.locator("svg g.dropped").count() == 0 and "grow" in said(page)
    page.get_by_label("Half-step").focus()
    page.keyboard.press("End")
    assert visible.count() == 7 and "Best that has ended: it rained END." in said(page)
    page.get_by_role("button", name="Forward").click(force=True)
    assert visible.count() == 7
    page.get_by_role("combobox", name="Search").select_option("two")
    assert visible.count() == 0 and "Steps to come: 1" in said(page) and page.locator("svg g").count() == 2
    assert page.wrong == []


@pytest.mark.browser
def test_merges_on_ones_own_word(show):
    "The pieces are those of `tokenizers`, step by step to the last merge and back, by keys and by the field."
    page = show(merges_viewer(MERGES, "lowest"), viewport=PHONE)
    pieces, field = page.locator(".piece"), page.get_by_label("Your word")
    assert pieces.all_inner_texts() == BPE.encode("lowest").tokens and "No later merge applies." in said(page)
    for word in ("newer", "aaaaa", "wow", "widest lower"):
        field.fill(word)
        assert pieces.all_inner_texts() == BPE.encode(word.split()[0]).tokens
    field.fill("lowest")
    page.get_by_label("Merge", exact=True).focus()
    page.keyboard.press("Home")
    assert pieces.all_inner_texts() == list("lowest") and said(page) == "Letters: 6 pieces."
    page.get_by_role("button", name="Forward").click()
    page.keyboard.press("ArrowRight")
    (*_, line) = viewers._replayed(MERGES, "lowest")[:3]
    rank, pair, after = re.fullmatch(r"merge (\d+), (.+): (.+)", line).groups()
    assert pieces.all_inner_texts() == after.split()
    assert said(page).startswith(f"Merge {rank} of {len(MERGES)}: {pair} \u2192 {pair.replace(' + ', '')}. {len(after.split())} pieces.")
    assert page.locator(".fresh").all_inner_texts() == [pair.replace(" + ", "")]
    field.fill("")
    assert pieces.count() == 0 and said(page) == "Type a word."
    field.fill("<b>")
    assert pieces.all_inner_texts() == ["<", "b", ">"] and page.wrong == []


@pytest.mark.browser
def test_scores_are_those_of_turned_vectors(show):
    "By the book's own rotary positions; moved together, the hands turn and the scores stay; at the end of the range too."
    angles = {f"pair {f}": 10_000.0 ** (-f / 2) for f in range(2)}  # of a head of four features
    page = show(turning_viewer(angles, query=7, key=2))
    directions = torch.tensor([0.3, 1.5])
    vectors = torch.cat([directions.cos()[:, None].expand(2, 2), directions.sin()[:, None].expand(2, 2)], 1)

    def scores(query, key):
        both = [vectors[None, None, who : who + 1] for who in (0, 1)]
        turned = [Rotary(4).turn(x, x, at)[0].flatten() for x, at in zip(both, (query, key))]
        return (turned[0] * turned[1]).unflatten(0, (2, 2)).sum(0)

    def shown():
        told = page.locator(".dial > span").all_inner_texts()
        return torch.tensor([float(text.replace("\u2212", "-")) for text in told])

    hands = lambda: page.locator(".dial line").evaluate_all("all => all.map(one => one.getAttribute('x2'))")
    assert torch.allclose(shown(), scores(7, 2), atol=0.006) and "5 apart" in said(page)
    before, first = hands(), shown()
    page.get_by_role("button", name="Both on by 10").click()
    assert torch.equal(shown(), first) and all(a != b for a, b in zip(hands(), before)) and "5 apart" in said(page)
    page.get_by_label("Position of the key").focus()
    page.keyboard.press("End")
    assert torch.allclose(shown(), scores(17, 200), atol=0.006) and "183 apart" in said(page)
    page.get_by_role("button", name="Both on by 10").click()
    assert "183 apart" in said(page)  # it stops at the end
    page.get_by_role("button", name="Both back by 10").click()
    assert torch.allclose(shown(), scores(7, 190), atol=0.006) and page.wrong == []


@pytest.mark.browser
def test_several_on_a_page_do_not_meet(show):
    "The same viewer twice, another kind between them, and a page whose styles would spoil them."
    viewer = attention_viewer(CROSS, GERMAN, ENGLISH)
    spoilt = "<style>button, span { display: none !important; font-size: 90px }</style>"
    page = show(spoilt, viewer, search_viewer(STEPS), viewer, "<button id=outside>outside</button>")
    hosts = page.locator(".annotated-viewer")
    hosts.nth(2).get_by_role("radio", name="zig").click()
    assert "“zig”" in hosts.nth(2).get_by_role("status").inner_text()
    assert "“vier”" in hosts.nth(0).get_by_role("status").inner_text()
    assert page.evaluate("getComputedStyle(document.getElementById('outside')).borderRadius") == "0px"
    assert page.wrong == []


ALL = [attention_viewer(SELF, WORDS), attention_viewer(CROSS, GERMAN, ENGLISH), patch_viewer(LOOKS, IMAGE, 2), search_viewer(STEPS),
       merges_viewer(MERGES, "lowest"), turning_viewer({"pair 0": 1.0, "pair 1": 0.01})]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", PAPER)
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_readable_in_both_schemes_at_both_sizes(show, scheme, size):
    page = show(*ALL, scheme=scheme, viewport=PHONE if size == "phone" else DESK)
    for _ in range(4):
        page.get_by_role("button", name="Forward").first.click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = Axe().run(page, context="main", options=None).response
    assert [(v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"]) for v in found["violations"]] == []
    assert {"color-contrast", "button-name", "select-name"} <= {rule["id"] for rule in found["passes"]}
    assert page.wrong == []


@pytest.mark.browser
def test_without_scripts_the_main_points_remain(show):
    page = show(*ALL, java_script_enabled=False)
    text = page.locator("body").inner_text()
    assert f"post → {WORDS[SELF[0, 0, 2].argmax()]} {SELF[0, 0, 2].max():.0%}" in text
    assert "Step 2: it rained -1.00 kept; he sang -1.40 ended; he was -1.50 dropped" in text


@pytest.mark.browser
def test_as_jupyterlab_puts_it_in(show):
    "JupyterLab sets innerHTML in an element outside of the document, replaces the scripts by fresh copies, then attaches it."
    html = json.dumps(attention_viewer(CROSS, GERMAN, ENGLISH)._repr_html_()).replace("</", "<\\/")
    page = show(f"""<div id=cell></div><script>
        const output = document.createElement("div");
        output.innerHTML = {html};
        for (const script of output.querySelectorAll("script")) {{
            const copy = document.createElement("script");
            copy.textContent = script.textContent;
            script.parentNode.replaceChild(copy, script);
        }}
        document.getElementById("cell").append(output);</script>""")
    page.get_by_role("radio", name="zig").click()
    assert says(page, "zig", CROSS[0, 0, 2], ENGLISH)
    assert page.wrong == []


@pytest.mark.browser
def test_as_nbconvert_writes_it(browser, tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("viewer", outputs=[nbformat.v4.new_output(
        "execute_result", {"text/html": viewer._repr_html_(), "text/plain": repr(viewer)})]) for viewer in ALL])
    (tmp_path / "page.html").write_text(HTMLExporter().from_notebook_node(nb)[0], encoding="utf-8")
    context = web.context(browser)
    context.route("https://**", lambda route: route.abort())  # its own MathJax and require.js
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator(".annotated-viewer").count() == len(ALL) == page.get_by_role("status").count()
    page.get_by_role("radio", name="zig").click()
    assert "“zig”" in page.get_by_role("status").nth(1).inner_text()
    context.close()
