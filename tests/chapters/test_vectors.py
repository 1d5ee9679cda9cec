"Words as vectors: gensim's updates, closed forms, brute force; and what must not matter."

import math

import pytest
import torch
import torch.nn.functional as F
from gensim.models import Word2Vec
from torch import nn
from torch.testing import assert_close

import test_invariants
from parity import lengths
from annotated_nlp.parts.pooling import last_state, max_pool, mean_pool
from annotated_nlp.vectors import BagEncoder, ConvolutionEncoder, RecurrentEncoder
from annotated_nlp.vectors import SkipGram, TextClassifier, keep_probability
from annotated_nlp.vectors import negative_sampling_loss, neighbours, noise_distribution
from annotated_nlp.vectors import pointwise_mutual_information, window_pairs

unchecked = test_invariants.unchecked
V, REAL = 20, lengths(7, 4, 6, 2)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Static vectors


def test_window_pairs_by_brute_force():
    ids = torch.randint(V, (9,))
    for window in (1, 3, 20):
        wanted = [(ids[i].item(), ids[j].item()) for i in range(9) for j in range(9) if 0 < abs(i - j) <= window]
        assert sorted(map(tuple, window_pairs(ids, window).tolist())) == sorted(wanted)
    assert window_pairs(ids[:1], 5).shape == window_pairs(ids[:0], 5).shape == (0, 2)


def test_reach_is_drawn_evenly():
    "A neighbour d positions away is in the window with probability (window + 1 - d) / window."
    draw, ids = torch.Generator().manual_seed(1), torch.arange(30_000)
    pairs = window_pairs(ids, 4, draw)
    apart = (pairs[:, 0] - pairs[:, 1]).abs().bincount()[1:] / (2 * len(ids))
    assert_close(apart, torch.tensor([1.0, 0.75, 0.5, 0.25]), atol=0.01, rtol=0)


@pytest.mark.parametrize("negatives", [1, 4])
def test_updates_are_gensims(negatives):
    "One sentence, its negatives fixed by gensim's own table: the same steps, up to its table for σ and the order of its sum."
    rate, d = 0.003, 6
    theirs = Word2Vec(vector_size=d, window=1, min_count=1, sg=1, hs=0, negative=negatives, sample=0, workers=1,
                      alpha=rate, min_alpha=rate, epochs=1)
    theirs.build_vocab([["a", "b", "c"]])
    a, b, c = (theirs.wv.key_to_index[word] for word in "abc")
    ours = SkipGram(3, d)
    tables = ours.words.weight, ours.contexts.weight
    for table in tables:
        nn.init.normal_(table)
    before = [table.detach().clone() for table in tables]
    theirs.wv.vectors[:], theirs.syn1neg[:] = (table.numpy() for table in before)
    theirs.cum_table[:] = [0] * c + [2**31 - 1] * (3 - c)  # every draw is c
    theirs.train([["a", "b"]], total_examples=1, epochs=1)
    optimizer = torch.optim.SGD(ours.parameters(), lr=rate)
    for word, near in ((b, a), (a, b)):  # gensim predicts the centre from each neighbour
        optimizer.zero_grad()
        negative_sampling_loss(ours(torch.tensor([word]), torch.tensor([[near, *[c] * negatives]]))).backward()
        optimizer.step()
    for start, table, other in zip(before, tables, (theirs.wv.vectors, theirs.syn1neg)):
        found, wanted = table.detach() - start, torch.tensor(other) - start
        assert wanted.abs().max() > 3e-4
        assert_close(found, wanted, atol=0.03 * wanted.abs().max().item(), rtol=0)


def test_loss_by_hand():
    scores = torch.tensor([[2.0, -1.0, 0.5]])
    sigmoid = lambda x: 1 / (1 + math.exp(-x))
    wanted = -math.log(sigmoid(2)) - math.log(sigmoid(1)) - math.log(sigmoid(-0.5))
    assert negative_sampling_loss(scores).item() == pytest.approx(wanted)
    assert SkipGram(5, 3)(torch.tensor([1]), torch.tensor([[2, 3]])).eq(0).all()  # contexts begin at zero


