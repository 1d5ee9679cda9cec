"""Decoding against exhaustive search, `transformers`, sorted lists and known distributions."""

import itertools
import math
import threading
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from annotated_nlp import decoding
from annotated_nlp.decoding import State, beam_search, evaluating, filter_logits, greedy
from annotated_nlp.decoding import sample
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.seq2seq import Seq2Seq, Seq2SeqConfig

END, START = 0, 1
INF = math.inf


class Rows(NamedTuple):
    """The smallest state: one tensor, a row a hypothesis."""

    x: Tensor

    def reorder(self, index):
        return Rows(self.x[index])


class RandomLM(nn.Module):
    """A GRU language model with random weights: every step depends on the whole prefix."""

    def __init__(self, v, seed=0, spread=2.0, d=16):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.cell, self.head = nn.Embedding(v, d), nn.GRUCell(d, d), nn.Linear(d, v)
        self.spread, self.v = spread, v
        self.requires_grad_(False)

    def step(self, ids, state):
        h = self.cell(self.embedding(ids), state.x)
        return self.spread * self.head(h), Rows(h)

    def start(self, b, seed=0):
        return Rows(torch.randn(b, 16, generator=torch.Generator().manual_seed(seed)))

    def score(self, h, ids):
        """Summed log-probability of one sentence, by running over it."""
        state, total = Rows(h[None]), 0.0
        for before, after in itertools.pairwise((START, *ids)):
            logits, state = self.step(torch.tensor([before]), state)
            total += logits.double().log_softmax(-1)[0, after].item()
        return total


def starts(b, token=START):
    return torch.full((b,), token)


def constant(logits):
    """A step that gives the same logits whatever came before."""
    return lambda ids, state: (torch.tensor(logits, dtype=torch.float32).repeat(len(ids), 1), state)


def table(probabilities):
    """A step that looks up the row of the token fed."""
    logits = torch.tensor(probabilities).log()
    return lambda ids, state: (logits[ids], state)


def strings(beams, row=0):
    return [tuple(ids[:n].tolist()) for ids, n in zip(beams.ids[row], beams.lengths[row]) if n]


def blank(b):
    return Rows(torch.zeros(b, 1))


# Search


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("v, limit, seed", [(2, 6, 0), (3, 5, 1), (4, 4, 2), (5, 3, 3)])
def test_a_beam_as_wide_as_everything_is_exhaustive(v, limit, seed, alpha):
    lm = RandomLM(v, seed)
    h = lm.start(2, seed)
    found = beam_search(lm.step, h, starts(2), beam=v**limit, max_new_tokens=limit, stop_id=END, length_penalty=alpha)
    for row in range(2):
        every = {s[: s.index(END) + 1] if END in s else s for s in itertools.product(range(v), repeat=limit)}
        scores = {s: lm.score(h.x[row], s) for s in every}
        assert math.isclose(sum(map(math.exp, scores.values())), 1, rel_tol=1e-5)
        assert len(strings(found, row)) == len(every)
        values = [scores[s] / len(s) ** alpha for s in strings(found, row)]
        assert set(strings(found, row)) == every
        assert all(a >= b - 1e-5 for a, b in itertools.pairwise(values))
        assert torch.allclose(found.scores[row, : len(every)].double(), torch.tensor([scores[s] for s in strings(found, row)]).double(), atol=1e-5)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 8), st.sampled_from([1.0, 3.0, 8.0]))
