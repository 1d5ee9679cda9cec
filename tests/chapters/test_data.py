"""Rectangles, masks and batches against PyTorch's, with random input, and with every kind of bad input."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from annotated_nlp import data
from annotated_nlp.corpora import loaders
from annotated_nlp.data import Batch, batches, draws, forever, pad, row_length

sequences = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=20), min_size=1, max_size=30)
id_pairs = st.lists(st.tuples(*[st.lists(st.integers(1, 500), min_size=1, max_size=12)] * 2), min_size=1, max_size=40)


@given(sequences, st.integers(-5, 0), st.integers(0, 10))
def test_pad_is_pytorchs(rows, pad_id, extra):
    ids, mask = pad(rows, pad_id)
    reference = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    assert torch.equal(ids, reference) and ids.dtype == reference.dtype == torch.int64
    assert mask.dtype == torch.bool and torch.equal(mask, reference != pad_id)
    wide, wide_mask = pad(rows, pad_id, length=ids.shape[1] + extra)
    assert wide.shape == wide_mask.shape == (len(rows), ids.shape[1] + extra)
    assert torch.equal(wide[:, : ids.shape[1]], ids) and not wide_mask[:, ids.shape[1] :].any()


@pytest.mark.parametrize("arguments, message", [
    (([],), "sequences is empty"), (([[1], []],), r"sequences\[1\] is empty"),
    (([[1], [1, 2, 3]],), r"sequences\[1\] has 3 tokens, more than length=2"),
])
def test_pad_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pad(*arguments, length=2)


def test_types_of_arguments_are_named():
    """The module as users have it, without the type checks that the tests add."""
    plain = {"__name__": data.__name__, "__package__": "annotated_nlp"}
    exec(Path(data.__file__).read_text(encoding="utf-8"), plain)
    for sequences in ([[1.5, 2.0]], [[1], [2.5]], [[True]]):
        with pytest.raises(TypeError, match="sequences and pad_id=0 must be whole numbers"):
            plain["pad"](sequences)
    with pytest.raises(TypeError, match="sequences and pad_id=0.5 must be whole numbers"):
        plain["pad"]([[1, 2]], 0.5)


def test_loaders_are_handed_on():
    """Four corpora were promised as `data.NAME`; the module's own `__all__` says so. The others are called where they are."""
    public = {"fashion_mnist", "movie_reviews", "review_sentences", "verses"}
    assert public <= set(data.__all__) and all(getattr(data, name) is getattr(loaders, name) for name in public)


def unpadded(batch):
    return [(s[m].tolist(), t[n].tolist()) for s, m, t, n in zip(*batch, strict=True)]


@given(id_pairs, st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 2**40))
@settings(max_examples=200)
def test_every_pair_once_an_epoch(pairs, size, shuffle, bucket, seed):
    loader = batches(pairs, size, shuffle=shuffle, key=row_length if bucket else None, seed=seed)
    for _ in range(2):
        epoch = list(loader)
        assert len(epoch) == len(loader) and all(len(batch.src) <= size for batch in epoch)
        assert sum(len(batch.src) < size for batch in epoch) <= 1
        assert sorted(pair for batch in epoch for pair in unpadded(batch)) == sorted(pairs)
        for src, src_mask, tgt, tgt_mask in epoch:
            for ids, mask in ((src, src_mask), (tgt, tgt_mask)):
                assert mask.any(1).all() and mask.any(0).all()  # no empty row, no column of padding alone
                assert torch.equal(ids > 0, mask)
    if not shuffle and not bucket:
        assert [pair for batch in epoch for pair in unpadded(batch)] == pairs


@given(id_pairs, st.integers(1, 9), st.integers(0, 2**40))
def test_a_seed_gives_the_same_epochs(pairs, size, seed):
    one, two = (batches(pairs, size, seed=seed) for _ in range(2))
    for _ in range(3):
        for a, b in zip(one, two, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    resumed = batches(pairs, size, seed=seed)
    resumed.epoch = 3
    assert [unpadded(batch) for batch in resumed] == [unpadded(batch) for batch in one]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 9))
def test_sorted_batches_keep_the_bound(lengths, size):
    """The chapter's bound on padding; and no way of dealing into these batches is better (brute force below)."""
    pairs = [([1] * length, [1] * length) for length in lengths]
    padding = sum(int((~batch.src_mask).sum()) for batch in batches(pairs, size))
    assert padding <= size * (max(lengths) - min(lengths))


def test_sorting_is_best_by_brute_force():
    from itertools import permutations

    for lengths in ([1, 2, 3, 5, 8, 13], [4, 4, 1, 9, 9, 2]):
        pairs = [([1] * length, [1] * length) for length in lengths]
        for size in (2, 3):
            cells = sum(batch.src.numel() for batch in batches(pairs, size))
            orders = permutations(lengths)
            assert cells == min(sum(size * max(o[i : i + size]) for i in range(0, 6, size)) for o in orders)


def test_bucketing_saves_and_still_shuffles():
    rng = random.Random(0)
    pairs = [([i + 1] * rng.randint(1, 40), [i + 1] * rng.randint(1, 40)) for i in range(2000)]
    bucketed, unsorted = (
        sum(b.src.numel() + b.tgt.numel() for b in batches(pairs, 32, key=key)) for key in (row_length, None)
    )
    assert bucketed < 0.75 * unsorted
    loader = batches(pairs, 32)
    first, second = ([unpadded(batch) for batch in loader] for _ in range(2))
    assert first != second
    widths = [batch[0][0] for batch in first]
    assert widths != sorted(widths, key=len), "batches come in shuffled order"