def test_minimum_is_pmi():
    "Of the expected loss, with k negatives drawn by frequency, for vectors wide enough: q.k + log k is PMI (Levy and Goldberg 2014)."
    counts, negatives = torch.randint(1, 9, (5, 5)).double(), 3
    counts += counts.T.clone()
    q, k = (torch.randn(5, 5, dtype=torch.double, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.LBFGS([q, k], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe")
    chance = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()

    def closure():
        optimizer.zero_grad()
        scores = q @ k.T
        loss = -(counts * F.logsigmoid(scores) + negatives * chance * F.logsigmoid(-scores)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_close((q @ k.T).detach() + math.log(negatives), pointwise_mutual_information(counts), atol=1e-4, rtol=0)


def test_pmi_by_hand():
    found = pointwise_mutual_information(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    wanted = [[math.log(2 * 4 / (2 * 3)), -math.inf], [math.log(1 * 4 / (2 * 3)), math.log(1 * 4 / (2 * 1))]]
    assert_close(found, torch.tensor(wanted))


def test_draws():
    counts = torch.tensor([16, 0, 81])
    assert_close(noise_distribution(counts), torch.tensor([8, 0, 27]) / 35)
    assert_close(noise_distribution(counts, power=0.0), torch.tensor([0.5, 0.0, 0.5]))
    kept = keep_probability(torch.tensor([10, 990]), threshold=0.1)
    assert_close(kept, torch.tensor([1.0, math.sqrt(0.1 / 0.99)]))


def test_neighbours_by_brute_force():
    vectors = torch.randn(8, 3)
    cosines = F.cosine_similarity(vectors, vectors[2:3])
    found, rows = neighbours(vectors, vectors[2], 3, leave_out=[2, 5])
    wanted = sorted((i for i in range(8) if i not in (2, 5)), key=lambda i: -cosines[i])[:3]
    assert rows.tolist() == wanted
    assert_close(found, cosines[rows])


# n to 1


@pytest.mark.parametrize("pool,wanted", [(mean_pool, lambda x: x.mean(0)), (max_pool, lambda x: x.amax(0)), (last_state, lambda x: x[-1])])
def test_pools(pool, wanted):
    x = torch.randn(4, 7, 3)
    junk = x.masked_fill(~REAL[..., None], math.nan)
    found = pool(junk, REAL)
    for row, n in enumerate((7, 4, 6, 2)):
        assert_close(found[row], wanted(x[row, :n]))
    leaf = x.clone().requires_grad_()
    none = pool(leaf, torch.zeros_like(REAL))
    none.sum().backward()
    assert none.eq(0).all() and leaf.grad.eq(0).all()


@pytest.mark.parametrize("make", [BagEncoder, lambda d: ConvolutionEncoder(d, 6), lambda d: RecurrentEncoder(d, 6)])
def test_encoders_see_no_padding(make):
    "Junk and more padding change nothing; each row as if alone."
    encoder, x = make(3).eval(), torch.randn(4, 7, 3)
    found = encoder(x, REAL)
    assert found.shape == (4, encoder.d_out)
    junk = torch.where(REAL[..., None], x, torch.full_like(x, 1e4))
    assert torch.equal(encoder(junk, REAL), found)
    assert_close(encoder(F.pad(x, (0, 0, 0, 3)), F.pad(REAL, (0, 3))), found)
    for row, n in enumerate((7, 4, 6, 2)):
        assert_close(encoder(x[row : row + 1, :n], REAL[row : row + 1, :n])[0], found[row])


def test_convolution_by_brute_force():
    encoder, x = ConvolutionEncoder(3, 4, widths=(2, 3)), torch.randn(1, 5, 3)
    found, wanted = encoder(x, torch.ones(1, 5, dtype=torch.bool))[0], []
    for filters, width in zip(encoder.convolutions, (2, 3)):
        ahead = torch.cat([x[0], torch.zeros(width - 1, 3)])
        answers = [[(ahead[i : i + width].T * w).sum() + b for i in range(5)] for w, b in zip(filters.weight, filters.bias)]
        wanted += [max(0.0, max(row).item()) for row in answers]
    assert_close(found.detach(), torch.tensor(wanted))


def test_order_matters_to_two_of_three():
    x, whole = torch.randn(1, 6, 4), torch.ones(1, 6, dtype=torch.bool)
    turned = x.flip(1)
    assert_close(BagEncoder(4)(x, whole), BagEncoder(4)(turned, whole))
    for encoder in (ConvolutionEncoder(4, 6), RecurrentEncoder(4, 6)):
        assert (encoder(x, whole) - encoder(turned, whole)).abs().max() > 1e-3


def test_classifier_joins_the_parts():
    model, ids = TextClassifier(nn.Embedding(V, 5), BagEncoder(5), 3), torch.randint(V, (4, 7))
    assert_close(model(ids, REAL), model.head(mean_pool(model.embedding.weight[ids], REAL)))


# Wrong calls


WRONG = {
    "window": (lambda: window_pairs(torch.arange(4), 0), "window=0"),
    "texts": (lambda: window_pairs(torch.zeros(2, 2, dtype=torch.long), 2), "one text at a time"),
    "word": (lambda: SkipGram(4, 2)(torch.tensor([4]), torch.tensor([[1]])), "id 4"),
    "context": (lambda: SkipGram(4, 2)(torch.tensor([0]), torch.tensor([[9]])), "id 9"),
    "negatives": (lambda: negative_sampling_loss(torch.zeros(2, 1)), "no negatives"),
    "power": (lambda: noise_distribution(torch.ones(3), 2.0), "power=2.0"),
    "counts": (lambda: noise_distribution(torch.tensor([1, -1])), "negative"),
    "threshold": (lambda: keep_probability(torch.ones(3), 0.0), "threshold=0.0"),
    "pmi": (lambda: pointwise_mutual_information(torch.tensor([[1.0, 0.0], [1.0, 0.0]])), "leave it out"),
    "neighbours": (lambda: neighbours(torch.ones(3, 2), torch.ones(2), 3, [0]), "n=3"),
    "pool": (lambda: mean_pool(torch.zeros(2, 3, 4), torch.ones(2, 2, dtype=torch.bool)), "mask"),
    "filters": (lambda: ConvolutionEncoder(4, 7), "d_out=7"),
    "odd": (lambda: RecurrentEncoder(4, 7), "d_out=7"),
}


@pytest.mark.parametrize("call,words", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_refused(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
        call()
