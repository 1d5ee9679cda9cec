"""The loaders against references that nobody here wrote, with random input, and with every kind of bad input."""

import ast
import builtins
import gettext
import os
import platform
import random
import re
import struct
import subprocess
import sys
import sysconfig
import zlib
from collections import Counter
from pathlib import Path

import num2words
import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import says

from annotated_nlp.corpora import loaders
from annotated_nlp.corpora.loaders import SPLITS, Corpus, Entailment, Image, Labelled
from annotated_nlp.corpora.loaders import Pair, Question, Tagged, docstring_names
from annotated_nlp.corpora.loaders import handwritten_digits, hub, interface_strings
from annotated_nlp.corpora.loaders import number_words, python_code, python_prose
from annotated_nlp.corpora.loaders import raw_messages

LOADERS = {
    "number_words": lambda **kw: number_words(per_length=30, **kw),
    "interface_strings": lambda **kw: interface_strings("fr", **kw),
    "python_prose": python_prose,
    "python_code": python_code,
    "docstring_names": docstring_names,
    "handwritten_digits": handwritten_digits,
}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)


def source_of(row):
    """What must not stand in two splits: letters, digits and underscores in lower case."""
    if isinstance(row, Image):
        return row.image.numpy().tobytes()
    text = row if isinstance(row, str) else row[0]
    return "".join(c for c in text.casefold() if c.isalnum() or c == "_")


