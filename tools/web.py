"A headless Chromium that sees the site as a reader does, with no network but this machine."

import gzip
import mimetypes
import os
import re
import shutil
import subprocess
import tarfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

CACHE = Path(__file__).resolve().parent.parent / ".venv" / "npm"
# Every movement of what is on the screen that the reader did not cause, as browsers measure it.
_SHIFTS = """window.shift = 0;
    new PerformanceObserver(list => list.getEntries().forEach(
        entry => { if (!entry.hadRecentInput) window.shift += entry.value })
    ).observe({type: 'layout-shift', buffered: true})"""
# Each kind of token, a few formulas, the first rows of each table, the first of very many tables and programs and a few
# links of the sidebar, which is whole on the front page, stand for the rest: axe looks at every element that is left,
# and these are tens of thousands that differ in nothing but their text (of the API page it would look at 40,000, for a
# minute and a half).
_THIN = """() => { const seen = new Set();
    document.querySelectorAll('pre code span').forEach(
        e => seen.has(e.className) ? e.replaceWith(...e.childNodes) : seen.add(e.className));
    document.querySelectorAll('main .katex').forEach((e, i) => i > 3 && e.remove());
    for (const many of ['main table', 'main div.sourceCode', 'main h3', 'main h4', 'main p', '#TOC li'])
        [...document.querySelectorAll(many)].slice(many === 'main p' ? 400 : 100).forEach(e => e.remove());
    if (location.pathname !== '/index.html')
        document.querySelectorAll('#quarto-sidebar ul').forEach(list => [...list.children].slice(4).forEach(
            e => e.querySelector('.active, ul') || e.remove()));
    document.querySelectorAll('main tbody').forEach(body => [...body.rows].slice(3).forEach(row => row.remove()));
    document.normalize() }"""
# Loaded, its letters there, and drawn twice: what the first frame asked for stands in the second. Waiting for a quiet
# network instead costs half a second a page, and on a busy machine it is sometimes not told.
_DRAWN = """() => document.fonts.ready.then(() => new Promise(done =>
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))))"""
_TEXTS = ".html", ".css", ".js", ".svg"
_NPM = re.compile(r"https://cdn\.jsdelivr\.net/npm/((?:@[^/]+/)?[^/@]+)@([^/]+)/(.+)")


def chromium() -> str | None:
    """The browser's path: $CHROMIUM, or the first that the machine has; None when it has none.

    The headless shell computes a third less than the whole browser without its window.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None) or (
        mac if Path(mac).exists() else None)


@lru_cache
def npm_package(name: str, version: str) -> Path:
    "The unpacked npm package, fetched once with npm."
    folder = CACHE / f"{name.replace('/', '-')}-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=CACHE, check=True,
                                capture_output=True, text=True).stdout.split()[-1]
        with tarfile.open(CACHE / packed) as tar:
            tar.extractall(folder, filter="data")
    return folder / "package"


def _fulfil(route) -> None:
    "Answer a request to the CDN from the npm package of the same name and version."
    name, version, path = _NPM.match(route.request.url).groups()
    file = npm_package(name, version) / path.split("?")[0]
    if not file.exists():  # the CDN makes it from the one that the package has
        file = file.with_name(file.name.replace(".min.", "."))
    route.fulfill(body=file.read_bytes(), content_type=mimetypes.guess_type(file.name)[0] or "text/plain")


@contextmanager
def browser():
    "A headless Chromium, closed at the end."
    path = chromium()
    if path is None:
        raise FileNotFoundError("no Chromium found; Debian: apt-get install chromium-headless-shell; "
                                "else set CHROMIUM to its path")
    args = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run", "--disable-quic", "--disable-dev-shm-usage"]  # a container's is small
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=args)
        yield browser
        browser.close()


def context(browser, **options):
    "A browsing context whose only outside address is the CDN of npm packages, answered from here."
    made = browser.new_context(**options)
    made.set_default_timeout(120_000)  # ms; a busy machine is slow, and a page that hangs is found all the same
    made.route(_NPM, _fulfil)
    return made


def visit(context, address: str):
    "Open a page: what it fetches stands in `page.fetched`, what goes wrong on it in `page.wrong`."
    page = context.new_page()
    page.wrong, page.fetched = [], []
    page.add_init_script(_SHIFTS)
    page.on("response", lambda r: page.fetched.append(r))
    page.on("console", lambda m: m.type == "error" and page.wrong.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: page.wrong.append(f"script: {e}"))
    page.on("requestfailed", lambda r: page.wrong.append(f"request: {r.url}"))
    page.on("response", lambda r: r.status >= 400 and page.wrong.append(f"{r.status}: {r.url}"))
    page.goto(address)
    page.evaluate(_DRAWN)
    return page


def load_figures(page) -> None:
    "Those too that wait until they are scrolled to."
    page.locator("main img").evaluate_all(
        "all => Promise.all(all.map(img => { img.loading = 'eager'; return img.decode() }))")


@lru_cache(maxsize=64)  # of the scripts and styles that all pages share
def _compressed(body: bytes) -> int:
    return len(gzip.compress(body))


def weight(page) -> int:
    "Bytes that came over the wire for this page, had the server compressed what is text."
    bodies = {r.url.split("?")[0]: r.body() for r in page.fetched if r.ok}
    return sum(_compressed(body) if url.endswith(_TEXTS) else len(body) for url, body in bodies.items())


def shift(page) -> float:
    "The layout shift so far: 0 when nothing moved while the page loaded; up to 0.1 counts as good."
    return page.evaluate("window.shift")


def violations(page, *rules: str) -> list[dict]:
    "What axe finds, over all of its rules or these; the page is of no further use afterwards."
    page.evaluate(_THIN)
    only = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
    found = Axe().run(page, options={"resultTypes": ["violations"], **only}).response
    assert len(found["passes"]) > (0 if rules else 10)  # of the rest only that it was looked at
    return found["violations"]