def test_beam_one_is_greedy(seed, v, limit, spread):
    lm = RandomLM(v, seed, spread)
    line = greedy(lm.step, lm.start(5, seed), starts(5), max_new_tokens=limit, stop_id=END)
    one = beam_search(lm.step, lm.start(5, seed), starts(5), beam=1, max_new_tokens=limit, stop_id=END)
    assert torch.equal(line.ids, one.ids[:, 0]) and torch.equal(line.lengths, one.lengths[:, 0])
    assert torch.allclose(line.scores, one.scores[:, 0], atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_company_changes_nothing_and_scores_are_the_models(alpha):
    lm = RandomLM(12, seed=4)
    h, options = lm.start(40), dict(max_new_tokens=15, stop_id=END)
    line = greedy(lm.step, h, starts(40), **options)
    beams = beam_search(lm.step, h, starts(40), beam=4, length_penalty=alpha, **options)
    assert len(set(line.lengths.tolist())) > 3 and len(set(beams.lengths[:, 0].tolist())) > 2
    for row in range(40):
        one = Rows(h.x[row : row + 1])
        alone = greedy(lm.step, one, starts(1), **options)
        assert alone.ids[0].tolist() == line.ids[row, : alone.lengths[0]].tolist()
        assert not line.ids[row, alone.lengths[0] :].any()
        assert math.isclose(line.scores[row], lm.score(h.x[row], alone.ids[0].tolist()), abs_tol=1e-4)
        alone = beam_search(lm.step, one, starts(1), beam=4, length_penalty=alpha, **options)
        assert strings(alone) == strings(beams, row)
        assert torch.allclose(alone.scores[0], beams.scores[row], atol=1e-5)
        for ids, score in zip(strings(beams, row), beams.scores[row]):
            assert math.isclose(score, lm.score(h.x[row], ids), abs_tol=1e-4)


def test_rule_of_the_lecture():
    """The lecture's rule, on a model that never ends: each of k hypotheses, its k best words; k of the k * k stay."""
    k, lm = 3, RandomLM(9, seed=7)
    h = lm.start(1)
    live = [((), 0.0)]
    for _ in range(5):
        grown = []
        for ids, _ in live:
            words = sorted(range(9), key=lambda w: -lm.score(h.x[0], (*ids, w)))[:k]
            grown += [((*ids, w), lm.score(h.x[0], (*ids, w))) for w in words]
        live = sorted(grown, key=lambda item: -item[1])[:k]
    found = beam_search(lm.step, h, starts(1), beam=k, max_new_tokens=5)
    assert strings(found) == [ids for ids, _ in live]


def test_end_outside_the_beam():
    """END is second at first, which is no place in a beam of one but one in a beam of two."""
    step = table([[1.0, 0, 0, 0], [0.4, 0.0, 0.6, 0.0], [0.0, 0, 0.5, 0.5], [0.0, 0, 0.5, 0.5]])
    assert strings(beam_search(step, blank(1), starts(1), beam=1, max_new_tokens=2, stop_id=END)) == [(2, 2)]
    found = beam_search(step, blank(1), starts(1), beam=2, max_new_tokens=2, stop_id=END)
    assert strings(found) == [(0,), (2, 2)] and torch.allclose(found.scores.exp(), torch.tensor([[0.4, 0.3]]))


def test_k_live_on_when_k_end():
    """Both live hypotheses would rather end; two others take their places."""
    row = [0.4, 0.0, 0.3, 0.3]
    found = beam_search(table([[1.0, 0, 0, 0], [0.0, 0.0, 0.5, 0.5], row, row]), blank(1), starts(1), beam=4,
                        max_new_tokens=3, stop_id=END)
    assert strings(found)[:2] == [(2, 0), (3, 0)] and all(len(ids) == 3 for ids in strings(found)[2:])
    assert torch.allclose(found.scores.exp(), torch.tensor([[0.2, 0.2, 0.06, 0.06]]), atol=1e-6)


def test_google_penalty():
    """Two finished hypotheses that n ** alpha and ((5 + n) / 6) ** alpha put in opposite orders."""
    hypotheses = [(-2.0, 2), (-4.0, 8)]  # score, length
    ours = [score / n**0.6 for score, n in hypotheses]
    google = [score / ((5 + n) / 6) ** 0.6 for score, n in hypotheses]
    assert ours[0] < ours[1] and google[0] > google[1]
    a, b = math.exp(-2.0), math.exp(-4.0)  # END after one sure token, or after seven
    probabilities = torch.zeros(11, 11)
    probabilities[START, 2], probabilities[START, 3], probabilities[START, 10] = a, b, 1 - a - b
    probabilities[2, END] = probabilities[9, END] = probabilities[10, 10] = probabilities[END, END] = 1.0
    probabilities[range(3, 9), range(4, 10)] = 1.0
    found = beam_search(table(probabilities.tolist()), blank(1), starts(1), beam=3, max_new_tokens=9, stop_id=END, length_penalty=0.6)
    ranked = [ids for ids in strings(found) if ids[-1] == END]
    assert ranked == [(3, 4, 5, 6, 7, 8, 9, 0), (2, 0)]


# transformers


class Prefix(NamedTuple):
    """A state that is the prefix itself, read again at every step: no cache that could be wrong."""

    ids: Tensor

    def reorder(self, index):
        return Prefix(self.ids[index])


def tiny_gpt2(seed=0, spread=0.4, v=40):
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=v, n_positions=40, n_embd=32, n_layer=2, n_head=2, initializer_range=spread,
                        bos_token_id=1, eos_token_id=END, pad_token_id=v - 1)
    return GPT2LMHeadModel(config).eval()


