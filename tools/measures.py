"""What each page of the built site asks of its reader's line, patience and tools: `python -m tools.measures` stores it.

Beside the laboratory's results, for the page that shows them all. Chromium, an empty cache, no network between.
"""

import sys
import time
from collections import Counter

from annotated_nlp import lab
from tqdm import tqdm

from . import site, web

SETTINGS = dict(width=1280, height=900, colours="light", figures="all of them, not only those on the screen")
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def measure(browser, address: str, name: str) -> dict:
    "Bytes (texts compressed), requests, layout shift, milliseconds to the first text, axe's findings by their weight."
    viewport = dict(width=SETTINGS["width"], height=SETTINGS["height"])
    context = web.context(browser, viewport=viewport, color_scheme=SETTINGS["colours"])
    page = web.visit(context, f"{address}/{name}")
    paint = page.evaluate(PAINT)
    web.load_figures(page)
    row = dict(page=name, bytes=web.weight(page), requests=len(page.fetched), shift=round(web.shift(page), 4),
               first_paint_ms=round(paint), axe=dict(Counter(v["impact"] for v in web.violations(page))))
    context.close()
    return row


def main() -> int:
    if not site.SITE.exists():
        sys.exit("no built site; run `make book SERVE=0` first")
    names = sorted(page.relative_to(site.SITE).as_posix() for page in site.SITE.rglob("*.html"))
    started = time.perf_counter()
    with site.served() as address, web.browser() as browser:
        rows = [measure(browser, address, name) for name in tqdm(names, leave=False)]
        settings = SETTINGS | dict(chromium=browser.version)
    found = dict(settings=settings, numbers=dict(rows=rows), seconds=time.perf_counter() - started)
    print(lab.store(lab.new_record("site", command="make measures", **found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
