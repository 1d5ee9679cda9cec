"Rules without a network: NLTK's Kneser-Ney, sums to one, and dictionaries for what stands between neighbours."

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from annotated_nlp.parts.ngrams import CONTEXTS, KneserNey, NeighbourCounts, discounts
from hypothesis import given
from hypothesis import strategies as st
from messages import refused
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

# Kneser and Ney's n-grams


def drawn(n, v, seed=0):
    "Tokens, the first ones common, the last ones rare."
    return np.random.default_rng(seed).choice(v, n, p=1 / np.arange(1, v + 1) / sum(1 / np.arange(1, v + 1)))


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("discount", [0.1, 0.75])
def test_equals_nltk(order, discount):
    """NLTK takes one discount, and none from single tokens. It counts what follows a context also where nothing
    comes before it, which is so at the beginning of a text alone: so the text ends as it begins."""
    v, ids = 9, drawn(150, 9)
    ids = np.concatenate([np.arange(v), ids, np.arange(v)])
    kinds = len(set(ids))

    def one(counts):
        return np.array([0] + 3 * [discount * (len(counts) > kinds)])

    words = list(map(str, ids))
    theirs = KneserNeyInterpolated(order, discount)
    theirs.fit([everygrams(words, max_len=order)], vocabulary_text=words)
    text = drawn(60, v, seed=1)
    ours = KneserNey(ids, order, v, one).probabilities(text)[-1]
    past = [tuple(map(str, text[max(0, i - order + 1) : i])) for i in range(len(text))]
    wanted = [theirs.score(str(w), context) for w, context in zip(text, past)]
    assert order == 2 or any(not theirs.counts[context] for context in past[1:])  # some were never seen
    np.testing.assert_allclose(ours, wanted, rtol=1e-12)


@given(st.integers(1, 5), st.integers(1, 6), st.lists(st.integers(0, 5), min_size=5, max_size=60), st.integers(0, 9))
def test_sums_to_one(order, extra, ids, seed):
    "Whatever the text, also with tokens that never occur in it, and whatever the context."
    v = 6 + extra
    model = KneserNey(np.array(ids), order, v)
    context = np.random.default_rng(seed).integers(0, v, order - 1)
    each = np.concatenate([np.append(context, token) for token in range(v)])
    p = model.probabilities(each)[:, order - 1 :: order]
    assert p.shape == (order, v) and (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)


def test_a_row_for_each_order():
    "A model's row for a lower order is the model of that order; a stream may be a tensor, of any integers."
    ids, text = drawn(400, 12), drawn(50, 12, seed=1)
    rows = KneserNey(ids, 4, 12).probabilities(text)
    assert rows.dtype == np.float64
    for order in range(1, 5):
        alone = KneserNey(torch.from_numpy(ids.astype(np.int32)), order, 12)
        assert np.array_equal(alone.probabilities(torch.from_numpy(text))[-1], rows[order - 1])
    assert np.array_equal(KneserNey(ids.astype(np.uint16), 4, 12).probabilities(text.astype(np.uint8)), rows)


def test_the_first_tokens_have_what_context_there_is():
    "The very first is predicted from none: by its share in order 1, by how many tokens it follows in all others."
    rows = KneserNey(drawn(400, 12), 4, 12).probabilities(drawn(50, 12, seed=1))
    assert rows[0, 0] != rows[1, 0] == rows[2, 0] == rows[3, 0]
    assert rows[1, 1] != rows[2, 1] == rows[3, 1]


def test_discounts():
    "Chen and Goodman's estimate by hand; where it can't be made nothing is divided by zero, and nothing goes below it."
    y = 6 / (6 + 2 * 3)
    found = discounts(np.repeat([1, 2, 3, 4, 9], [6, 3, 2, 1, 5]))
    np.testing.assert_allclose(found, [0, 1 - 2 * y * 3 / 6, 2 - 3 * y * 2 / 3, 3 - 4 * y * 1 / 2])
    for counts in ([], [0, 0], [1], [5, 7], [2, 2, 4], [1, 4, 4, 4, 4, 4]):
        found = discounts(np.array(counts, dtype=int))
        assert (found >= 0).all() and (found <= [0, 1, 2, 3]).all()


ids = np.array([0, 1, 2, 1])
model = KneserNey(ids, 2, 3)
test_refused_streams = refused([
    (lambda: KneserNey(ids, 0, 3), ["order=0"]),
    (lambda: KneserNey(ids, True, 3), ["order=True"]),
    (lambda: KneserNey(ids, 2, 0), ["vocab_size=0"]),
    (lambda: KneserNey(ids, 5, 3), ["order=5", "4 tokens"]),
    (lambda: KneserNey(ids[:0], 1, 3), ["(0,)", "stream"]),
    (lambda: KneserNey(ids[None], 1, 3), ["(1, 4)", "stream"]),
    (lambda: KneserNey(ids, 2, 2), ["id 2", "vocabulary of 2"]),
    (lambda: KneserNey(ids - 1, 2, 3), ["id -1"]),
    (lambda: KneserNey(ids / 2, 2, 3), ["float64", "token ids"]),
    (lambda: KneserNey(torch.tensor(ids > 1), 2, 3), ["bool", "token ids"]),
    (lambda: KneserNey(ids, 2, 3, lambda counts: 0.5), ["discounts", "0.5"]),
    (lambda: KneserNey(ids, 2, 3, lambda counts: [0, 1.5, 1.5, 1.5]), ["discounts", "1.5"]),
    (lambda: KneserNey(ids, 2, 3, lambda counts: [0, float("nan"), 1, 1]), ["discounts", "nan"]),
    (lambda: model.probabilities(ids + 1), ["id 3"]),
    (lambda: model.probabilities(ids[:0]), ["(0,)"]),
])


