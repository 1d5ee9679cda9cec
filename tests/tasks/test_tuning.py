"Tasks, scores, probes and intervals of the experiments, against scikit-learn, SciPy and closed forms."

import math
import random
from collections import Counter
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
import sacrebleu
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from messages import says
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from torch import nn

from annotated_nlp.bert import BertConfig, BertForQuestionAnswering
from annotated_nlp.bert import BertForSequenceClassification, BertForTokenClassification
from annotated_nlp.corpora.loaders import SPLITS, Entailment, Labelled, Pair, Question
from annotated_nlp.corpora.loaders import Tagged, python_prose
from annotated_nlp.data import batches, pad
from annotated_nlp.llama import Llama, LlamaConfig
from annotated_nlp.seq2seq import Seq2Seq, Seq2SeqConfig
from annotated_nlp.tasks.probes import ProbedPosition, commonest_labels, next_pieces
from annotated_nlp.tasks.probes import probe, states_at
from annotated_nlp.tasks.resuming import History
from annotated_nlp.tasks.translation import bleu, bleu_parts, curve, encode_pairs
from annotated_nlp.tasks.translation import translate, translation, translation_loss
from annotated_nlp.tasks.tuning import BERT_SPECIALS, CLS, MASK, PAD, SEP, TASK_KINDS
from annotated_nlp.tasks.tuning import UNK, PromptClassifier, Reader, Task, answer_span, collate, corpora
from annotated_nlp.tasks.tuning import entities, f1, fine_tune, held_out_loss, judged
from annotated_nlp.tasks.tuning import learn_pieces, loss_of, mean_interval, orders
from annotated_nlp.tasks.tuning import plain_words, predict, read_class, read_span
from annotated_nlp.tasks.tuning import read_tags, read_task, score, score_classes
from annotated_nlp.tasks.tuning import score_spans, score_tags, unseen, wilson
from annotated_nlp.tokenization import BOS, EOS, WordPiece, train_tokenizer

TEXTS = ["the cat sat on the mat", "the cats sat on the mats", "a dog ran to the cat", "the dog sat"]
READER = Reader(learn_pieces(TEXTS, 60), max_len=16)


# text ---------------------------------------------------------------------------------------------------------------

def test_pieces_begin_with_berts_special_tokens():
    vocab = READER.tokenizer.vocab
    assert [vocab[token] for token in BERT_SPECIALS] == [PAD, UNK, CLS, SEP, MASK] == [0, 1, 2, 3, 4]
    assert sorted(vocab.values()) == list(range(len(vocab))) and len(vocab) <= 60
    assert not {"[BOS]", "[EOS]"} & set(vocab)
    learned = WordPiece.train(TEXTS, 59)
    for text in TEXTS:  # the same pieces as without them
        assert READER.tokenizer.decode(READER.tokenizer.encode(text)) == learned.decode(learned.encode(text)) == text


@given(st.integers(3, 12), st.integers(1, 4))
def test_rows_cover_the_text(max_len, least):
    assume(least <= max_len - 2)
    reader, text = Reader(READER.tokenizer, max_len), " ".join(TEXTS)
    ids, rows = reader.tokenizer.encode(text), reader.rows(text, least)
    inner = [piece for row in rows for piece in row[1:-1]]
    assert inner == ids[: len(inner)] and len(ids) - len(inner) < least
    assert all(row[0] == CLS and row[-1] == SEP and len(row) <= max_len for row in rows)
    assert reader.row(text) == [CLS, *ids[: max_len - 2], SEP]


def test_corpora_are_the_splits():
    found = corpora(python_prose, train=7, held_out=3)
    assert {split: list(rows) for split, rows in found.items()} == {
        split: list(python_prose(split=split))[: 7 if split == "train" else 3] for split in SPLITS}
    assert len(corpora(python_prose)["valid"]) == len(python_prose(split="valid"))


# tasks --------------------------------------------------------------------------------------------------------------

def test_unseen():
    corpus = ["The first\nparagraph.", "A second one"]
    assert unseen(["FIRST paragraph", "third", "graph a", "second-one"], corpus) == [False, True, True, False]


# examples -----------------------------------------------------------------------------------------------------------

def pieces(example):
    return [READER.tokenizer.pieces[i] for i in example.ids]


def test_classes_are_read():
    one = read_class(READER, Labelled("the cat", 2), [])
    assert pieces(one) == ["[CLS]", "the", "cat", "[SEP]"] and one.segments == [0] * 4 and one.target == [2]
    two = read_class(READER, Entailment("the cat", "sat", 1), [])
    assert pieces(two) == ["[CLS]", "the", "cat", "[SEP]", "sat", "[SEP]"] and two.segments == [0, 0, 0, 0, 1, 1]