def reading_again(model):
    def step(ids, state):
        seen = torch.cat([state.ids, ids[:, None]], dim=1)
        return model(seen).logits[:, -1], Prefix(seen)

    return step


def prompts(b=8, n=3, seed=2, v=40):
    return torch.randint(2, v - 1, (b, n), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, output_scores=True,
                          return_dict_in_generate=True, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("beam", [1, 3, 5])
def test_gpt2_as_generate(seed, beam):
    gpt2, ids = tiny_gpt2(seed), prompts(seed=seed)
    step, state, options = reading_again(gpt2), Prefix(ids[:, :-1]), dict(max_new_tokens=10, stop_id=END, pad_id=39)
    if beam == 1:
        line = greedy(step, state, ids[:, -1], **options)
        assert torch.equal(line.ids, generate(gpt2, ids, max_new_tokens=10).sequences[:, 3:])
        return
    for alpha in (0.0, 0.6, 1.0):
        ours = beam_search(step, state, ids[:, -1], beam=beam, length_penalty=alpha, **options)
        theirs = generate(gpt2, ids, num_beams=beam, num_return_sequences=beam, length_penalty=alpha, early_stopping="never",
                          max_new_tokens=10)
        assert torch.equal(ours.ids.flatten(0, 1), theirs.sequences[:, 3:])
        values = (ours.scores / ours.lengths**alpha).flatten()
        assert torch.allclose(values, theirs.sequences_scores, atol=1e-4)


class BartState:
    """The other kind of state: a cache that reorders in place, and the encoder's output, which is copied."""

    def __init__(self, cache, memory, mask):
        self.cache, self.memory, self.mask = cache, memory, mask

    def reorder(self, index):
        if self.cache.get_seq_length():
            self.cache.reorder_cache(index)
        return BartState(self.cache, self.memory[index], self.mask[index])


@pytest.mark.parametrize("seed", range(3))
def test_bart_with_a_cache_as_generate(seed):
    torch.manual_seed(seed)
    config = BartConfig(vocab_size=40, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=40,
                        init_std=0.4, pad_token_id=39, bos_token_id=1, eos_token_id=END, decoder_start_token_id=1,
                        forced_eos_token_id=None, forced_bos_token_id=None)
    bart = BartForConditionalGeneration(config).eval()
    src = prompts(6, 7, seed)
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 7, 1, 4])[:, None]
    src = src.where(mask, 39)

    def step(ids, state):
        out = bart(encoder_outputs=(state.memory,), attention_mask=state.mask, decoder_input_ids=ids[:, None],
                   past_key_values=state.cache, use_cache=True)
        return out.logits[:, -1], state

    def state():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return BartState(cache, bart.get_encoder()(src, attention_mask=mask).last_hidden_state, mask)

    options = dict(max_new_tokens=9, stop_id=END, pad_id=39)
    theirs = dict(attention_mask=mask.long(), max_new_tokens=9, do_sample=False, output_scores=True, return_dict_in_generate=True)
    with torch.no_grad():
        line = greedy(step, state(), starts(6), **options)
        assert torch.equal(line.ids, bart.generate(src, **theirs).sequences[:, 1:])
        for beam, alpha in ((2, 0.0), (4, 0.0), (4, 1.0)):
            ours = beam_search(step, state(), starts(6), beam=beam, length_penalty=alpha, **options)
            hf = bart.generate(src, num_beams=beam, num_return_sequences=beam, length_penalty=alpha, early_stopping="never", **theirs)
            assert torch.equal(ours.ids.flatten(0, 1), hf.sequences[:, 1:])
            assert torch.allclose((ours.scores / ours.lengths**alpha).flatten(), hf.sequences_scores, atol=1e-4)


