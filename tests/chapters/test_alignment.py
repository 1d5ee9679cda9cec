"""Aligning two clouds of word vectors, against SciPy, NumPy and the definitions."""

import gzip

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from messages import says
from torch.testing import assert_close

from annotated_nlp.alignment import align, answered, centred, count_neighbours
from annotated_nlp.alignment import count_vectors, csls, least_squares, mutual
from annotated_nlp.alignment import procrustes
from annotated_nlp.corpora import packages


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def turn(d, seed=0):
    return torch.linalg.qr(drawn(d, d, seed=seed))[0]


# counts and vectors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 50])
def test_counts_are_those_of_two_loops(window):
    ids = torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(window))  # 5 and 6 are unknown
    wanted = torch.zeros(5, 5)
    for i, word in enumerate(ids.tolist()):
        for j, other in enumerate(ids.tolist()):
            if 0 < abs(i - j) <= window and word < 5 and other < 5:
                wanted[word, other] += 1
    assert_close(count_neighbours(ids, 5, window), wanted)


@pytest.mark.parametrize("smoothing", [0.75, 1.0])
def test_vectors_factorise_the_table(smoothing):
    counts = torch.randint(0, 5, (30, 30), generator=torch.Generator().manual_seed(1)).float()
    counts += counts.T.clone()
    share = counts.numpy().sum(0) ** smoothing
    with np.errstate(divide="ignore"):
        table = np.log(counts.numpy() / counts.numpy().sum(1, keepdims=True) / (share / share.sum())).clip(min=0)
    u, s, _ = np.linalg.svd(table)
    vectors = count_vectors(counts, 6, smoothing)
    wanted = torch.from_numpy(u[:, :6] * np.sqrt(s[:6]))
    assert_close(vectors @ vectors.T, (wanted @ wanted.T).float(), atol=1e-3, rtol=1e-3)


def test_vectors_refuse():
    counts = torch.ones(4, 4)
    with pytest.raises(ValueError, match=says("d_model=5", "4 words")):
        count_vectors(counts, 5)
    with pytest.raises(ValueError, match=says("counts", "negative")):
        count_vectors(-counts, 2)
    with pytest.raises(ValueError, match=says("no neighbours", "drop it")):
        count_vectors(torch.block_diag(counts, torch.zeros(1, 1)), 2)
    with pytest.raises(ValueError, match=says("smoothing=0")):
        count_vectors(counts, 2, 0)
    with pytest.raises(ValueError, match=says("negative", "vocab_size")):
        count_neighbours(torch.tensor([1, -1]), 3)
    with pytest.raises(ValueError, match=says("zeros", "drop")):
        centred(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


# the two maps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d", [(40, 6), (6, 6), (3, 6), (1, 6)])
def test_rotation_is_scipys(n, d):
    x, y = drawn(n, d), drawn(n, d, seed=1)
    ours, (theirs, scale) = procrustes(x, y), scipy.linalg.orthogonal_procrustes(x.numpy(), y.numpy())
    assert_close(ours @ ours.T, torch.eye(d, dtype=torch.double))
    # with fewer pairs than directions the best rotation is not the only one, but what it gains is
    assert_close((x @ ours * y).sum(), torch.tensor(scale, dtype=torch.double))
    if n >= d:
        assert_close(ours, torch.from_numpy(theirs))


@pytest.mark.parametrize("n, d", [(40, 6), (6, 6), (3, 6)])
def test_least_squares_is_numpys(n, d):
    x, y = drawn(n, d), drawn(n, 4, seed=1)
    assert_close(least_squares(x, y), torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]))


def test_a_planted_rotation_is_found():
    x, w = drawn(8, 8), turn(8, seed=3)
    assert_close(procrustes(x, x @ w), w)
    assert torch.linalg.det(procrustes(x, x @ torch.diag(torch.tensor([1.0] * 7 + [-1.0], dtype=torch.double)))) < 0


def test_a_rotation_keeps_cosines():
    x, y = drawn(20, 5), drawn(20, 5, seed=1)
    x2 = x @ procrustes(x, y)
    assert_close(x2 @ x2.T, x @ x.T)


@pytest.mark.parametrize("fit", [procrustes, least_squares])
def test_maps_refuse_no_pairs(fit):
    with pytest.raises(ValueError, match=says("no rows", "one pair")):
        fit(torch.zeros(0, 3), torch.zeros(0, 3))