def test_tags_are_asked_at_first_pieces():
    row = Tagged(("cat", "mats", "zzz", "on"), ("O", "B-X", "O", "B-X"))
    example = read_tags(READER, row, ["O", "B-X"])
    asked = [(i, example.target[i]) for i in range(len(example.ids)) if example.target[i] >= 0]
    assert [(row.words[example.places[i]], ["O", "B-X"][label]) for i, label in asked] == list(zip(row.words, row.tags))
    assert all(not pieces(example)[i].startswith("##") for i, _ in asked)
    short = read_tags(Reader(READER.tokenizer, 4), row, ["O", "B-X"])
    assert len(short.ids) == len(short.target) == 4 and short.target[0] == short.target[-1] == -100


def test_spans_lead_back_to_their_characters():
    context = "the dog ran to the cat. a cat sat on the mats"
    for answer in ("the dog", "cat", "the cat", "sat on the mats"):
        row = Question(context, "a dog", (answer,), (context.index(answer),))
        reader = Reader(READER.tokenizer, 40)
        example = read_span(reader, row, [])
        logits = torch.zeros(2, len(example.ids))
        logits[0, example.target[0]] = logits[1, example.target[1]] = 5
        assert answer_span(logits, example, row, []) == answer
    cut = read_span(Reader(READER.tokenizer, 9), row, [])  # the answer stands behind what has room
    assert cut.target == [-100, -100]


def test_best_span_by_brute_force():
    torch.manual_seed(0)
    row = Question("the cat sat on the mat the dog ran", "a cat", ("cat",), (4,))
    example = read_span(Reader(READER.tokenizer, 40), row, [])
    places = sorted(example.places)
    for longest in (1, 2, 40):
        for _ in range(20):
            logits = torch.randn(2, len(example.ids))
            i, j = max(((i, j) for i in places for j in places if 0 <= j - i < longest),
                       key=lambda ends: (logits[0, ends[0]] + logits[1, ends[1]]).item())
            said = answer_span(logits, example, row, [], longest)
            assert said == row.context[example.places[i][0] : example.places[j][1]]


def test_collated_rows_are_padded():
    examples = [read_class(READER, Labelled(text, i), []) for i, text in enumerate(TEXTS)]
    batch = collate(examples)
    for example, ids, segments, mask, target in zip(examples, *batch, strict=True):
        assert ids[mask].tolist() == example.ids and segments[mask].tolist() == example.segments
        assert target.tolist() == example.target and not ids[~mask].any()


def test_orders_are_pythons():
    order, draw = orders(7), random.Random(7)
    letters = list("abcdefgh")
    assert [[letters[i] for i in order(8)] for _ in range(3)] == [draw.sample(letters, 8) for _ in range(3)]


# scores -------------------------------------------------------------------------------------------------------------

tag_rows = st.lists(st.lists(st.tuples(st.sampled_from(["O", "B-x", "B-y"]), st.sampled_from(["O", "B-x", "B-y"])), min_size=1),
                    min_size=1, max_size=8).filter(lambda rows: any(true != "O" for row in rows for true, _ in row))


@given(tag_rows)
def test_tags_of_one_word_are_scored_as_by_scikit_learn(rows):
    "Where each entity is one word, its F1 is that of its tags."
    task = [Tagged(("w",) * len(row), tuple(true for true, _ in row)) for row in rows]
    found = score_tags(task, [[said for _, said in row] for row in rows])
    true, said = zip(*(pair for row in rows for pair in row))
    kinds = sorted({*true} - {"O"})
    by_kind = f1_score(true, said, labels=kinds, average=None, zero_division=0)
    assert [found[f"F1 of {kind[2:]}"] for kind in kinds] == pytest.approx(by_kind)
    assert found["mean F1 of the kinds"] == pytest.approx(by_kind.mean())
    everything = f1_score(true, said, labels=["B-x", "B-y"], average="micro", zero_division=0)
    assert found["F1"] == pytest.approx(everything)
    assert next(iter(found)) == "F1"