def test_default_stop_misses():
    """With a penalty, `transformers`' default stops on a guess; the exact rule finds values at least as good, some better."""
    better = 0
    for seed in range(3):
        gpt2, ids = tiny_gpt2(seed, spread=0.2, v=12), prompts(16, seed=seed, v=12)
        ours = beam_search(reading_again(gpt2), Prefix(ids[:, :-1]), ids[:, -1], beam=2, max_new_tokens=20, stop_id=END,
                           pad_id=11, length_penalty=1.0)
        values = ours.scores[:, 0] / ours.lengths[:, 0]
        default = generate(gpt2, ids, num_beams=2, length_penalty=1.0, max_new_tokens=20).sequences_scores
        assert (values > default - 1e-4).all()
        better += int((values > default + 1e-3).sum())
    assert better > 0


def test_the_translator_of_the_last_chapter():
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(20, 20, d_model=16)).eval()
    src = torch.randint(4, 20, (6, 5))
    src[torch.arange(5) >= torch.tensor([5, 2, 3, 1, 4, 5])[:, None]] = 0
    assert isinstance(model.start(src), State)
    with torch.no_grad():
        for width in (1, 4):
            beams = beam_search(model.step, model.start(src), starts(6, 2), beam=width, max_new_tokens=8, stop_id=3)
            for row in range(6):
                alone = src[row : row + 1, : (src[row] > 0).sum()]
                one = beam_search(model.step, model.start(alone), starts(1, 2), beam=width, max_new_tokens=8, stop_id=3)
                assert strings(one) == strings(beams, row)
                for ids, score in zip(strings(beams, row), beams.scores[row]):
                    log_probs = model(alone, torch.tensor([[2, *ids[:-1]]])).log_softmax(-1)
                    assert math.isclose(score, log_probs[0].gather(1, torch.tensor(ids)[:, None]).sum(), abs_tol=1e-5)


# Sampling


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=6, max_size=6), min_size=1, max_size=4),
    st.sampled_from([0.25, 1.0, 3.0]), st.none() | st.integers(1, 8), st.none() | st.sampled_from([0.01, 0.3, 0.7, 0.999, 1.0]),
)
def test_filters_by_the_definition(rows, temperature, top_k, top_p):
    rows = [row if max(row) > -INF else [0.0] * 6 for row in rows]
    out = filter_logits(torch.tensor(rows), temperature=temperature, top_k=top_k, top_p=top_p).softmax(-1)
    for row, got in zip(rows, out.tolist()):
        weights = [math.exp(z / temperature) for z in row]
        order = sorted(range(6), key=lambda i: -weights[i])[: top_k or 6]
        weights = {i: weights[i] / sum(weights[j] for j in order) for i in order}
        if top_p is not None and top_p < 1:
            sizes = [n for n in range(1, len(order) + 1) if sum(weights[i] for i in order[:n]) >= top_p - 1e-7]
            order = order[: min(sizes, default=len(order))]
        expected = [weights[i] / sum(weights[j] for j in order) if i in order else 0.0 for i in range(6)]
        assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("top_p", [1e-7, 1e-46, 5e-324])
def test_a_nucleus_of_nearly_nothing_is_the_best_token(top_p):
    "By the definition the smallest set is never empty, also where float32 has 0 for `top_p`."
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(filter_logits(logits, top_p=top_p).softmax(-1), torch.nn.functional.one_hot(logits.argmax(-1), 9).float())


def test_filters_as_transformers():
    logits = 3 * torch.randn(500, 80, generator=torch.Generator().manual_seed(0))
    for t, k, p in itertools.product((0.1, 0.7, 1.0, 2.5), (1, 5, 200), (0.05, 0.5, 0.9, 0.99)):
        theirs = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, TemperatureLogitsWarper(t)(None, logits)))
        ours = filter_logits(logits, temperature=t, top_k=k, top_p=p)
        assert torch.equal(ours > -INF, theirs > -INF)
        assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=2e-6)


