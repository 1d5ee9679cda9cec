"The table of claims: differences with their intervals, verdicts by rule, and rows computed from what is stored."

from functools import partial

import messages
import numpy as np
import pytest
import torch
from annotated_nlp import lab
from scipy.stats import bootstrap

# The bootstrap


def scores(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def half_width(found):
    return (found["high"] - found["low"]) / 2


def test_items_alone_agree_with_the_normal_approximation():
    first, second = scores(2000, seed=1) + 0.1, scores(2000, seed=2)
    second = 0.7 * first + 0.3 * second  # hard items are hard for both
    found = lab.difference(first, second, unit="nats")
    error = (first - second).std() / 2000**0.5
    assert found["effect"] == pytest.approx((first - second).mean().item())
    assert half_width(found) == pytest.approx(1.96 * error.item(), rel=0.04)
    assert lab.resampled(first, second).std() == pytest.approx(error.item(), rel=0.03)
    assert (found["n_test"], found["seeds"], found["unit"]) == (2000, 1, "nats")


def test_items_alone_agree_with_scipy():
    first, second = scores(300, seed=1).exp(), scores(300, seed=2)  # not symmetric
    theirs = bootstrap((first.numpy(), second.numpy()), lambda a, b, axis: a.mean(axis) - b.mean(axis), paired=True,
                       vectorized=True, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0))
    ours = lab.difference(first, second, resamples=20_000)
    error = theirs.standard_error
    assert [ours["low"], ours["high"]] == pytest.approx([*theirs.confidence_interval], abs=0.05 * error)


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("paired", [False, True])
def test_items_and_seeds_add_their_variances(n_seeds, paired):
    "Items: the variance of a mean over them, all seeds in. Seeds: the unbiased one, s - 1 in the denominator."
    items, n = scores(500, seed=3), 500
    first = items + 0.2 * scores(n_seeds, 1, seed=4) + 0.1 * scores(n_seeds, n, seed=5)
    second = 0.8 * items + 0.1 * scores(n_seeds, 1, seed=6)
    of_items = (first - second).mean(0).var(correction=0) / n
    if paired:
        of_seeds = (first - second).mean(1).var() / n_seeds
    else:
        of_seeds = (first.mean(1).var() + second.mean(1).var()) / n_seeds
    drawn = lab.resampled(first, second, paired=paired, resamples=20_000)
    assert drawn.var() == pytest.approx((of_items + of_seeds).item(), rel=0.05)
    assert drawn.mean().item() == pytest.approx((first - second).mean().item(), abs=0.05 * drawn.std().item())


def test_interval_covers_what_is_known():
    "Items, seeds and their interplay of known variance: the truth, 0, lies within in about 95 of 100 experiments."
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(100):
        draw = partial(torch.randn, generator=generator)
        items = draw(200)
        arms = [items + 0.3 * draw(200) + 0.02 * draw(10, 1) + 0.3 * draw(10, 200) for _ in range(2)]
        found = lab.difference(*arms, resamples=500)
        covered += found["low"] <= 0 <= found["high"]
    assert 89 <= covered <= 99


def test_rows_that_no_seed_made():
    "A rule has items alone; only the other arm's seeds are drawn."
    first, second = scores(3, 400, seed=1), scores(400, seed=2)
    of_items = (first.mean(0) - second).var(correction=0) / 400
    of_seeds = first.mean(1).var() / 3
    assert lab.resampled(first, second, resamples=20_000).var() == pytest.approx((of_items + of_seeds).item(), rel=0.05)
    assert lab.difference(first, second)["seeds"] == 3


def test_score_of_several_numbers():
    "F1 from true positives, false positives and misses; as the mean where the score is one."
    parts = torch.randint(0, 4, (2, 3, 400, 3), generator=torch.Generator().manual_seed(0))

    def f1(means):
        right, wrong, missed = means.unbind(-1)
        return 2 * right / (2 * right + wrong + missed)

    found = lab.difference(*parts, score=f1)
    one, other = (sum(2 * a / (2 * a + b + c) for a, b, c in arm.sum(1).tolist()) / 3 for arm in parts)
    assert found["effect"] == pytest.approx(one - other) and found["low"] < found["effect"] < found["high"]
    assert (found["n_test"], found["seeds"]) == (400, 3)
    first, second = scores(2, 3, 50).unbind()
    assert lab.difference(first[..., None], second[..., None], score=lambda means: means[..., 0]) == lab.difference(first, second)


def test_same_seed_same_interval():
    first, second = scores(3, 100, seed=1), scores(3, 100, seed=2)
    found = lab.difference(first, second)
    assert lab.difference(first, second) == found != lab.difference(first, second, seed=1)
    assert lab.difference(first.tolist(), second.numpy()) == found
    assert all(type(found[key]) is float for key in ("effect", "low", "high"))


def test_items_stay_together():
    "Two arms that differ by the same on every item and every seed differ by that in every draw; bools are numbers."
    first = scores(3, 100)
    first = first - first.mean(1, keepdim=True)
    found = lab.difference(first, first - 0.5)
    assert [found["effect"], found["low"], found["high"]] == pytest.approx([0.5] * 3)
    assert lab.difference([True] * 20, [False] * 20)["low"] == 1


def test_memory_does_not_change_what_is_drawn():
    "Many items are drawn in several parts."
    first, second = scores(60_000, seed=1), scores(60_000, seed=2)
    drawn = lab.resampled(first, second, resamples=300)
    assert len(drawn) == 300 and drawn.std().item() == pytest.approx((first - second).std().item() / 60_000**0.5, rel=0.15)


def refused(first, second, **options):
    return lambda: lab.difference(first, second, **options)


test_bad_arms = messages.refused([
    (refused(scores(0), scores(0)), ["first", "(0,)"]),
    (refused(scores(3, 0), scores(3, 0)), ["first", "(3, 0)"]),
    (refused(torch.tensor(1.0), torch.tensor(1.0)), ["first", "(items)"]),
    (refused(scores(2, 3, 4), scores(2, 3, 4)), ["first", "(seeds, items)"]),
    (refused(scores(5), scores(5), score=len), ["first", "(seeds, items, parts)"]),
    (refused(scores(3, 8), scores(3, 9)), ["(8,)", "(9,)", "same items"]),
    (refused(scores(8, 2), scores(8, 3), score=len), ["(8, 2)", "(8, 3)"]),
    (refused(scores(3, 8), scores(2, 8)), ["(3, 8)", "(2, 8)", "seeds"]),
    (refused(scores(3, 8), scores(8), paired=True), ["(3, 8)", "(8,)", "seeds"]),
    (refused([0.5, float("nan")], [0.5, 1.0]), ["first", "nan", "(1,)"]),
    (refused([0.5, 1.0], [[0.5, float("inf")]]), ["second", "inf", "(0, 1)"]),
    (refused(scores(8), scores(8), resamples=0), ["resamples=0"]),
])