@pytest.mark.parametrize("tags, found", [
    (["B-x", "I-x", "O", "B-y"], {(0, 1, "x"), (3, 3, "y")}), (["I-x", "I-x"], {(0, 1, "x")}),
    (["B-x", "B-x"], {(0, 0, "x"), (1, 1, "x")}), (["B-x", "I-y"], {(0, 0, "x"), (1, 1, "y")}),
    (["B-x", "O", "I-x"], {(0, 0, "x"), (2, 2, "x")}), (["O"], set()),
])
def test_entities_as_in_conlleval(tags, found):
    assert entities(tags) == found


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_f1_is_the_harmonic_mean(right, wrong, missed):
    true = [1] * (right + missed) + [0] * wrong
    said = [1] * right + [0] * missed + [1] * wrong
    if true:
        expected = precision_recall_fscore_support(true, said, average="binary", zero_division=0)[2]
        assert f1(right, right + wrong, right + missed) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_accuracy_is_scikit_learns(pairs):
    true, said = zip(*pairs)
    found = score_classes([Labelled("", label) for label in true], said)
    assert found == {"accuracy": pytest.approx(accuracy_score(true, said))}


def test_answers_for_another_number_of_rows_are_refused():
    with pytest.raises(ValueError):
        score_classes([Labelled("", 0)], [0, 0])


@pytest.mark.parametrize("answer, f1, exact", [
    ("The Eiffel Tower!", 1, 1), ("eiffel", 2 / 3, 0), ("in the tower of Eiffel", 8 / 9, 0), ("Paris", 0, 0), ("", 0, 0),
])
def test_spans_as_squad_scores_them(answer, f1, exact):
    row = Question("", "", ("Eiffel Tower", "the tower of Eiffel in the city"), (0, 0))
    assert score_spans([row], [answer]) == {"F1": pytest.approx(f1), "exact match": exact}
    one = Question("", "", ("Eiffel Tower",), (0,))
    words, true = Counter(plain_words(answer)), Counter(["eiffel", "tower"])
    shared = (words & true).total()
    by_hand = stats.hmean([shared / words.total(), shared / 2]) if shared else 0
    assert score_spans([one], [answer])["F1"] == pytest.approx(by_hand)


# training -----------------------------------------------------------------------------------------------------------

TASKS = {
    "class": Task("class", ["no", "yes"], [Labelled(f"the {word} sat", int(word == "cat")) for word in ("cat", "dog") * 8],
                     [Labelled("a cat ran", 1), Labelled("a dog ran to the mat", 0)], {}),
    "tags": Task("tags", ["O", "B-x"], [Tagged(("the", word, "sat"), ("O", "B-x" if word == "cat" else "O", "O"))
                                           for word in ("cat", "dog") * 8],
                    [Tagged(("a", "cat", "ran"), ("O", "B-x", "O")), Tagged(("dog",), ("O",))], {}),
    "span": Task("span", [], [Question(f"the {a} sat on the {b}", "cat", ("cat",), (4 if a == "cat" else 15 + len(a) - 3,))
                                 for a, b in [("cat", "dog"), ("dog", "cat")] * 8],
                    [Question("a cat ran", "cat", ("cat",), (2,))], {}),
}
HEADS = {"class": BertForSequenceClassification, "tags": BertForTokenClassification, "span": BertForQuestionAnswering}


def small(kind):
    torch.manual_seed(0)
    vocab_size = len(READER.tokenizer.vocab)
    return HEADS[kind](BertConfig(vocab_size=vocab_size, max_len=16, d_model=32, n_heads=4, d_ff=64, n_layers=1, dropout=0.0,
                                  n_classes=2)).eval()


@pytest.mark.parametrize("kind", TASKS)
def test_a_small_task_is_learned(kind):
    task, model = TASKS[kind], small(kind)
    train, test = read_task(task, READER)
    history = fine_tune(model, task, train, epochs=12, batch_size=4, lr=5e-3, seed=0)
    assert len(history) == 12 * 4 and history.loss[-1] < 0.3 * history.loss[0]
    found = score(task, predict(model, task, test, size=1))
    assert next(iter(found.values())) == 1
    assert predict(model, task, test) == predict(model, task, test, size=1)


@pytest.mark.parametrize("kind", TASKS)
def test_loss_is_the_mean_over_what_is_asked(kind):
    task, model = TASKS[kind], small(kind)
    batch = collate(read_task(task, READER)[0])
    mean, n = loss_of(kind)(model, batch)
    logits = TASK_KINDS[kind].logits(model(batch.ids, batch.segments, batch.mask), batch.mask).log_softmax(-1)
    terms = [-logits[i, t, label] for i, row in enumerate(batch.target.tolist()) for t, label in enumerate(row) if label >= 0]
    assert n == len(terms) and mean.item() == pytest.approx(sum(terms).item() / len(terms), abs=1e-6)
    parts = batches(read_task(task, READER)[0], 3, collate=collate, key=None)
    assert held_out_loss(model, parts, loss_of(kind)) == pytest.approx(mean.item(), abs=1e-5)