def test_filters_work_along_the_last_axis(unchecked):
    """Whatever axes stand before the vocabulary; with 16 bits the nucleus is still added up in 32."""
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    for options in (dict(top_k=2), dict(top_p=0.6), dict(temperature=0.5, top_k=5, top_p=0.9)):
        together = filter_logits(logits, **options)
        for a, b in zip(together, logits):
            assert torch.equal(a, filter_logits(b, **options)) and torch.equal(a[0], filter_logits(b[0], **options))
    flat = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(filter_logits(flat, top_p=0.9) > -INF, filter_logits(flat.float(), top_p=0.9) > -INF)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_no_temperature_is_too_low(temperature):
    out = filter_logits(torch.tensor([[2.0, -1.0, 2.0, 1.9]]), temperature=temperature)
    assert out.softmax(-1).tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_top_k_is_k():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert (filter_logits(logits, top_k=2) > -INF).tolist() == [[True, True, False, False, False]]
    assert (TopKLogitsWarper(2)(None, logits) > -INF).sum() == 4  # transformers keeps all that are tied


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([dict(top_k=1), dict(temperature=1e-6), dict(temperature=1e-30), dict(top_p=1e-9)]))
def test_limits_of_sampling_are_greedy(seed, options):
    lm = RandomLM(9, seed)
    line = greedy(lm.step, lm.start(6, seed), starts(6), max_new_tokens=8, stop_id=END)
    drawn = sample(lm.step, lm.start(6, seed), starts(6), max_new_tokens=8, stop_id=END, **options)
    assert torch.equal(line.ids, drawn.ids) and torch.allclose(line.scores, drawn.scores, atol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(temperature=0.5), dict(temperature=2.0), dict(top_k=3), dict(top_p=0.7), dict(temperature=1.5, top_k=5, top_p=0.9)])
