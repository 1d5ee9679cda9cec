"Build the site from stored outputs, check its links, serve it: `python -m tools.site build|serve`."

import argparse
import base64
import http.server
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
_WEB_FONTS = re.compile(r'@import ?(?:url\([^)]*fonts\.googleapis[^)]*\)|"[^"]*fonts\.googleapis[^"]*");?')
_CAPTION = re.compile(r"<figcaption>.*?</figcaption>", re.S)
_EMPHASIS = re.compile(r"\*([^*\s](?:[^*]*[^*\s])?)\*")  # smalldocs shows its stars
# Quarto asks another host for them on every page that has output, and nothing here needs them.
_UNUSED = re.compile(
    r'<script src="https://cdn\.jsdelivr\.net/npm/(?:jquery|requirejs)@[^>]*></script>\s*'
    r"|<script type=\"application/javascript\">define\('jquery'[^<]*</script>\s*"
)
# KaTeX 0.16.11 as npm has it, its fonts in one format: formulas are set without a network.
KATEX, _KATEX_ELSEWHERE = ROOT / "tools" / "katex", "https://cdn.jsdelivr.net/npm/katex@0.16.11/dist/"
_VIEWER = re.compile(r'<div class="annotated-viewer" data-kind="\w+".*?(<pre>.*?</pre>).*?</script>', re.DOTALL)
SITE, PROC = ROOT / "_site", ROOT / "_proc"
# Both engines' search boxes ask this for the sections that answer a query; to both, the book's index is given besides.
SEARCH = ROOT / "tools" / "search"
_OTHERS_SETTING = re.compile(r"warning: (?:unknown key \S+|format\.html\.\S+ is ignored)$")
SMALLDOCS = [sys.executable, "-m", "smalldocs.cli", "render", str(PROC)]


def _forget_removed() -> None:
    "nbdev's cache keeps pages whose notebooks are gone, and pages made by older processors: start over then."
    procs = [ROOT / "tools" / "procs.py", ROOT / "settings.ini"]
    if PROC.exists() and max(p.stat().st_mtime for p in procs) > PROC.stat().st_mtime:
        shutil.rmtree(PROC)
    for page in PROC.rglob("*.ipynb"):
        if not (get_config().nbs_path / page.relative_to(PROC)).exists():
            page.unlink()


def _with_sizes(page: Path) -> str:
    """The page, its pictures with width and height, so that what stands below one doesn't jump when it arrives.

    A figure that the page carries within itself, though it lies beside it as a file, becomes a link to that file:
    a third smaller, and fetched only when the reader comes near.
    """
    beside = {f.read_bytes(): f for f in page.with_name(f"{page.stem}_files").glob("*.png")}

    def place(tag: re.Match) -> str:
        img, source = tag[0], re.search(r'src="([^"]+)"', tag[0])[1]
        if source.startswith("data:image/png;base64,"):
            picture = base64.b64decode(source.split(",", 1)[1])
            if picture in beside:
                link = beside[picture].relative_to(page.parent).as_posix()
                img = img.replace(f'src="{source}"', f'src="{link}" loading="lazy"')
        elif urlsplit(source).scheme or not (page.parent / unquote(source)).exists():
            return img
        else:
            picture = (page.parent / unquote(source)).read_bytes()
        if picture.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", picture[16:24])
            # A drawing (`show.diagram.Diagram`) has 220 pixels to an inch, 8661 to a metre, where a chart has 110.
            if b"pHYs" + struct.pack(">II", 8661, 8661) in picture[:200]:
                width, height = width // 2, height // 2
        elif svg := re.match(rb'<svg[^>]* width="(\d+)" height="(\d+)"', picture):
            width, height = map(int, svg.groups())
        else:
            return img
        return f'<img width="{width}" height="{height}"{img[4:]}'

    return re.sub(r"<img (?![^>]*\b(?:width|height)=)[^>]*>", place, page.read_text(encoding="utf-8"))


def _lighten(picture: Path) -> None:
    "The same pixels in an eighth less: a figure has an alpha channel, and nothing of it shows through."
    with Image.open(picture) as image:
        if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255):
            image.convert("RGB").save(picture, compress_level=9, dpi=image.info.get("dpi"))