def missing(monkeypatch, *modules):
    """Let `import` fail for these modules, as on a machine that lacks them."""
    real = loaders.import_module

    def import_module(name):
        if name.split(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(loaders, "import_module", import_module)


# corpora ------------------------------------------------------------------------------------------------------------

@every_loader
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_splits_share_no_source(load, seed):
    sources = [{source_of(row) for row in load(split=split, seed=seed)} for split in SPLITS]
    assert all(sources)
    assert not (sources[0] & sources[1] or sources[0] & sources[2] or sources[1] & sources[2])


@every_loader
def test_no_source_twice(load):
    sources = Counter(source_of(row) for split in SPLITS for row in load(split=split))
    assert max(sources.values()) == 1


@every_loader
def test_shares_are_80_10_10(load):
    sizes = [len(load(split=split)) for split in SPLITS]
    if load is LOADERS["number_words"]:  # as many as asked for of each length, where there are so many
        assert sizes[0] == 8 + 8 * 30 and sizes[1] == sizes[2] == 1 + 9 + 7 * 30
    else:
        for size, share in zip(sizes, (0.8, 0.1, 0.1), strict=True):
            spread = 4 * (share * (1 - share) / sum(sizes)) ** 0.5
            assert abs(size / sum(sizes) - share) < spread


@every_loader
def test_seeds_deal_differently(load):
    assert list(map(source_of, load(seed=0))) != list(map(source_of, load(seed=1)))


@every_loader
def test_corpus_manners(load):
    corpus = load(split="valid")
    assert isinstance(corpus, Corpus) and corpus.split == "valid"
    assert corpus.licence and any(c.isdigit() for c in corpus.origin), "origin names a version"
    assert f"{len(corpus):,} rows" in repr(corpus) and corpus.licence in repr(corpus)
    assert "<table class='dataframe'>" in corpus._repr_html_()
    part = corpus[2:5]
    assert isinstance(part, Corpus) and part.origin == corpus.origin and len(part) == 3
    assert part[0] is corpus[2] and corpus[-1] is list(corpus)[-1]
    with pytest.raises(AttributeError):
        corpus.name = "other"
    with pytest.raises(TypeError):
        corpus[0] = corpus[1]


@every_loader
def test_unknown_split_lists_the_valid_ones(load):
    with pytest.raises(ValueError, match="split='dev' must be one of 'train', 'valid', 'test'"):
        load(split="dev")


def test_same_corpus_in_another_process():
    """Python salts `hash`, so only another process shows that nothing depends on it."""
    make = "[*number_words(per_length=5, digits=(1, 9), seed=3), *interface_strings('fr', seed=3)]"
    code = f"from annotated_nlp.corpora.loaders import *; import zlib; print(zlib.crc32(repr({make}).encode()))"
    salted = os.environ | {"PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=salted, check=True, capture_output=True, text=True)
    assert int(other.stdout) == zlib.crc32(repr(eval(make)).encode())


def test_the_deal_is_fixed_forever():
    """These values may never change, or stored results would belong to other splits than the code's."""
    assert [round(rank, 6) for rank in loaders.ranks(0, ["save", "open file", "0"])] == [0.98101, 0.320254, 0.736208]
    assert [pair.number for pair in number_words(digits=(1, 8), per_length=1, split="test")] == [
        4, 854, 77179, 6186, 51, 7463875, 295306, 28037315]


def test_html_shows_text_as_it_is():
    corpus = Corpus((Pair("<b>bold</b>", "a & b"),), "tags", "train", "here", "none")
    assert "&lt;b&gt;bold" in corpus._repr_html_() and "a &amp; b" in corpus._repr_html_()
    assert "<table class='dataframe'>" in corpus[:0]._repr_html_()


def test_digits_must_be_two_numbers():
    """The module as users have it, without the type checks that the tests add."""
    plain = {"__name__": loaders.__name__, "__package__": "annotated_nlp.corpora"}
    exec(Path(loaders.__file__).read_text(encoding="utf-8"), plain)
    for digits in ((1, 2, 3), (4,), 5, ()):
        with pytest.raises(ValueError, match=re.escape(f"digits={digits} must be (shortest, longest)")):
            plain["number_words"](digits=digits)
    assert len(plain["number_words"](digits=[1, 1])) == 8


@given(st.text(), st.integers())
def test_rank_is_a_fraction_for_any_text(text, seed):
    [rank] = loaders.ranks(seed, [loaders.letters(text)])
    assert 0 <= rank < 1 and loaders._split_of(rank) in SPLITS
    assert loaders.letters(text.upper().lower()) == loaders.letters(loaders.letters(text.upper().lower()))


# number words -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("language", ["de", "fr", "da", "ja", "ru", "he"])
def test_number_words_are_num2words(language):
    for pair in number_words(language, per_length=5, split="test"):
        assert pair.target == num2words.num2words(pair.number, lang=language)
        english = num2words.num2words(pair.number, lang="en").replace("-", " ").replace(",", "")
        assert pair.source == english


def test_short_numbers_are_dealt_exactly():
    for length, population in ((1, 10), (2, 90), (3, 900)):
        dealt = {s: {p.number for p in number_words(digits=(length, length), split=s, seed=9)} for s in SPLITS}
        assert [len(dealt[s]) for s in SPLITS] == [population * 8 // 10, population // 10, population // 10]
        first = 0 if length == 1 else 10 ** (length - 1)
        assert set().union(*dealt.values()) == set(range(first, 10**length))


def test_number_words_has_what_was_asked_for():
    corpus = number_words(digits=(4, 12), per_length=7, split="test")
    assert Counter(len(str(pair.number)) for pair in corpus) == {length: 7 for length in range(4, 13)}


def test_a_number_keeps_its_split():
    small = {p.number for p in number_words(digits=(6, 6), per_length=40, split="test")}
    large = {p.number for p in number_words(digits=(2, 8), per_length=400, split="train")}
    assert not small & large


def test_source_languages_write_no_two_numbers_alike():
    """Else one text could stand in two splits. Round numbers are where num2words' faults are."""
    digits = [0, 1, 10, 20, 80, 100, 180]
    numbers = sorted({m * 10**6 + t * 1000 + u for m in digits for t in digits for u in digits})
    for language in set(num2words.CONVERTER_CLASSES) - loaders._AMBIGUOUS - loaders._ENDLESS:
        words = {loaders.letters(num2words.num2words(number, lang=language)) for number in numbers}
        assert len(words) == len(numbers), language


@pytest.mark.parametrize("arguments, message", [
    ({"target": "xx"}, "target='xx' must be one of .*'de', .*'fr'"),
    ({"source": "xx"}, "source='xx' must be one of"),
    ({"source": "tr"}, "source='tr' must be one of"),
    ({"digits": (0, 3)}, "digits"), ({"digits": (4, 3)}, "digits"),
    ({"per_length": 0}, "per_length=0"), ({"per_length": 10**6}, "per_length=1000000"),
    ({"target": "en", "digits": (400, 400)}, "can't write [0-9]+ in 'en': lower `digits`"),
    ({"target": "am"}, "target='am' must be one of"),
])
def test_number_words_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        number_words(**arguments)


# interface strings --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("language", ["fr", "de", "es", "ja"])
def test_interface_strings_are_clean(language):
    for split in SPLITS:
        for source, target in interface_strings(language, split=split):
            for text in (source, target):
                assert text == " ".join(text.split()) and 0 < len(text) <= 400
                marks = ("%s", "%1", "%(", "{", "}", "$", "`", "\x04", "</", "“", "’", "…")
                assert not any(mark in text for mark in marks)
            assert source.casefold() != target.casefold()


def test_interface_strings_come_from_gettext():
    """Django's own look-up gives the translation of each message that the cleaning left as it was."""
    [path] = [p for p in loaders._catalog_files("django", "de") if p.match("conf/locale/de/LC_MESSAGES/django.mo")]
    with path.open("rb") as file:
        catalog = gettext.GNUTranslations(file)
    corpus = [pair for split in SPLITS for pair in interface_strings("de", catalogs=("django",), split=split)]
    assert len(corpus) > 300
    found = [(pair, catalog.gettext(pair.source)) for pair in corpus]
    equal = [loaders._clean(answer) == pair.target for pair, answer in found if answer != pair.source]
    assert len(equal) > 150 and sum(equal) / len(equal) > 0.95  # the rest has other translations in other catalogs


@pytest.mark.parametrize("raw, clean", [
    ("&File", "File"), ("Save &As", "Save As"), ("R&D", "R&D"), ("terms &amp; conditions", "terms & conditions"),
    ("a <code>b</code> c", "a b c"), ("  two\n lines ", "two lines"), ("non\xa0breaking", "non breaking"),
    ("l’été “chaud”…", "l'été \"chaud\"..."), ("1 < 2", "1 < 2"), ("set `x`", "set x"),
])
def test_clean(raw, clean):
    assert loaders._clean(raw) == clean


@pytest.mark.parametrize("text, has_one", [
    ("%s files", True), ("%1 of %2", True), ("%(name)s", True), ("{0}", True), ("{{ name }}", True), ("{% if %}", True),
    ("(…$ lines…)", True), ("100 % sure", False), ("plain", False),
])
def test_placeholders(text, has_one):
    assert bool(loaders._PLACEHOLDER.search(text)) is has_one


def test_the_most_frequent_translation_stays():
    pairs = [("Save", "sauver"), ("save", "garder"), ("Save", "sauver"), ("SAVE:", "b"), ("Open", "b"), ("Open", "a")]
    kept = loaders._one_target_each(pairs)
    assert kept == {"save": Pair("Save", "sauver"), "open": Pair("Open", "a")}


def test_raw_messages_repeat_themselves():
    """Each row of the corpus is one of them, most often the one seen most."""
    raw = Counter(raw_messages("fr"))
    rows = [row for split in SPLITS for row in interface_strings("fr", split=split)]
    assert all(raw[tuple(row)] for row in rows) and raw.total() > len(rows)
    assert {loaders.letters(source) for source, _ in raw} == {loaders.letters(row.source) for row in rows}


def test_one_catalog_alone():
    django = set(interface_strings("fr", catalogs=("django",)))
    jupyter = set(interface_strings("fr", catalogs=["jupyterlab"]))
    assert django and jupyter and len(django) + len(jupyter) >= len(interface_strings("fr"))
    assert set(interface_strings("fr", catalogs="django")) == django
    assert len(interface_strings("pt_BR", catalogs=("django",))) > 300


@pytest.mark.parametrize("arguments, message", [
    ({"language": "xx"}, "language='xx' must be one of .*'de', .*'fr'"),
    ({"language": "af"}, "language='af' must be one of"),  # Django has it, JupyterLab hasn't
    ({"catalogs": ("gimp",)}, "catalog='gimp' must be one of 'jupyterlab', 'django'"),
    ({"catalogs": ()}, "catalogs is empty: choose from jupyterlab, django"),
])
def test_interface_strings_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        interface_strings(**arguments)


def catalog(entries=(), charset="UTF-8"):
    """A gettext catalog as `msgfmt` compiles it: header, messages and translations, each behind a table of places."""
    entries = [("", f"Content-Type: text/plain; charset={charset}\n"), *entries]
    strings = [text.encode() for pair in zip(*entries) for text in pair]
    places, at = [], 28 + 8 * len(strings)
    for text in strings:
        places += [len(text), at]
        at += len(text) + 1
    head = struct.pack(f"<7I{len(places)}I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0, *places)
    return head + b"".join(text + b"\0" for text in strings)


@pytest.fixture
def own_catalog(monkeypatch, tmp_path):
    """Django's French catalogs are one file, with the bytes that the test writes."""
    file = tmp_path / "django.mo"
    monkeypatch.setattr(loaders, "_catalog_files", lambda catalog, language: [file])
    loaders._interface_pairs.cache_clear()
    yield file
    loaders._interface_pairs.cache_clear()


GOOD = catalog([("Open the file", "Ouvrir le fichier")])
DAMAGED = {"empty file": b"", "cut in its header": GOOD[:10], "cut in its table": GOOD[:30], "cut in its text": GOOD[:-12],
           "no catalog": b"<html>not found</html>      ", "unknown letters": catalog(charset="klingon"),
           "other letters": catalog([("Open", "Ouvrir")], "UTF-16")}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_catalog_is_named(own_catalog, content):
    own_catalog.write_bytes(content)
    with pytest.raises(ValueError, match=says(str(own_catalog), "pip install --force-reinstall django", or_else="install")):
        interface_strings("fr", catalogs="django")


def test_a_catalog_that_translates_nothing_is_no_corpus(own_catalog):
    own_catalog.write_bytes(GOOD)
    assert sum(len(interface_strings("fr", catalogs="django", split=split)) for split in SPLITS) == 1
    for nothing in (catalog(), catalog([("Type", "Type")]), catalog([("%s files", "%s fichiers")])):
        loaders._interface_pairs.cache_clear()
        own_catalog.write_bytes(nothing)
        with pytest.raises(ValueError, match=says("django has no message", "'fr'", str(own_catalog))):
            interface_strings("fr", catalogs="django")


# prose, code, names -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
def test_no_sentence_in_two_splits_of_the_prose(seed):
    def sentences(split):
        return {source_of(s) for text in python_prose(split=split, seed=seed) for s in loaders.split_sentences(text)}

    train, valid, test = map(sentences, SPLITS)
    assert not (train & valid or train & test or valid & test)


def test_prose_reads_like_prose():
    rows = [row for split in SPLITS for row in python_prose(split=split)]
    assert sum(map(len, rows)) > 500_000
    assert all(row[0].isupper() and "\n" not in row and ">>>" not in row and "``" not in row for row in rows)
    assert not [row for row in rows if re.search(r"::(\s|$)", row)], "the mark that code follows"


def test_prose_comes_from_the_running_python():
    from pydoc_data.topics import topics

    import difflib
    everything = " ".join(" ".join([*topics.values(), difflib.__doc__, difflib.Differ.__doc__]).split())
    rows = {row for split in SPLITS for row in python_prose(split=split)}
    found = [row for row in rows if row in everything]
    assert len(found) > 100
    assert any("Differ is a class for comparing sequences of lines" in row for row in rows)


def test_code_parses():
    for split in ("valid", "test"):
        for source in python_code(split=split):
            [function] = ast.parse(source).body
            assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)


def test_code_is_inspects():
    """`inspect.getsource` gives the same text, up to the margin."""
    import inspect
    import textwrap

    rows = {row for split in SPLITS for row in python_code(split=split)}
    for function in (textwrap.dedent, random.Random.gauss, inspect.getsource, ast.NodeVisitor.generic_visit):
        assert textwrap.dedent(inspect.getsource(function)).rstrip() in rows


def test_names_are_the_functions_names():
    import textwrap

    rows = dict(pair for split in SPLITS for pair in docstring_names(split=split))
    assert rows["Remove any common leading whitespace from every line in text."] == textwrap.dedent.__name__
    assert all(words == words.lower() and words.replace(" ", "").isalnum() for words in rows.values())


def test_origin_names_the_running_python():
    for corpus in (python_prose(), python_code(), docstring_names()):
        assert corpus.origin == f"Python {platform.python_version()}"


def test_a_form_feed_ends_no_line(tmp_path, monkeypatch):
    "To Python's parser; some sources of its library have one between their classes."
    (tmp_path / "m.py").write_text("\f\ndef f(a):\n    return a + 1\n\f\ndef g(b):\n    return b\n")
    monkeypatch.setattr(loaders.sysconfig, "get_path", lambda _: str(tmp_path))
    found = loaders._library.__wrapped__()
    assert [item.source for item in found if item.name] == ["def f(a):\n    return a + 1", "def g(b):\n    return b"]


def test_library_is_read_and_not_imported():
    assert python_code() and not {"antigravity", "turtle", "this"} & sys.modules.keys()


def test_python_without_source(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    loaders._library.cache_clear()
    with pytest.raises(FileNotFoundError, match="lacks the source of its standard library"):
        loaders._library()


def test_broken_modules_are_skipped(monkeypatch, tmp_path):
    (tmp_path / "good.py").write_text('def f():\n    """Does a thing well."""\n')
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "more.py").write_text("def g(): pass\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    loaders._library.cache_clear()
    assert [item.name for item in loaders._library()] == ["", "f"]
    loaders._library.cache_clear()


# digits -------------------------------------------------------------------------------------------------------------

def test_digits_are_sklearns():
    reference = sklearn.datasets.load_digits()
    pairs = zip(reference.images, reference.target, strict=True)
    expected = sorted((image.astype(int).tobytes(), int(label)) for image, label in pairs)
    rows = [row for split in SPLITS for row in handwritten_digits(split=split)]
    for image, _ in rows:
        assert image.shape == (8, 8) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
    assert sorted(((image * 16).numpy().astype(int).tobytes(), label) for image, label in rows) == expected


def test_digits_may_be_changed_without_changing_the_corpus():
    import io

    image, label = handwritten_digits()[0]
    before = image.clone()
    image.zero_()
    assert torch.equal(handwritten_digits()[0].image, before) and before.any()
    stream = io.BytesIO()
    torch.save(handwritten_digits()[0].image, stream)
    assert stream.tell() < 5000, "one picture, not the array that it is a part of"


# missing packages ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("load, module, package", [
    (number_words, "num2words", "num2words"),
    (lambda: interface_strings("it"), "jupyterlab_language_pack_it_IT", "jupyterlab-language-pack-it-IT"),
    (lambda: interface_strings("de", catalogs=("django",)), "django", "django"),
    (handwritten_digits, "sklearn", "scikit-learn"),
    (lambda: hub("sst2"), "datasets", "datasets"),
])
def test_missing_package_names_the_remedy(monkeypatch, load, module, package):
    missing(monkeypatch, module)
    loaders._digits.cache_clear()
    loaders._interface_pairs.cache_clear()
    with pytest.raises(ImportError, match=f"pip install {package}$"):
        load()


def test_the_module_needs_none_of_the_books_packages(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] in {"num2words", "django", "sklearn", "datasets", "numpy", "pandas", "annotated_nlp"}:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    source = open(loaders.__file__, encoding="utf-8").read()
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    monkeypatch.setattr(builtins, "__import__", refuse)
    for node in imports:
        exec(ast.unparse(node), {"__package__": "annotated_nlp.corpora"})


# the hub, on local files of the same layout -------------------------------------------------------------------------

@pytest.fixture
def cache(monkeypatch, tmp_path):
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def png(pixels):
    import io

    import PIL.Image
    stream = io.BytesIO()
    PIL.Image.fromarray(pixels).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
HUB = {  # set -> file of the real repository, its columns, the row that we make of them
    "multi30k": ("val.jsonl", {"en": "A dog runs.", "de": "Ein Hund rennt."}, Pair("A dog runs.", "Ein Hund rennt.")),
    "sst2": ("data/validation-00000-of-00001.parquet", {"idx": 0, "sentence": "a joy ", "label": 1},
             Labelled("a joy", 1)),
    "mnli": ("mnli/validation_matched-00000-of-00001.parquet",
             {"premise": "It rains.", "hypothesis": "It is dry.", "label": 2, "idx": 0},
             Entailment("It rains.", "It is dry.", 2)),
    "squad": ("plain_text/validation-00000-of-00001.parquet",
              {"id": "1", "title": "Rain", "context": "Rain falls down.", "question": "What falls?",
               "answers": {"text": ["Rain"], "answer_start": [0]}},
              Question("Rain falls down.", "What falls?", ("Rain",), (0,))),
    "conll2003": ("data/validation-00000-of-00001.parquet",
                  {"id": "0", "tokens": ["Ada", "Lovelace", "wrote"], "pos_tags": [22, 22, 38],
                   "chunk_tags": [11, 12, 21], "ner_tags": [1, 2, 0]}, Tagged(("Ada", "Lovelace", "wrote"), ("B-PER", "I-PER", "O"))),
    "wikitext": ("wikitext-2-raw-v1/validation-00000-of-00001.parquet", {"text": " Rain falls . \n"}, "Rain falls ."),
}


@pytest.mark.parametrize("name", HUB)
def test_hub_reads_a_local_copy(name, tmp_path, cache):
    file, columns, row = HUB[name]
    path = tmp_path / "copy" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame([columns, columns])
    table.to_json(path, orient="records", lines=True) if path.suffix == ".jsonl" else table.to_parquet(path)
    corpus = hub(name, split="valid", path=tmp_path / "copy")
    assert list(corpus) == [row, row] and type(corpus[0]) is type(row)
    assert corpus.split == "valid" and corpus.licence and "/" in corpus.origin
    with pytest.raises(FileNotFoundError, match="split 'train' in path="):
        hub(name, path=str(tmp_path / "copy"))


def test_hub_reads_pictures(tmp_path, cache):
    import datasets

    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdefghij"))})
    (tmp_path / "plain_text").mkdir()
    table = datasets.Dataset.from_dict({"img": [png(PIXELS)], "label": [7]}, features=features)
    table.to_parquet(tmp_path / "plain_text" / "test-00000-of-00001.parquet")
    [(image, label)] = hub("cifar10", split="test", path=tmp_path)
    assert label == 7 and image.shape == (3, 32, 32)
    assert torch.equal((image * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(PIXELS))


def test_hub_finds_the_files_of_one_split(tmp_path, cache):
    """Shards are joined in order; other splits and other configurations stay out."""
    files = {
        "wikitext-2-raw-v1/train-00000-of-00002": "one", "wikitext-2-raw-v1/train-00001-of-00002": "two",
        "wikitext-2-raw-v1/test-00000-of-00001": "three", "wikitext-103-raw-v1/train-00000-of-00001": "four",
    }
    for file, text in files.items():
        path = tmp_path / f"{file}.parquet"
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame({"text": ["", f" = {text} = \n", text, " = = Deep = = \n"]}).to_parquet(path)
    assert list(hub("wikitext", path=tmp_path)) == ["one", "two"]


def copy_of(folder, files):
    """A local copy of WikiText's layout: one paragraph a file, its text the file's name."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pd.DataFrame({"text": [file]})
        table.to_parquet(path) if path.suffix == ".parquet" else table.to_json(path, orient="records", lines=True)


@pytest.mark.parametrize("files", [
    ["data/train-00000-of-00002.parquet"],
    ["data/train-00001-of-00002.parquet"],
    ["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"],
    ["data/train-00000-of-00001.parquet", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
    ["data/train-00000-of-00001.parquet", "old/train-00000-of-00001.parquet"],
    ["data/train-00000-of-00002.parquet", "old/train-00001-of-00002.parquet"],
    ["train.parquet", "train.jsonl"],
    ["train-00000-of-00002.parquet", "train-00001-of-00002.jsonl"],
    ["train.parquet", "train-00000-of-00001.parquet"],
])
def test_hub_refuses_half_a_split_and_two_of_them(files, tmp_path, cache):
    copy_of(tmp_path, files)
    with pytest.raises(ValueError, match="split 'train' must be .* once.*" + re.escape(", ".join(sorted(files)))):
        hub("sst2", path=tmp_path)


@pytest.mark.parametrize("other", ["qnli", "cola", "mnli_matched"])
def test_hub_leaves_other_configurations_alone(other, tmp_path, cache):
    copy_of(tmp_path, [f"{other}/train-00000-of-00001.parquet"])
    with pytest.raises(FileNotFoundError, match="no .parquet, .jsonl or .json file of split 'train' in path="):
        hub("mnli", path=tmp_path)
    copy_of(tmp_path, ["train-00000-of-00001.parquet"])
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    pd.DataFrame([HUB["mnli"][1]]).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    assert list(hub("mnli", path=tmp_path)) == [HUB["mnli"][2]]


@pytest.mark.parametrize("file, content", [
    ("train.jsonl", b'{"en": "A dog runs.", "de": "Ein Hund rennt."}\n{"en": "A do'),
    ("train.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ("train-00000-of-00001.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ("train.jsonl", b""),
    ("train.jsonl", b'{"english": "A dog runs.", "german": "Ein Hund rennt."}\n'),
    ("train-00000-of-00001.parquet", pd.DataFrame({"en": [], "de": []}, dtype=str).to_parquet()),
])
def test_hub_names_the_file_that_it_cannot_read(file, content, tmp_path, cache):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"can't read rows of multi30k from .*{file}: copy bentrevett/multi30k"):
        hub("multi30k", path=tmp_path)


ONLINE = {  # what the sets' pages on the hub tell one to write: repository, configuration, splits
    "multi30k": ("bentrevett/multi30k", None, ["train", "validation", "test"]),
    "sst2": ("stanfordnlp/sst2", None, ["train", "validation"]),
    "mnli": ("nyu-mll/glue", "mnli", ["train", "validation_matched"]),
    "squad": ("rajpurkar/squad", "plain_text", ["train", "validation"]),
    "conll2003": ("lhoestq/conll2003", None, ["train", "validation", "test"]),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", ["train", "validation", "test"]),
}


@pytest.mark.parametrize("name", ONLINE)
def test_hub_asks_for_the_published_split(name, monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [HUB[name][1]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    repository, config, splits = ONLINE[name]
    ours = [split for split in SPLITS if split in loaders._HUB[name].splits]
    assert [list(hub(name, split=split)) for split in ours] == [[HUB[name][2]]] * len(splits)
    assert asked == [((repository, config), {"split": split}) for split in splits]


def test_hub_refuses():
    with pytest.raises(ValueError, match="name='imdb' must be one of " + ", ".join(map(repr, [*HUB, "cifar10"]))):
        hub("imdb")
    with pytest.raises(ValueError, match="split='test' must be one of 'train', 'valid'"):
        hub("sst2", split="test")
    with pytest.raises(ValueError, match="split='valid' must be one of 'train', 'test'"):
        hub("cifar10", split="valid")


def test_hub_without_network():
    code = (
        "from annotated_nlp.corpora.loaders import hub\n"
        "try: hub('sst2')\n"
        "except ConnectionError as error: print(error)"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True).stdout
    assert "can't load stanfordnlp/sst2 from the hub" in out and "path=" in out