def test_frequencies(options):
    """Drawn tokens against the definition, by a chi-square test at every step, under a fixed generator."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.1, -INF, 0.0, -2.0]])
    b, n = 4000, 3
    drawn = sample(constant(logits[0].tolist()), blank(b), starts(b), max_new_tokens=n, generator=torch.Generator().manual_seed(5), **options)
    expected = filter_logits(logits, **options).softmax(-1)[0].double()
    for t in range(n):
        seen = torch.bincount(drawn.ids[:, t], minlength=7)
        assert not seen[expected == 0].any()
        kept = expected > 0
        assert chisquare(seen[kept], b * expected[kept] / expected.sum()).pvalue > 1e-4
    together = Counter(zip(drawn.ids[:, 0].tolist(), drawn.ids[:, 1].tolist()))  # steps are independent here
    pairs = [(i, j) for i in range(7) for j in range(7) if expected[i] * expected[j] * b > 5]
    seen = [together[pair] for pair in pairs]
    outer = torch.tensor([expected[i] * expected[j] for i, j in pairs])
    assert chisquare(seen, sum(seen) * outer / outer.sum()).pvalue > 1e-4


def test_whole_sentences_are_drawn_by_their_probability():
    lm = RandomLM(3, seed=11)
    h = lm.start(1)
    b = 20_000
    drawn = sample(lm.step, Rows(h.x.repeat(b, 1)), starts(b), max_new_tokens=3, stop_id=END, generator=torch.Generator().manual_seed(0))
    seen = Counter(tuple(ids[:n].tolist()) for ids, n in zip(drawn.ids, drawn.lengths))
    every = sorted({s[: s.index(END) + 1] if END in s else s for s in itertools.product(range(3), repeat=3)})
    probabilities = torch.tensor([math.exp(lm.score(h.x[0], s)) for s in every]).double()
    assert set(seen) <= set(every)
    assert chisquare([seen[s] for s in every], b * probabilities / probabilities.sum()).pvalue > 0.001
    for ids, n, score in zip(drawn.ids[:20], drawn.lengths, drawn.scores):
        assert math.isclose(score, lm.score(h.x[0], ids[:n].tolist()), abs_tol=1e-4)


def test_samples_repeat_with_the_generator_and_score_the_model():
    lm = RandomLM(9, seed=1)

    def draw(seed):
        return sample(lm.step, lm.start(6), starts(6), max_new_tokens=8, stop_id=END, temperature=2.0, top_k=6,
                      generator=torch.Generator().manual_seed(seed))

    a, b, c = draw(0), draw(0), draw(1)
    assert torch.equal(a.ids, b.ids) and torch.equal(a.scores, b.scores) and a.ids.tolist() != c.ids.tolist()
    for row in range(6):
        assert math.isclose(a.scores[row], lm.score(lm.start(6).x[row], a.ids[row, : a.lengths[row]].tolist()), abs_tol=1e-4)


# Edges

SEARCHES = [greedy, sample, beam_search]


@pytest.mark.parametrize("search", SEARCHES)
def test_immediate_end(search):
    out = search(constant([0.0, -INF, -INF]), blank(3), starts(3), max_new_tokens=7, stop_id=END, pad_id=2)
    first = out.ids if search is not beam_search else out.ids[:, 0]
    assert first.tolist() == [[END]] * 3
    if search is beam_search:
        assert out.lengths.tolist() == [[1, 0, 0, 0, 0]] * 3
        assert out.scores.tolist() == [[0.0] + [-INF] * 4] * 3 and (out.ids[:, 1:] == 2).all()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("stop_id", [None, END])
def test_no_end_before_the_limit(search, stop_id):
    out = search(constant([-INF, 0.0, -1.0]), blank(2), starts(2), max_new_tokens=4, stop_id=stop_id)
    assert out.ids.shape[-1] == 4 and (out.lengths == 4).all() and (out.ids > 0).all()


@pytest.mark.parametrize("search", SEARCHES)
def test_one_token(search):
    out = search(constant([0.0, 2.0]), blank(2), starts(2), max_new_tokens=1, stop_id=END)
    assert out.ids.shape[-1] == 1 and (out.lengths[:, :2] if search is beam_search else out.lengths).eq(1).all()


@pytest.mark.parametrize("search", SEARCHES)
def test_a_vocabulary_of_one(search):
    out = search(constant([3.0]), blank(2), starts(2, 0), max_new_tokens=3)
    first = out.ids if search is not beam_search else out.ids[:, 0]
    assert first.tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("stop_id", [None, END])
def test_an_empty_batch_asks_the_model_nothing(search, stop_id):
    def step(ids, state):
        raise AssertionError("called")

    out = search(step, blank(0), starts(0), max_new_tokens=4, stop_id=stop_id)
    assert out.ids.shape == ((0, 5, 0) if search is beam_search else (0, 0)) and len(out.scores) == len(out.lengths) == 0


def test_a_beam_wider_than_the_vocabulary_and_than_the_language():
    found = beam_search(table([[1.0, 0, 0], [0.1, 0.0, 0.9], [1.0, 0, 0]]), blank(1), starts(1), beam=7, max_new_tokens=5, stop_id=END)
    assert strings(found) == [(2, 0), (0,)]
    assert torch.allclose(found.scores[0, :2].exp(), torch.tensor([0.9, 0.1])) and (found.scores[0, 2:] == -INF).all()
    assert found.lengths.tolist() == [[2, 1, 0, 0, 0, 0, 0]] and not found.ids[0, 2:].any()


def test_ties_go_to_the_lower_id():
    flat = constant([0.0] * 5)
    assert greedy(flat, blank(2), starts(2), max_new_tokens=3).ids.tolist() == [[0, 0, 0]] * 2
    assert sample(flat, blank(2), starts(2), max_new_tokens=3, top_k=1).ids.tolist() == [[0, 0, 0]] * 2
    for b in (1, 3):
        found = beam_search(flat, blank(b), starts(b), beam=3, max_new_tokens=2)
        assert found.ids.tolist() == [[[0, 0], [0, 1], [0, 2]]] * b
    assert beam_search(flat, blank(1), starts(1), beam=1, max_new_tokens=3).ids.tolist() == [[[0, 0, 0]]]


def breaks_after_the_end(fed):
    """Row 0 ends at once; from then on its logits are NaN. Row 1 says 2 and never ends."""

    def step(ids, state):
        fed.append(ids.tolist())
        ends, t = state.x[:, :1] == 0, state.x[:, 1:]
        logits = torch.where(ends, torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.tensor([-INF, 0.0, 50.0, 0.0]))
        return torch.where(ends & (t > 0), torch.nan, logits), Rows(state.x + torch.tensor([0.0, 1.0]))

    return step


@pytest.mark.parametrize("search", [greedy, sample])
def test_finished_rows_leave_no_trace(search):
    """What they say is not written down, and `pad_id`, which no model need know, is never fed."""
    fed = []
    out = search(breaks_after_the_end(fed), Rows(torch.tensor([[0.0, 0.0], [1.0, 0.0]])), starts(2), max_new_tokens=4,
                 stop_id=END, pad_id=-100, **dict(generator=torch.Generator().manual_seed(0)) if search is sample else {})
    assert out.ids.tolist() == [[0, -100, -100, -100], [2, 2, 2, 2]] and out.lengths.tolist() == [1, 4]
    assert out.scores.isfinite().all()
    assert len(fed) == 4 and all(0 <= i < 4 for ids in fed for i in ids)


def test_finished_sentences_leave_no_trace():
    fed = []
    out = beam_search(breaks_after_the_end(fed), Rows(torch.tensor([[0.0, 0.0], [1.0, 0.0]])), starts(2), beam=1,
                      max_new_tokens=4, stop_id=END, pad_id=-100)
    assert out.ids[:, 0].tolist() == [[0, -100, -100, -100], [2, 2, 2, 2]] and out.lengths.tolist() == [[1], [4]]
    assert out.scores.isfinite().all()
    assert len(fed) == 4 and all(0 <= i < 4 for ids in fed for i in ids)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [INF, 0.0], [-INF, -INF]])
def test_logits_that_are_no_distribution(search, bad):
    logits = torch.tensor([[0.0, 1.0], bad])

    def step(ids, state):
        return logits[state.x[:, 0].long()], state

    with pytest.raises(ValueError, match="batch row 1"):
        search(step, Rows(torch.tensor([[0.0], [1.0]])), starts(2), max_new_tokens=3)


def test_a_dead_hypothesis_may_be_fed_to_a_model_that_breaks_on_it():
    """Only token 0 is possible, so most of the beam is dead; what the model says after another token doesn't matter."""

    def step(ids, state):
        logits = torch.tensor([0.0, -INF, -INF, -INF]).repeat(len(ids), 1)
        return torch.where(ids[:, None] > 0, torch.nan, logits), state

    found = beam_search(step, blank(1), starts(1, 0), beam=4, max_new_tokens=3)
    assert strings(found) == [(0, 0, 0)] and found.scores.tolist() == [[0.0, -INF, -INF, -INF]]