def test_nothing_to_learn_is_refused():
    task = TASKS["span"]
    with pytest.raises(ValueError, match="empty"):
        fine_tune(small("span"), task, read_task(task, Reader(READER.tokenizer, 5))[0], epochs=1, batch_size=4, lr=1e-3, seed=0)


def test_translations_are_in_the_order_of_the_pairs():
    "Written one at a time or many together: the same texts."
    pairs = [Pair(" ".join("abcd"[: n % 4 + 1]), "x" * (n % 3 + 1)) for n in range(9)]
    source, target = (train_tokenizer(texts, kind=kind, vocab_size=40) for texts, kind in zip(zip(*pairs), ("word", "char")))
    ids = encode_pairs(pairs, source, target)
    assert all(t[0] == BOS and t[-1] == EOS and source.decode(s) == pair.source for (s, t), pair in zip(ids, pairs))
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(source.get_vocab_size(), target.get_vocab_size(), 16)).eval()
    for parameter in model.parameters():  # large enough that the source matters
        nn.init.normal_(parameter)
    together = translate(model, ids, target, max_new_tokens=6)
    assert together == [translate(model, [pair], target, max_new_tokens=6)[0] for pair in ids]
    assert together == translate(model, ids, target, max_new_tokens=6, size=2) and len(set(together)) > 1
    assert translate(model, ids, target, max_new_tokens=6, beam=1) == together
    beam = translate(model, ids, target, max_new_tokens=6, beam=3)
    assert beam == [translate(model, [pair], target, max_new_tokens=6, beam=3)[0] for pair in ids] != together


@pytest.mark.parametrize("copied", [0.9, 0.7])
def test_bleu_is_that_of_sacrebleu(copied):
    "On any corpus and any part of it: texts that copy most words of their references, some shorter, some longer."
    draw, words = random.Random(0), "the robin built its nest in May , and four blue eggs were laid there .".split()
    references = [" ".join(draw.choices(words, k=draw.randint(4, 20))) for _ in range(200)]
    written = [" ".join(w if draw.random() < copied else draw.choice(words) for w in r.split()[: draw.randint(3, 20)]) for r in references]
    parts = bleu_parts(written, references)
    assert parts.shape == (200, 10)
    for part in (slice(None), slice(0, 60), slice(1, None, 3)):
        theirs = sacrebleu.corpus_bleu(written[part], [references[part]]).score
        assert 5 < theirs < 95 and bleu(parts[part].mean(0)).item() == pytest.approx(theirs, abs=1e-9)
    assert bleu(bleu_parts(["robin"], ["nest"]).sum(0)) == 0


# probes -------------------------------------------------------------------------------------------------------------

def test_next_pieces():
    rows = [[2, 5, 6, 7, 3], [2, 7, 3]]
    found = next_pieces(rows, {7: 0, 3: 1}, 100)
    assert sorted(found) == [(0, 2, 6, 0), (0, 3, 7, 1), (1, 1, 7, 1)]
    assert len(next_pieces(rows, {7: 0, 3: 1}, 2)) == 2


def test_commonest_labels():
    train = [ProbedPosition(0, 0, *pair) for pair in [("a", 1), ("a", 1), ("a", 0), ("b", 0), ("b", 0), ("c", 0)]]
    assert commonest_labels(train, [ProbedPosition(0, 0, thing, 9) for thing in "abz"]) == [1, 0, 0]


def test_states_are_those_at_the_places():
    rows = [[1] * n for n in (5, 2, 7, 3)]

    def states(ids, mask):
        assert torch.equal(ids > 0, mask)
        return torch.stack([mask.sum(1, keepdim=True).expand_as(ids), torch.arange(ids.shape[1]).expand_as(ids)], -1).float()

    places = [ProbedPosition(2, 6, "", 0), ProbedPosition(0, 1, "", 0), ProbedPosition(2, 0, "", 0), ProbedPosition(3, 2, "", 0)]
    for size in (1, 2, 64):
        assert states_at(states, rows, places, size).tolist() == [[7, 6], [5, 1], [7, 0], [3, 2]]