# scores and the loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 99])
def test_csls_is_its_definition(k):
    q, keys = drawn(7, 4), drawn(9, 4, seed=1)
    cosine = np.array([[float(a @ b / a.norm() / b.norm()) for b in keys] for a in q])
    near = lambda row: np.mean(sorted(row)[-k:])
    wanted = [[2 * cosine[i, j] - near(cosine[i]) - near(cosine[:, j]) for j in range(9)] for i in range(7)]
    assert_close(csls(q, keys, k), torch.tensor(wanted))


def test_pairs_choose_each_other():
    scores = drawn(12, 15)
    wanted = [[i, j] for i in range(12) for j in range(15) if scores[i, j] == scores[i].max() == scores[:, j].max()]
    assert mutual(scores).tolist() == wanted


def test_best_answers_are_counted():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.2, 0.3], [0.0, 0.1, 0.2]])
    assert answered(scores, {0: {2}, 2: {0, 2}}).tolist() == [False, True]
    assert answered(scores, {0: {2}, 1: {1}}, n=2).tolist() == [True, False]
    with pytest.raises(ValueError, match=says("n=4", "3 words")):
        answered(scores, {0: {1}}, n=4)


def clouds(noise=0.05, n=120, d=10):
    x = centred(drawn(n, d))
    names = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    y = F.normalize((x @ turn(d, seed=2) + noise * drawn(n, d, seed=4))[names], dim=1)
    return x, y, torch.stack([names, torch.arange(n)], 1)


def test_the_loop_finds_all_words_from_few():
    x, y, pairs = clouds(noise=0.03)
    right = {i: {j} for i, j in pairs.tolist()}
    share = lambda aligned: answered(aligned.scores, right).float().mean()
    once, looped = align(x, y, pairs[:6], rounds=0), align(x, y, pairs[:6], rounds=10)
    assert share(looped) > 0.95 > share(once) + 0.1
    assert once.pairs == [6] and looped.pairs[0] == 6 < looped.pairs[1] < looped.pairs[-1]
    assert_close(looped.rotation @ looped.rotation.T, torch.eye(10, dtype=torch.double))


def test_the_loop_stops_when_nothing_changes():
    x, y, pairs = clouds(noise=0.0)
    aligned = align(x, y, pairs, rounds=50)
    assert len(aligned.pairs) <= 3
    assert_close(x[pairs[:, 0]] @ aligned.rotation, y[pairs[:, 1]])


def test_the_loop_refuses():
    x, y, pairs = clouds()
    with pytest.raises(ValueError, match=says("seeds is empty")):
        align(x, y, pairs[:0])
    with pytest.raises(ValueError, match=says("rows 0 to 120", "of 120 in y")):
        align(x, y, torch.tensor([[0, 0], [1, 120]]))
    with pytest.raises(ValueError, match=says("rounds=-1")):
        align(x, y, pairs, rounds=-1)


# the dictionary -------------------------------------------------------------------------------------------------------

ENTRIES = """00-database-short
English-French FreeDict Dictionary
accost /əkɔst/
aborder, adresser la parole à
account /əkaunt/ <n>
1. facture
2. compte; note
account for /əkauntfər/
1. expliquer
Achilles /əkiliːz/
Achille
"""


def test_dictionary_by_hand(tmp_path):
    (tmp_path / "freedict-eng-fra.dict.dz").write_bytes(gzip.compress(ENTRIES.encode()))
    found = packages.dictionary("eng", "fra", tmp_path)
    assert found == {("accost", "aborder"), ("account", "facture"), ("account", "compte"), ("account", "note"), ("achilles", "achille")}
    with pytest.raises(FileNotFoundError, match=says("freedict-eng-deu.dict.dz", "apt-get install dict-freedict-eng-deu")):
        packages.dictionary("eng", "deu", tmp_path)


@pytest.mark.skipif(not packages.DICTIONARIES.is_dir(), reason="needs Debian's package dict-freedict-eng-fra")
def test_dictionary():
    found = packages.dictionary("eng", "fra")
    assert len(found) > 10_000 and {("bread", "pain"), ("king", "roi"), ("water", "eau")} <= found
    assert all(a == a.lower() and " " not in a + b for a, b in found)