@pytest.mark.parametrize("dtype, score_dtype", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_scores_are_at_least_float32(dtype, score_dtype):
    lm = RandomLM(6)

    def step(ids, state):
        logits, state = lm.step(ids, state)
        return logits.to(dtype), state

    for search in SEARCHES:
        out = search(step, lm.start(3), starts(3).int(), max_new_tokens=4, stop_id=END)
        assert out.scores.dtype == score_dtype and out.ids.dtype == torch.long


def test_a_state_may_be_written_in_place():
    class InPlace:
        def __init__(self, x):
            self.x = x

        def reorder(self, index):
            self.x = self.x[index]
            return self

    lm = RandomLM(9, seed=5)

    def step(ids, state):
        logits, after = lm.step(ids, state)
        state.x = after.x
        return logits, state

    for search in (greedy, beam_search):
        options = dict(max_new_tokens=8, stop_id=END)
        a, b = search(step, InPlace(lm.start(5).x), starts(5), **options), search(lm.step, lm.start(5), starts(5), **options)
        assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize(
    "search, options, message",
    [
        *((search, dict(max_new_tokens=n), "max_new_tokens") for search in SEARCHES for n in (0, -1)),
        *((sample, dict(temperature=t), "temperature") for t in (0.0, -1.0, INF, math.nan)),
        *((sample, dict(top_k=k), "top_k") for k in (0, -3)),
        *((sample, dict(top_p=p), "top_p") for p in (0.0, -0.1, 1.1, math.nan)),
        *((beam_search, dict(beam=k), "beam") for k in (0, -1)),
        *((beam_search, dict(length_penalty=a), "length_penalty") for a in (-0.5, 10.5, INF, math.nan)),
        *((search, dict(stop_id=i), f"stop_id={i} must be a token: an integer from 0 to 1") for search in SEARCHES for i in (-1, 2)),
    ],
)
def test_bad_arguments(search, options, message):
    with pytest.raises(ValueError, match=message):
        search(constant([0.0, 1.0]), blank(2), starts(2), **dict(max_new_tokens=3) | options)


@pytest.mark.parametrize("search", SEARCHES)
def test_counts_are_integers(unchecked, search):
    for bad in (2.0, "2", True, None):
        with pytest.raises(ValueError, match="max_new_tokens=.* must be an integer of at least 1"):
            search(constant([0.0, 1.0]), blank(2), starts(2), max_new_tokens=bad)


@pytest.mark.parametrize("search", SEARCHES)
def test_bad_start_and_bad_step(unchecked, search):
    for start in (torch.ones(2, 3, dtype=torch.long), torch.tensor(1), torch.ones(2), torch.ones(2).bool(), torch.ones(2).byte()):
        with pytest.raises(ValueError, match=rf"start (is {start.dtype} )?of shape .* must .*one token id a row"):
            search(constant([0.0, 1.0]), blank(2), start, max_new_tokens=3)
    for shape in ((5,), (1, 4, 5), (11, 5)):
        with pytest.raises(ValueError, match=r"logits of shape .* must .*step returns.* needs \[:, -1\]"):
            search(lambda ids, state, shape=shape: (torch.zeros(shape), state), blank(2), starts(2), max_new_tokens=3)


# Waiting for the device


class Waits(TorchDispatchMode):
    """Counts the operations whose result Python reads, and those whose shape depends on values: on a GPU each is a wait."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.default")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(name in str(function) for name in self.READS)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("search", SEARCHES)
def test_one_wait_a_token_and_none_without_a_stop(search):
    lm = RandomLM(9)

    def step(ids, state):
        logits, state = lm.step(ids, state)
        return logits.index_fill(1, torch.tensor([END]), -INF), state

    def waits(stop_id, n):
        with Waits() as mode:
            search(step, lm.start(4), starts(4), max_new_tokens=n, stop_id=stop_id)
        return mode.count

    assert waits(None, 5) == waits(None, 25) <= 3  # at the end: the check for NaN, and a beam's longest length
    assert waits(END, 25) - waits(END, 5) == 20


@pytest.mark.parametrize("search", [greedy, sample])
@pytest.mark.parametrize("limit", [3, 16, 17, 40])
def test_looking_seldom_changes_nothing_but_the_waits(monkeypatch, search, limit):
    "Off the CPU the loop asks every sixteenth token whether all rows have ended: the same result, fewer waits."
    lm = RandomLM(9)
    options = dict(max_new_tokens=limit, stop_id=END, pad_id=0)

    def run():
        torch.manual_seed(3)
        with Waits() as mode:
            return search(lm.step, lm.start(4), starts(4), **options), mode.count

    often, waits = run()
    monkeypatch.setitem(decoding._LOOK_EVERY, "cpu", 16)
    seldom, fewer = run()
    assert often.ids.shape == seldom.ids.shape
    for one, other in zip(often, seldom):
        assert torch.equal(one, other)
    assert fewer <= waits and fewer <= 4 + limit // 16


def test_no_temperature_is_so_high_that_what_is_forbidden_is_drawn():
    "1e39 is infinite in float32: infinity over infinity would be a token like any other."
    def step(ids, state):
        return torch.tensor([[0.0, -INF, 1.0]]).expand(len(ids), 3), state

    drawn = sample(step, Rows(torch.zeros(1000)), torch.zeros(1000, dtype=torch.long), max_new_tokens=3, temperature=1e39).ids
    assert set(drawn.flatten().tolist()) == {0, 2}


@pytest.mark.parametrize("training", [True, False])
def test_evaluating(training):
    "No part is in training within, each is as it was after, also where the block fails; a part used twice counts once."
    dropout = nn.Dropout()
    model = nn.Sequential(dropout, nn.Sequential(dropout, nn.Linear(2, 2))).train(training)
    model[1][1].train(not training)
    before = [part.training for part in model.modules()]
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == before
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize("nested", [True, False], ids=["the first ends last", "the first ends first"])
def test_evaluating_in_two_threads(nested):
    "Of two blocks that overlap, the last to end restores the modes: until then no part is in training, after it each is as before."
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2))).train()
    model[1][0].eval()
    before = [part.training for part in model.modules()]
    inside, leave = threading.Event(), threading.Event()

    def first():
        with evaluating(model[1] if nested else model):
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with evaluating(model):
        if not nested:
            leave.set()
            thread.join()
        assert not any(part.training for part in model.modules())
    assert not model[1].training or not nested
    leave.set()
    thread.join()
    assert [part.training for part in model.modules()] == before


def test_overlapping_calls_of_generate():
    "Two threads write with one model in training: one begins while the other has begun and not ended, and ends first."
    model = GPT(GPTConfig(vocab_size=11, max_len=8, d_model=8, n_heads=2, n_layers=1)).train()
    inside, leave = threading.Event(), threading.Event()
    step, modes = model.step, []

    def waiting(ids, state):
        if threading.current_thread() is thread:
            inside.set()
            assert leave.wait(60)
        modes.append(any(part.training for part in model.modules()))
        return step(ids, state)

    model.step = waiting
    thread = threading.Thread(target=lambda: model.generate(torch.tensor([[1, 2]]), 3))
    thread.start()
    assert inside.wait(60)
    model.generate(torch.tensor([[3]]), 2)
    leave.set()
    thread.join()
    assert modes == [False] * 5 and all(part.training for part in model.modules())
