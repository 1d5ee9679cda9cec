"The built site as a reader meets it: in a browser, at a desk and on a phone, by day and by night."

import http.server
import io
import os
import threading
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

from tools import site, web

pytestmark = pytest.mark.browser

if not site.SITE.exists():
    pytest.fail("no built site; run `make book SERVE=0` first", pytrace=False)
PAGES = sorted(page.relative_to(site.SITE).as_posix() for page in site.SITE.rglob("*.html"))
CHAPTERS = [page for page in PAGES if page[0].isdigit()]
AXE = "4.14.1"  # axe-core, the accessibility checker
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), site.Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if web.chromium() is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine; the browser tests run in continuous integration")
    with web.browser() as it:
        yield it


@pytest.fixture
def visit(browser, address):
    "Open a page and give it, with everything that went wrong on it in `page.wrong`."
    contexts = []

    def go(name, **options):
        context = web.context(browser, **options)
        contexts.append(context)
        page = context.new_page()
        page.wrong = []
        page.set_default_timeout(5000)
        page.on("console", lambda m: m.type == "error" and page.wrong.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: page.wrong.append(f"script: {e}"))
        page.on("requestfailed", lambda r: page.wrong.append(f"request: {r.url}"))
        page.on("response", lambda r: r.status >= 400 and page.wrong.append(f"{r.status}: {r.url}"))
        page.goto(f"{address}/{name}", wait_until="networkidle")
        return page

    yield go
    for context in contexts:
        context.close()


def test_every_chapter_is_a_page():
    notebooks = {f.stem + ".html" for f in (site.ROOT / "nbs").glob("[0-9]*.ipynb")}
    assert notebooks and notebooks == set(CHAPTERS)


@pytest.mark.parametrize("name", PAGES)
def test_page(visit, name):
    "Opens cleanly, shows mathematics as mathematics, and describes every figure to those who can't see it."
    page = visit(name, viewport=DESK, color_scheme="light")
    formulas = page.locator("main .math").count()
    if formulas:
        page.wait_for_selector("main .katex, main mjx-container")
    assert page.locator("main .katex, main mjx-container").count() == formulas
    assert page.locator(".katex-error, mjx-merror").count() == 0
    prose = page.evaluate("""() => { const copy = document.querySelector('main').cloneNode(true);
        copy.querySelectorAll('pre, code, script, style, .katex, mjx-container, .dataframe').forEach(e => e.remove());
        return copy.textContent }""")
    assert "$$" not in prose and "\\(" not in prose and "\\frac" not in prose
    figures = page.locator("main img")
    missing = [i for i in range(figures.count()) if len((figures.nth(i).get_attribute("alt") or "").strip()) < 10]
    assert not missing, f"images without alternative text: {missing}"
    assert page.wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_phone(visit, name):
    "A phone's page never scrolls sideways; wide code and tables scroll by themselves."
    page = visit(name, viewport=PHONE, color_scheme="light", device_scale_factor=2)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", CHAPTERS)
def test_readable(visit, name, scheme):
    "Text and code keep the contrast that WCAG asks of text; figures go dark with the page and keep their range."
    page = visit(name, viewport=DESK, color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(",")[:3])) < 200) == (scheme == "dark"), f"{scheme} page on {paper}"
    page.add_script_tag(path=web.npm_package("axe-core", AXE) / "axe.min.js")
    found = page.evaluate("axe.run('main', {runOnly: ['color-contrast', 'image-alt', 'link-name']})")
    assert [(v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"]) for v in found["violations"]] == []
    assert len(found["passes"]) > 0
    figure = page.locator("main figure img:not(.as-is)").first
    figure.scroll_into_view_if_needed()
    pixels = np.asarray(Image.open(io.BytesIO(figure.screenshot())).convert("L")) / 255
    background = np.median(pixels[:4])  # the paper above what is drawn
    assert background < 0.3 if scheme == "dark" else background > 0.9
    assert np.abs(pixels - background).max() > 0.5


@pytest.mark.parametrize("name", ["04_decoding.html", "05_attention.html", "09_bert.html", "12_vit.html", "viewers.html"])
def test_viewers_come_alive(visit, name):
    "The engine passes their scripts through: each stands in its shadow root and has something to handle."
    page = visit(name, viewport=PHONE)
    hosts = page.locator(".annotated-viewer")
    assert hosts.count() > 0
    for host in hosts.all():
        assert host.get_by_role("radio").or_(host.get_by_role("button")).count() > 1
    assert not [p.name for p in site.SITE.rglob("*.llms.md") if 'data-views="[' in p.read_text(encoding="utf-8")]
    assert page.wrong == []


def test_search_finds_beam_search(visit):
    page = visit("index.html", viewport=DESK)
    box = page.locator("input[type=search], #quarto-search input").first
    box.click()
    box.press_sequentially("beam search", delay=20)
    page.wait_for_function("""() => [...document.querySelectorAll('a')].some(
        a => a.href.includes('04_decoding.html') && a.offsetParent && !a.closest('#quarto-sidebar, main'))""")


def test_sidebar_reaches_every_page(visit):
    page = visit("index.html", viewport=DESK)
    links = page.locator("#quarto-sidebar a[href]").evaluate_all("links => links.map(a => a.href)")
    reached = {unquote(urlsplit(link).path).lstrip("/") or "index.html" for link in links}
    assert set(PAGES) - {"404.html"} <= reached


def test_links_lead_somewhere():
    assert site.broken_links() == []
