"The built site as a reader meets it: in a browser, at a desk and on a phone, by day and by night."

import io
import re
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml
from nbdev.config import get_config
from PIL import Image

from tools import site, web

pytestmark = pytest.mark.browser

if not site.SITE.exists():
    pytest.fail("no built site; run `make book SERVE=0` first", pytrace=False)
PAGES = sorted(page.relative_to(site.SITE).as_posix() for page in site.SITE.rglob("*.html"))
CHAPTERS = [page for page in PAGES if page[0].isdigit()]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
WEIGHT = 1_500_000  # bytes of a page with all that it fetches, texts compressed as servers send them


@pytest.fixture(scope="module")
def address():
    with site.served() as it:
        yield it


@pytest.fixture
def visit(browser, address):
    "Open a page and give it, with everything that went wrong on it in `page.wrong`."
    contexts = []

    def go(name, **options):
        context = web.context(browser, **options)
        contexts.append(context)
        return web.visit(context, f"{address}/{name}")

    yield go
    for context in contexts:
        context.close()


@pytest.fixture(scope="module", params=PAGES)
def opened(request, browser, address):
    "One page after the other, by day at a desk: its name and itself, opened once for all tests that ask for it."
    context = web.context(browser, viewport=DESK, color_scheme="light")
    yield request.param, web.visit(context, f"{address}/{request.param}")
    context.close()


def hindrances(page, *rules):
    "What axe finds serious or critical; the page is of no use to another test afterwards."
    return [(v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"]) for v in web.violations(page, *rules)
            if v["impact"] in ("serious", "critical")]


def figures_suit(page, dark):
    "The first figure goes dark with the page and keeps its range."
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(",")[:3])) < 200) == dark, f"page on {paper}"
    figure = page.locator("main figure img:not(.as-is)").first
    figure.scroll_into_view_if_needed()
    alone = figure.screenshot(style="#quarto-header { display: none !important }")  # a tall figure reaches under the bar
    pixels = np.asarray(Image.open(io.BytesIO(alone)).convert("L")) / 255
    background = np.median(pixels[:4])  # the paper above what is drawn
    assert background < 0.3 if dark else background > 0.9
    assert np.abs(pixels - background).max() > 0.5


def test_every_chapter_is_a_page():
    notebooks = {f.stem + ".html" for f in (site.ROOT / "nbs").glob("[0-9]*.ipynb")}
    assert notebooks and notebooks == set(CHAPTERS)


def test_page(opened, address):
    """Opens cleanly and light, stands still while it loads, shows mathematics as mathematics, asks no other host for it,
    and describes every figure to those who can't see it."""
    _, page = opened
    formulas = page.locator("main .math").count()
    if formulas:
        page.wait_for_selector("main .katex, main mjx-container")
    assert page.locator("main .katex, main mjx-container").count() == formulas
    assert page.locator(".katex-error, mjx-merror").count() == 0
    prose = page.evaluate("""() => { const copy = document.querySelector('main').cloneNode(true);
        copy.querySelectorAll('pre, code, script, style, .katex, mjx-container, .dataframe').forEach(e => e.remove());
        return copy.textContent }""")
    assert "$$" not in prose and "\\(" not in prose and "\\frac" not in prose
    assert not [text for text in page.locator("main figcaption").all_inner_texts() if "*" in text or "$$" in text]
    figures = page.locator("main img")
    missing = [i for i in range(figures.count()) if len((figures.nth(i).get_attribute("alt") or "").strip()) < 10]
    assert not missing, f"images without alternative text: {missing}"
    web.load_figures(page)
    assert figures.evaluate_all("all => all.every(img => img.naturalWidth && img.getAttribute('width'))")
    assert web.shift(page) < 0.05, "the page jumps while it loads"
    assert web.weight(page) < WEIGHT
    assert all(response.url.startswith(address) for response in page.fetched), "something comes from elsewhere"
    assert page.wrong == []


def test_phone(opened):
    "A phone's page never scrolls sideways; wide code and tables scroll by themselves."
    _, page = opened
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(DESK)
    assert page.wrong == []


def test_readable(opened):
    "Text and code keep the contrast that WCAG asks of text, figures keep their range, and a screen reader finds its way."
    name, page = opened
    if name in CHAPTERS:
        figures_suit(page, dark=False)
    assert hindrances(page) == []  # the page's last test