# What was commonest between the same neighbours


def by_dictionary(train, ids, wanted, contexts, pad_id):
    "The same rule, a piece at a time."

    def around(row, i, offsets):
        inside = [row[i + o] if 0 <= i + o < len(row) else None for o in offsets]
        return tuple(None if piece == pad_id else piece for piece in inside)

    tables = [defaultdict(Counter) for _ in contexts]
    for row in train:
        for i, piece in enumerate(row):
            for table, offsets in zip(tables, contexts):
                if piece != pad_id:
                    table[around(row, i, offsets)][piece] += 1
    for row, chosen in zip(ids, wanted):
        for i in np.flatnonzero(chosen):
            seen = [(number, table[around(row, i, offsets)]) for number, (table, offsets) in enumerate(zip(tables, contexts))]
            number, found = next((number, found) for number, found in seen if found)
            yield min(found, key=lambda piece: (-found[piece], piece)), number


@given(st.integers(1, 4), st.integers(1, 12), st.integers(2, 7), st.integers(0, 99), st.booleans(),
       st.sampled_from([CONTEXTS, [()], [(-1,), ()], [(1, -3), (2,), (-1,), ()]]))
def test_equals_dictionaries(b, n, v, seed, padded, contexts):
    "Ties, the ends of rows, a single row, contexts never seen; few pieces, so that all of these come up."
    draw = np.random.default_rng(seed)
    train, ids = draw.integers(0, v, (b, n)), draw.integers(0, v, (2, 9))
    train[0, 0] = 1  # not all of it is padding
    wanted, pad_id = draw.random(ids.shape) < 0.5, 0 if padded else None
    guesses = NeighbourCounts(torch.tensor(train), v, contexts, pad_id).guess(torch.tensor(ids), torch.tensor(wanted))
    found = list(by_dictionary(train.tolist(), ids.tolist(), wanted, contexts, pad_id))
    assert list(zip(guesses.pieces.tolist(), guesses.contexts.tolist())) == found


def test_ties_go_to_the_smaller_id():
    "However often the pieces come in which order."
    for train in ([[3, 1, 3, 1]], [[1, 3, 1, 3]], [[3, 3, 1, 1]]):
        guesses = NeighbourCounts(torch.tensor(train), 4, [()]).guess(torch.tensor([[0]]), torch.tensor([[True]]))
        assert guesses.pieces.tolist() == [1]


def test_a_large_vocabulary_fits():
    "Keys of four neighbours go up to 30,000 to the fourth, 8e17; with the piece itself they would pass 64 bits."
    v = 30_000
    train = v - 1 - torch.randint(0, 3, (50, 20), generator=torch.Generator().manual_seed(0))
    wanted = torch.rand(train.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    counts = NeighbourCounts(train, v)
    guesses = counts.guess(train, wanted)
    found = by_dictionary(train.tolist(), train.tolist(), wanted.numpy(), CONTEXTS, None)
    assert list(zip(guesses.pieces.tolist(), guesses.contexts.tolist())) == list(found)
    assert (guesses.contexts == 0).all()


def test_int32_and_nothing_wanted():
    train = torch.randint(0, 5, (3, 8), generator=torch.Generator().manual_seed(0))
    counts, small = NeighbourCounts(train, 6), NeighbourCounts(train.int(), 6)
    wanted = torch.ones(3, 8, dtype=torch.bool)
    for a, b in zip(counts.guess(train, wanted), small.guess(train.int(), wanted)):
        assert torch.equal(a, b) and a.dtype == torch.int64
    assert [len(x) for x in counts.guess(train, ~wanted)] == [0, 0]


rows, gap = torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, False]])
test_refused_gaps = refused([
    (lambda: NeighbourCounts(rows, 3), ["train", "id 3"]),
    (lambda: NeighbourCounts(rows[0], 4), ["train", "(3,)"]),
    (lambda: NeighbourCounts(rows.float(), 4), ["train", "float32"]),
    (lambda: NeighbourCounts(rows * 0, 4, pad_id=0), ["train", "padding"]),
    (lambda: NeighbourCounts(rows, 4, pad_id=4), ["pad_id=4"]),
    (lambda: NeighbourCounts(rows, 4, [(-1,)]), ["contexts", "()"]),
    (lambda: NeighbourCounts(rows, 4, []), ["contexts", "()"]),
    (lambda: NeighbourCounts(rows, 4, [(0, 1), ()]), ["contexts", "(0, 1)"]),
    (lambda: NeighbourCounts(rows, 4, [(1, 1), ()]), ["contexts", "(1, 1)"]),
    (lambda: NeighbourCounts(rows, 4, [(0.5,), ()]), ["0.5", "integer"]),
    (lambda: NeighbourCounts(rows, 8000, [(-2, -1, 1, 2, 3), ()]), ["contexts", "64 bits"]),
    (lambda: NeighbourCounts(rows, 4).guess(rows + 1, gap), ["ids", "id 4"]),
    (lambda: NeighbourCounts(rows, 4).guess(rows, gap[0]), ["wanted", "(1, 3)"]),
    (lambda: NeighbourCounts(rows, 4).guess(rows, gap.long()), ["wanted", "boolean"]),
])