def _smalldocs() -> None:
    "Render with smalldocs; what it says of settings that Quarto alone reads, or that hold for it too, helps nobody."
    done = subprocess.run(SMALLDOCS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    said = [line for line in done.stdout.splitlines(True) if not _OTHERS_SETTING.match(line)]
    print(*said, sep="", end="", flush=True)
    done.check_returncode()


def _copies_for_models() -> None:
    """The text of each page for language models, by smalldocs: in Quarto's, formulas lose their signs.

    Its pictures are those of the page, where they have other names. Its list of sections for the search has the smaller
    ones too; from Quarto's come the titles of the sidebar's sections above a page.
    """
    _smalldocs()
    shutil.copy(PROC / "_site" / "llms.txt", SITE)
    crumbs = {each["href"].partition("#")[0]: each.get("crumbs", []) for each in _sections(SITE)}
    sections = [each | {"crumbs": crumbs.get(each["href"].partition("#")[0], [])} for each in _sections(PROC / "_site")]
    (SITE / "search.json").write_text(json.dumps(sections, ensure_ascii=False), encoding="utf-8")
    for copy in (PROC / "_site").rglob("*.llms.md"):
        page, text = SITE / copy.relative_to(PROC / "_site"), copy.read_text(encoding="utf-8")
        files = page.with_name(page.name.removesuffix(".llms.md") + "_files")
        beside = {file.read_bytes(): file for file in files.rglob("*.png")}
        for picture in copy.with_name(files.name).glob("*.png"):
            if same := beside.get(picture.read_bytes()):
                text = text.replace(f"({files.name}/{picture.name})", f"({same.relative_to(page.parent).as_posix()})")
            else:
                files.mkdir(exist_ok=True)
                shutil.copy(picture, files)
        page.write_text(text, encoding="utf-8")


def _sections(site: Path) -> list[dict]:
    "What the search of a site knows: each section of each page."
    return json.loads((site / "search.json").read_text(encoding="utf-8"))


def _search() -> None:
    "Let the search rank as `tools/search/fuse.js` says, and give each section the words that the index has for it."
    terms = yaml.safe_load((SEARCH / "index.yml").read_text(encoding="utf-8"))
    sections = _sections(SITE)
    for section in sections:
        if words := terms.pop(section["href"].replace(".html", "").removesuffix("#"), None):
            section["terms"] = words
    if terms:
        raise ValueError(f"tools/search/index.yml names what the site doesn't have: {', '.join(terms)}")
    (SITE / "search.json").write_text(json.dumps(sections, ensure_ascii=False), encoding="utf-8")
    scripts = [(SEARCH / name).read_text(encoding="utf-8") for name in ("minisearch.js", "fuse.js")]
    for engine_s in SITE.glob("site_libs/*/fuse.min.js"):
        engine_s.write_text("\n".join(scripts), encoding="utf-8")


def build() -> Path:
    "Process the notebooks with nbdev and render them, with Quarto where it is installed, else with smalldocs."
    os.chdir(ROOT)
    _forget_removed()
    proc_nbs(n_workers=0)
    quarto = shutil.which("quarto")
    if quarto:
        subprocess.run(["quarto", "render", str(PROC), "--no-execute"], check=True)
    else:
        _smalldocs()
    if SITE.exists():
        shutil.rmtree(SITE)
    shutil.copytree(PROC / "_site", SITE)
    if quarto:
        _copies_for_models()
    shutil.copytree(KATEX, SITE / "site_libs" / "katex")
    _search()
    # The themes ask another host for their fonts; the reader's own do as well, offline too.
    for sheet in SITE.rglob("*.css"):
        css = sheet.read_text(encoding="utf-8")
        sheet.write_text(_WEB_FONTS.sub("", css), encoding="utf-8")
    # In the text for language models a viewer is its text, without data and script.
    for page in SITE.rglob("*.llms.md"):
        page.write_text(_VIEWER.sub(r"\1", page.read_text(encoding="utf-8")), encoding="utf-8")
    for page in SITE.rglob("*.html"):
        text = _CAPTION.sub(lambda caption: _EMPHASIS.sub(r"<em>\1</em>", caption[0]), _with_sizes(page))
        katex = "../" * (len(page.relative_to(SITE).parts) - 1) + "site_libs/katex/"
        page.write_text(_UNUSED.sub("", text).replace(_KATEX_ELSEWHERE, katex), encoding="utf-8")
    for picture in SITE.rglob("*_files/**/*.png"):
        _lighten(picture)
    return SITE


class _Links(HTMLParser):
    "The ids a page offers and the addresses it points to."

    def __init__(self, page: Path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        self.links += [attrs[key] for key in ("href", "src") if attrs.get(key)]


def broken_links(site: Path = SITE) -> list[str]:
    "Internal addresses that lead nowhere: a missing file, or a missing anchor in a page that is there."
    site = site.resolve()
    pages = {page: _Links(page) for page in site.rglob("*.html")}
    found = []
    for page, parsed in pages.items():
        for link in parsed.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("", "#"):
                continue
            target = page
            if parts.path:
                base = site if parts.path.startswith("/") else page.parent
                target = (base / unquote(parts.path).lstrip("/")).resolve()
                if target.is_dir():
                    target /= "index.html"
            if not target.exists() or not target.is_relative_to(site):
                found.append(f"{page.relative_to(site)}: {link} (no such file)")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{page.relative_to(site)}: {link} (no such anchor)")
    return sorted(set(found))


class Handler(http.server.SimpleHTTPRequestHandler):
    "Serves the built site and keeps quiet about it."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, directory=str(SITE), **kwargs)

    def log_message(self, *args):
        pass


@contextmanager
def served() -> Iterator[str]:
    "The built site at a free port, within the block; gives its address."
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def serve(port: int) -> None:
    "Serve the built site on this machine until interrupted; a taken port gives way to the next free one."
    for candidate in range(port, port + 50):
        try:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", candidate), Handler)
            break
        except OSError:
            continue
    else:
        sys.exit(f"no free port between {port} and {port + 49}; choose one with `make book PORT=...`")
    print(f"\nThe book is at http://127.0.0.1:{candidate}/   (stop with Ctrl-C)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["build", "serve"])
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.what == "serve":
        serve(args.port)
        return 0
    started = time.perf_counter()
    build()
    broken = broken_links()
    for line in broken:
        print("broken link:", line, file=sys.stderr)
    pages, seconds = len(list(SITE.rglob("*.html"))), time.perf_counter() - started
    print(f"{pages} pages in {seconds:.0f} s, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