def test_a_probe_finds_what_the_states_hold():
    rng = random.Random(0)
    rows = [[rng.randrange(1, 9) for _ in range(6)] for _ in range(200)]
    places = [ProbedPosition(i, t, row[t], int(row[t] > 4)) for i, row in enumerate(rows) for t in range(6)]
    table = nn.Embedding(9, 4)
    with torch.no_grad():
        table.weight[:, 0] = torch.arange(9) - 4.5
    args = (rows[:100], [p for p in places if p.row < 100]), (rows, [p for p in places if p.row >= 100])
    assert probe(lambda ids, mask: table(ids).detach(), *args) == 1
    blind = probe(lambda ids, mask: torch.randn(*ids.shape, 4), *args)
    assert 0.4 < blind < 0.65


# intervals ----------------------------------------------------------------------------------------------------------

@given(st.integers(1, 2000), st.data())
def test_wilson_is_scipys(n, data):
    right = data.draw(st.integers(0, n))
    interval = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert wilson(right / n, n, z=stats.norm.ppf(0.975)) == pytest.approx(tuple(interval), abs=1e-9)
    assert wilson(right / n, n) == pytest.approx(tuple(interval), abs=1e-4)


def test_wilson_takes_columns():
    share, n = pd.Series([0.1, 0.9]), pd.Series([10, 20])
    low, high = wilson(share, n)
    assert [(low[i], high[i]) for i in (0, 1)] == [wilson(share[i], n[i]) for i in (0, 1)]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9).filter(lambda x: np.std(x) > 1e-3))
def test_mean_interval_is_scipys(differences):
    mean, half = mean_interval(differences)
    interval = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx(tuple(interval), abs=1e-9)


def test_mean_of_one_has_no_interval():
    mean, half = mean_interval([0.5])
    assert mean == 0.5 and math.isnan(half)
    with pytest.raises(ValueError, match=says("differences=0")):
        mean_interval([])


def test_batches_of_examples_are_padded_with_pad():
    (batch,) = batches([[5, 6], [7]], 2, collate=pad, shuffle=False)
    assert batch[0].tolist() == [[7, 0], [5, 6]]


# translations -------------------------------------------------------------------------------------------------------

def test_a_translation_has_all_splits():
    corpus = {"train": [Pair("a b", "x y z"), Pair("b", "z")], "test": [Pair("a", "y")]}
    found = translation(corpus, 30)
    assert found.pairs["test"] == encode_pairs(corpus["test"], found.source, found.target)
    lengths = [(len(found.source.encode(p.source).ids), len(found.target.encode(p.target).ids) + 1) for p in corpus["train"]]
    sizes = found.sizes()
    assert sizes["pairs"] == {"train": 2, "test": 1}
    assert (sizes["source"]["train"], sizes["target"]["train"]) == tuple(sum(side) / 2 for side in zip(*lengths))


def test_loss_of_a_translation_is_pytorchs():
    torch.manual_seed(0)
    model, batch = Seq2Seq(Seq2SeqConfig(9, 9, 8)), next(iter(batches([([5, 6], [2, 7, 8, 3]), ([5], [2, 6, 3])], 2)))
    logits = model(batch.src, batch.tgt[:, :-1], batch.src_mask)
    wanted = batch.tgt[:, 1:].masked_fill(~batch.tgt_mask[:, 1:], -100)
    mean, n = translation_loss()(model, batch)
    assert n == 5 and mean.item() == pytest.approx(nn.functional.cross_entropy(logits.mT, wanted).item(), abs=1e-6)


def test_a_curve_has_the_mean_since_the_last_look():
    history = History(loss=[4.0, 2.0, 1.0, 0.0, 5.0], seconds=[1.0] * 5, metrics=[{"step": 2, "x": 7}, {"step": 4, "x": 8}, {"step": 5, "x": 9}])
    assert curve(history, 2) == [
        {"update": 2, "seconds": 2, "train_loss": 3, "x": 7}, {"update": 4, "seconds": 4, "train_loss": 0.5, "x": 8},
        {"update": 5, "seconds": 5, "train_loss": 2.5, "x": 9}]
    assert all("step" in metrics for metrics in history.metrics)


def test_a_prompt_classifier_compares_the_words_that_transformers_would_write_next():
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, n_layers=2)
    trunk = Llama(LlamaConfig(vocab_size=50, **sizes))
    torch.nn.init.normal_(trunk.embedding.tokens.weight)
    texts = [torch.randint(50, (n,)).tolist() for n in (5, 1, 9, 3, 9)]
    with TemporaryDirectory() as folder:
        trunk.save_pretrained(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = torch.stack([theirs(torch.tensor([ids])).logits[0, -1, [7, 3]] for ids in texts])
    torch.testing.assert_close(judged(PromptClassifier(trunk, [7, 3]), texts, size=2), wanted, atol=1e-5, rtol=1e-4)
