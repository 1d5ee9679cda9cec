"""Speculative decoding against greedy decoding and known distributions, with good drafts and bad ones."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import says
from scipy.stats import chisquare

from annotated_nlp.decoding import filter_logits, greedy
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.parts.speculative import lookup, reading, speculate

V, PROMPT = 11, [1, 5, 2]


def small_gpt(seed=0, spread=6.0):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=V, max_len=40, d_model=16, n_heads=2, n_layers=2)).eval()
    for block in model.stack.blocks:  # logits that depend on the text
        for p in block.parameters():
            p.data.mul_(spread)
    return model


def begun(model, n=20):
    return model.begin(torch.tensor([PROMPT]), None, n)


def certain(guess):
    guess = torch.tensor(guess, dtype=torch.long)
    return guess, torch.nn.functional.one_hot(guess, V).float()


def wild(seed):
    "A draft that draws from random distributions, and sometimes guesses less than it may."
    chance = torch.Generator().manual_seed(seed)

    def draft(new, n):
        n = int(torch.randint(n + 1, (), generator=chance))
        q = torch.randn(n, V, generator=chance).mul(2).softmax(-1)
        return torch.multinomial(q, 1, generator=chance)[:, 0] if n else torch.zeros(0, dtype=torch.long), q

    return draft


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 6), st.sampled_from([None, 0, 7]), st.booleans())
def test_greedy_whatever_the_draft(seed, n, ahead, stop_id, looks):
    model = small_gpt(seed % 7)
    draft = lookup(PROMPT, V) if looks else wild(seed)
    ours = speculate(reading(model), *begun(model, n), draft, ahead=ahead, max_new_tokens=n, stop_id=stop_id)
    line = greedy(model.step, *begun(model, n), max_new_tokens=n, stop_id=stop_id)
    assert torch.equal(ours.ids, line.ids) and torch.equal(ours.lengths, line.lengths)
    assert torch.allclose(ours.scores, line.scores, atol=1e-4)


def test_a_right_draft_saves_calls_and_a_wrong_one_costs_none():
    model, calls = small_gpt(), []

    def read(ids, state):
        calls.append(ids.shape[1])
        return reading(model)(ids, state)

    right = greedy(model.step, *begun(model), max_new_tokens=20).ids[0].tolist()
    for offset, expected in ((0, [5, 5, 5, 5]), (1, [5] * 15 + [5, 4, 3, 2, 1])):
        calls.clear()

        def draft(new, n, offset=offset):
            return certain([(t + offset) % V for t in right[len(new) : len(new) + n]])

        assert speculate(read, *begun(model), draft, ahead=4, max_new_tokens=20).ids[0].tolist() == right
        assert calls == expected


class Nothing(NamedTuple):
    def reorder(self, index):
        return self


@pytest.mark.parametrize("cuts", [{}, dict(top_k=2), dict(top_p=0.7), dict(temperature=2.0)])
@pytest.mark.parametrize("ahead", [1, 3])
def test_texts_are_drawn_by_their_probability(cuts, ahead):
    chance = torch.Generator().manual_seed(3)
    logits, guesses = torch.randn(2, 4, 3, generator=chance).mul(1.5)  # after 0, 1, 2 and the start, 3
    q, cuts = guesses.softmax(-1), dict(temperature=1.0) | cuts

    def draft(new, n):
        rows = [new[-1] if new else 3]
        for _ in range(n):
            rows.append(int(torch.multinomial(q[rows[-1]], 1, generator=chance)))
        return torch.tensor(rows[1:], dtype=torch.long), q[rows[:-1]]

    p = filter_logits(logits, **cuts).softmax(-1).double()
    every = list(itertools.product(range(3), repeat=3))
    expected = torch.stack([p[3, x] * p[x, y] * p[y, z] for x, y, z in every])
    drawn, scores = [], []
    for _ in range(2000):
        found = speculate(lambda ids, state: (logits[ids], lambda n: state), Nothing(), torch.tensor([3]), draft, ahead=ahead,
                          max_new_tokens=3, generator=chance, **cuts)
        drawn.append(tuple(found.ids[0].tolist()))
        scores.append(found.scores.item())
    seen = torch.tensor([drawn.count(text) for text in every])
    assert not seen[expected == 0].any()
    possible = expected > 0
    assert chisquare(seen[possible], 2000 * expected[possible] / expected.sum()).pvalue > 1e-3
    plain = logits.log_softmax(-1)
    for (x, y, z), score in zip(drawn[:20], scores):
        assert math.isclose(score, plain[3, x] + plain[x, y] + plain[y, z], abs_tol=1e-4)


def test_lookup_guesses_what_followed():
    draft = lookup([1, 2, 3, 4, 1, 2], V)
    assert draft([], 4)[0].tolist() == [3, 4, 1, 2] and draft([], 2)[0].tolist() == [3, 4]
    assert draft([9], 4)[0].tolist() == [] and draft([9, 4], 3)[0].tolist() == [1, 2, 9]  # one token where two never occurred
    guess, q = draft([3], 2)
    assert guess.tolist() == [4, 1] and q.argmax(-1).tolist() == [4, 1] and q.sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("change, words", [
    (dict(start=torch.tensor([1, 2])), ["start", "2 rows"]),
    (dict(start=torch.tensor([1.0])), ["start"]),
    (dict(ahead=0), ["ahead=0"]),
    (dict(max_new_tokens=0), ["max_new_tokens=0"]),
    (dict(temperature=-1.0), ["temperature=-1.0"]),
    (dict(top_p=0.9), ["top_p=0.9", "temperature"]),
    (dict(stop_id=V), [f"stop_id={V}"]),
    (dict(draft=lambda new, n: certain([1] * (n + 1))), ["draft", "5 guesses", "at most 4"]),
    (dict(draft=lambda new, n: (torch.tensor([1]), torch.zeros(2, V))), ["draft", "1 guesses", "2 distributions"]),
])
def test_wrong_calls(unchecked, change, words):
    model = small_gpt()
    state, last = begun(model)
    call = dict(read=reading(model), state=state, start=last, draft=lookup(PROMPT, V), max_new_tokens=20) | change
    with pytest.raises(ValueError, match=says(*words)):
        speculate(**call)


def test_broken_logits():
    broken = lambda ids, state: (torch.full((1, ids.shape[1], V), torch.nan), lambda n: state)
    with pytest.raises(ValueError, match="no distribution"):
        speculate(broken, Nothing(), torch.tensor([1]), lookup(PROMPT, V), max_new_tokens=3)