@pytest.mark.parametrize("name", CHAPTERS)
def test_readable_by_night(visit, name):
    "The same page in other colours: of axe's rules those of contrast alone can find something new."
    page = visit(name, viewport=DESK, color_scheme="dark")
    figures_suit(page, dark=True)
    assert hindrances(page, "color-contrast", "link-in-text-block") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "05_attention.html", "glossary.html"])
def test_phone_is_accessible(visit, name, scheme):
    assert hindrances(visit(name, viewport=PHONE, color_scheme=scheme)) == []


def test_folded_solution_opens_by_key(visit):
    page = visit("05_attention.html", viewport=DESK)
    header = page.locator(".callout-header[data-bs-toggle]").first
    header.focus()
    header.press("Enter")
    page.wait_for_selector(".callout-collapse.show")
    assert header.get_attribute("aria-expanded") == "true"


@pytest.mark.parametrize("view", [DESK, PHONE])
def test_a_figure_opens_large(visit, view):
    "By a click or by the keyboard, larger than on the page; the page itself stays as it was."
    page = visit("06_transformer.html", viewport=view)
    figure, dialog = page.locator("main figure img").first, page.locator("dialog.large-figure")
    small = figure.bounding_box()["width"]
    figure.click()
    assert dialog.locator("img").bounding_box()["width"] > 1.5 * small
    assert dialog.locator("img").get_attribute("alt") == figure.get_attribute("alt")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    figure.press("Enter")
    dialog.click()
    assert not dialog.is_visible() and page.wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= view["width"]


