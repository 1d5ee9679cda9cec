"A headless Chromium that sees the site as a reader does, with no network but this machine."

import mimetypes
import os
import re
import shutil
import subprocess
import tarfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from playwright.sync_api import sync_playwright

CACHE = Path(__file__).resolve().parent.parent / ".venv" / "npm"
_NPM = re.compile(r"https://cdn\.jsdelivr\.net/npm/((?:@[^/]+/)?[^/@]+)@([^/]+)/(.+)")


def chromium() -> str | None:
    "The browser's path: $CHROMIUM, or the first that the machine has; None when it has none."
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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


def axe() -> Path:
    "The script of axe-core, the accessibility checker."
    return npm_package("axe-core", "4.14.1") / "axe.min.js"


def _fulfil(route) -> None:
    "Answer a request to the CDN from the npm package of the same name and version."
    name, version, path = _NPM.match(route.request.url).groups()
    file = npm_package(name, version) / path.split("?")[0]
    route.fulfill(body=file.read_bytes(), content_type=mimetypes.guess_type(file.name)[0] or "text/plain")


@contextmanager
def browser():
    "A headless Chromium, closed at the end."
    path = chromium()
    if path is None:
        raise FileNotFoundError("no Chromium found; Debian: apt-get install chromium; else set CHROMIUM to its path")
    args = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run", "--disable-quic"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=args)
        yield browser
        browser.close()


def context(browser, **options):
    "A browsing context whose only outside address is the CDN of npm packages, answered from here."
    made = browser.new_context(**options)
    made.route(_NPM, _fulfil)
    return made