def test_orders_of_equal_pairs_are_uniform():
    """All 24 orders of four pairs of equal length come equally often: chi-square with 23 degrees of freedom."""
    pairs = [([i], [i]) for i in (1, 2, 3, 4)]
    loader = batches(pairs, 4)
    counts = Counter(tuple(next(iter(loader)).src[:, 0].tolist()) for _ in range(2400))
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 49.7  # the 99.9th percentile


@pytest.mark.parametrize("pairs, size, message", [
    ([], 4, "rows is empty"), ([([1], [1]), ([1], [])], 4, r"rows\[1\] has an empty target"),
    ([([], [1])], 4, r"rows\[0\] has an empty source"), ([([1], [1])], 0, "size=0"),
])
def test_batches_refuses(pairs, size, message):
    with pytest.raises(ValueError, match=message):
        batches(pairs, size)


@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 9), st.booleans(), st.booleans())
def test_rows_of_any_kind(rows, size, shuffle, drop_last):
    """A batch is what `collate` makes; here a tuple. Each row comes once, but for those of a dropped last batch."""
    loader = batches(rows, size, collate=tuple, key=None, shuffle=shuffle, drop_last=drop_last)
    for _ in range(2):
        epoch = list(loader)
        assert len(epoch) == len(loader) == (len(rows) // size if drop_last else -(-len(rows) // size))
        left = Counter(rows) - Counter(row for batch in epoch for row in batch)
        assert left.total() == (len(rows) % size if drop_last else 0)
    if not shuffle:
        assert [row for batch in epoch for row in batch] == rows[: size * len(loader) if drop_last else None]


def test_rows_left_out_are_others_each_time():
    "Sorting must not decide which rows don't fill a batch: the longest would never be read."
    rows = [[1] * n for n in range(1, 8)]
    loader = batches(rows, 2, collate=tuple, key=len, drop_last=True)
    left_out = [set(range(1, 8)) - {len(row) for batch in loader for row in batch} for _ in range(60)]
    assert {len(one) for one in left_out} == {1} and set.union(*left_out) == set(range(1, 8))


def test_rows_of_one_key_come_together():
    rows = [(i, i % 3) for i in range(30)]
    epoch = list(batches(rows, 10, collate=list, key=lambda row: row[1]))
    assert sorted(map(len, epoch)) == [10] * 3 and all(len({kind for _, kind in batch}) == 1 for batch in epoch)


@pytest.mark.parametrize("row, length", [
    (([1, 2], [3]), (2, 3)), (([1], [2, 3, 4]), (3, 4)), ([7, 8, 9], (3, 3)), (([1, 2, 3], 5), (3, 3)), ((1, 2), (2, 2)),
])
def test_length_of_a_row(row, length):
    assert row_length(row) == length
    assert row_length(torch.zeros(4, 2)) == (4, 4)
    assert row_length((torch.zeros(3), torch.zeros(5))) == (5, 8)  # a pair of tensors, as one of lists


def test_order_may_be_the_callers():
    """With a function of PyTorch's or Python's own that shuffles, the order is theirs, batch by batch."""
    rows = list(range(11))
    torch.manual_seed(3)
    given_order = torch.cat([*batches(rows, 4, collate=torch.tensor, key=None, shuffle=torch.randperm)])
    torch.manual_seed(3)
    assert torch.equal(given_order, torch.randperm(11))
    draw, same = random.Random(3), random.Random(3)
    by_sixes, sampled = (lambda row: row // 6), (lambda n: draw.sample(range(n), n))
    loader = batches(rows, 4, collate=list, key=by_sixes, shuffle=sampled)
    ordered = sorted(same.sample(rows, 11), key=by_sixes)
    assert list(loader) == same.sample([ordered[i : i + 4] for i in (0, 4, 8)], 3)


def test_draws_are_uniform_and_endless():
    rows = "abcd"
    torch.manual_seed(0)
    drawn = draws(rows, 5, collate="".join)
    counts = Counter(letter for _ in range(800) for letter in next(drawn))
    assert sum((counts[row] - 1000) ** 2 / 1000 for row in rows) < 16.3  # chi-square, the 99.9th percentile of 3
    torch.manual_seed(1)
    again = next(drawn)
    torch.manual_seed(1)
    assert again == "".join(rows[i] for i in torch.randint(4, (5,)))


@pytest.mark.parametrize("rows, size, message", [([], 4, "rows is empty"), ([1], 0, "size=0")])
def test_draws_refuses(rows, size, message):
    with pytest.raises(ValueError, match=message):
        draws(rows, size, collate=list)


def test_forever_starts_new_epochs():
    pairs = [([i], [i, i]) for i in range(1, 8)]
    endless, loader = forever(batches(pairs, 2, seed=5)), batches(pairs, 2, seed=5)
    for _ in range(3):
        for expected in loader:
            assert all(torch.equal(a, b) for a, b in zip(next(endless), expected, strict=True))


def test_forever_refuses():
    with pytest.raises(TypeError, match="not an iterator"):
        forever(iter(batches([([1], [1])], 1)))
    with pytest.raises(ValueError, match="batches is empty"):
        forever([])


def test_batch_moves():
    batch = next(iter(batches([([1, 2], [3])], 1)))
    moved = batch.to("meta")
    assert isinstance(moved, Batch) and {tensor.device.type for tensor in moved} == {"meta"}
    assert [tensor.shape for tensor in moved] == [tensor.shape for tensor in batch]