@pytest.mark.parametrize("name", PAGES)
def test_head_says_what_the_page_is(name):
    "What a search engine and a message with a link show: title, description, picture."
    head = (site.SITE / name).read_text(encoding="utf-8").split("</head>")[0]
    told = dict(re.findall(r'<meta (?:property|name)="(.+?)" content="(.+?)"', head))
    assert len(told["description"]) > 20 and told["og:description"] == told["description"]
    assert told["og:title"] and told["twitter:card"] == "summary_large_image"
    address = yaml.safe_load((site.ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["site-url"]
    for picture in (told["og:image"], told["twitter:image"]):
        with Image.open(site.SITE / picture.removeprefix(address + "/")) as preview:
            assert preview.size == (1200, 630)


@pytest.mark.parametrize("name", PAGES)
def test_code_can_be_copied_and_its_source_reached(name):
    text = (site.SITE / name).read_text(encoding="utf-8")
    assert text.count('class="sourceCode python') == 0 or "code-copy-button" in text
    cfg = get_config()
    source = f"{cfg.user}/{cfg.repo}/{{}}/{cfg.branch}/nbs/{name.removesuffix('.html')}.ipynb"
    # smalldocs opens GitHub's own editor, Quarto the one at github.dev
    assert f"github.com/{source.format('edit')}" in text or f"github.dev/{source.format('blob')}" in text
    assert f"https://github.com/{source.format('blob')}" in text
    assert f"colab.research.google.com/github/{source.format('blob')}" in text


def test_llms_txt_lists_every_page():
    "For language models: one list, and each page as Markdown, complete to its last heading."
    listed = (site.SITE / "llms.txt").read_text(encoding="utf-8")
    for name in PAGES:
        copy = name.removesuffix(".html") + ".llms.md"
        assert f"/{copy})" in listed
        assert (site.SITE / copy).read_text(encoding="utf-8").startswith("# ")
    for name in CHAPTERS:
        text = (site.SITE / (name.removesuffix(".html") + ".llms.md")).read_text(encoding="utf-8")
        assert "\n## References" in text and "$$" in text


@pytest.mark.parametrize("name", ["02_tokenization.html", "04_decoding.html", "05_attention.html", "11_bert.html", "16_vit.html", "17_llama.html", "show/viewers.html"])
def test_viewers_come_alive(visit, name):
    "The engine passes their scripts through: each stands in its shadow root and has something to handle."
    page = visit(name, viewport=PHONE)
    hosts = page.locator(".annotated-viewer")
    assert hosts.count() > 0
    for host in hosts.all():
        assert host.get_by_role("radio").or_(host.get_by_role("button")).count() > 1
    assert not [p.name for p in site.SITE.rglob("*.llms.md") if 'data-views="[' in p.read_text(encoding="utf-8")]
    assert page.wrong == []


QUERIES = yaml.safe_load((site.ROOT / "tests" / "book" / "queries.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("asker", QUERIES)
def test_search_answers_like_an_index(visit, asker):
    "Of a query's first three hits, one is the section that a chapter has for it."
    page = visit("how_to_read.html", viewport=DESK)
    page.wait_for_function("typeof Fuse === 'function'")
    hits = page.evaluate("""async queries => {
        const search = new Fuse([]);
        for (const section of await (await fetch('search.json')).json()) search.add(section);
        return queries.map(query => search.search(query, { limit: 3 }).map(hit => hit.item.href));
    }""", list(QUERIES[asker]))
    missed = {query: found for (query, right), found in zip(QUERIES[asker].items(), hits, strict=True)
              if not {href.replace(".html", "").removeprefix("./") for href in found} & set(right)}
    assert not missed


def test_search_box_shows_what_was_found(visit):
    page = visit("index.html", viewport=DESK)
    page.locator("#quarto-search").locator("input, button").first.click()  # Quarto's button opens its box
    page.keyboard.type("kv cache", delay=20)
    page.wait_for_function("""() => [...document.querySelectorAll('a')].some(
        a => a.href.includes('05_attention.html') && a.offsetParent && !a.closest('#quarto-sidebar, main'))""")
    assert page.wrong == []


def test_sidebar_reaches_every_page(visit):
    page = visit("index.html", viewport=DESK)
    links = page.locator("#quarto-sidebar a[href]").evaluate_all("links => links.map(a => a.href)")
    paths = {unquote(urlsplit(link).path).lstrip("/") for link in links}
    reached = {path + "index.html" if path.endswith("/") or not path else path for path in paths}  # Quarto's leave it out
    assert set(PAGES) - {"404.html"} <= reached


def open_in(sidebar):
    "The titles of the sections of the sidebar that are open."
    return sidebar.locator(".sidebar-item-section:has(> ul.show) > .sidebar-item-container").all_inner_texts()


@pytest.mark.parametrize("name, sections", [("05_attention.html", []), ("lab/sinks.html", ["Language models"]),
                                            ("show/chat.html", ["Figures and live models"])])
def test_sidebar_opens_at_the_page(visit, name, sections):
    "The chapters are open, of the laboratory and the appendix only the group of this page; it stands in view."
    page = visit(name, viewport=DESK)
    sidebar = page.locator("#quarto-sidebar")
    book = ["I Sequences", "II Attention", "III Pretraining", "IV What a pretrained model is good for", "Laboratory", "Appendix"]
    assert sorted(text.strip() for text in open_in(sidebar)) == sorted(book + sections)
    box = sidebar.locator(".sidebar-link.active").bounding_box()
    assert 0 <= box["y"] and box["y"] + box["height"] <= DESK["height"] and page.evaluate("scrollY") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_front_page_says_in_one_screen_what_the_book_is(visit, scheme):
    "Three doors, two commands, a drawing, a live model and a result, side by side; no model is fetched before a click."
    page = visit("index.html", viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    fetched = []
    page.on("request", lambda request: fetched.append(urlsplit(request.url).path))
    parts = page.locator(".front .doors li, .front .intro pre, .front .cell:has(figure), .front .annotated-viewer")
    assert parts.count() == 3 + 1 + 2 + 1
    boxes = [part.bounding_box() for part in parts.all()]
    assert all(box["y"] + box["height"] <= 805 and box["x"] + box["width"] <= 1280 for box in boxes[:4])
    figures = page.locator(".front figure img").evaluate_all("all => all.map(img => img.getBoundingClientRect().bottom)")
    viewer = page.locator(".front .annotated-viewer").bounding_box()
    assert len(figures) == 2 and max(*figures, viewer["y"] + viewer["height"]) <= 800
    doors = page.locator(".front .doors li").all_inner_texts()
    assert [door.split(":")[0] for door in doors] == ["Read", "Run", "Import"]
    assert page.locator(".front .intro pre").inner_text().split("\n")[0].startswith("make book")
    assert not [path for path in fetched if "/models/" in path] and page.wrong == []
    page.locator(".front .annotated-viewer").get_by_role("button", name="Fill").click()
    page.wait_for_timeout(500)
    assert [path for path in fetched if path.endswith("/models/reviews-bert.json")]


@pytest.mark.parametrize("width", [390, 720, 1000, 1200, 1440, 1920])
def test_the_front_page_keeps_within_the_window(visit, width):
    page = visit("index.html", viewport={"width": width, "height": 800}, color_scheme="light")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".front").evaluate("front => front.getBoundingClientRect().right") <= width


def test_links_lead_somewhere():
    assert site.broken_links() == []
