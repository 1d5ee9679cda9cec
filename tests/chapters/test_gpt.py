"GPT-1 and GPT-2 against `transformers` with the same weights, and generation against reading everything again."

import itertools
import math
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, OpenAIGPTForSequenceClassification

import messages
import test_invariants
from parity import DEVICES, GPU, close, lengths
from twins import ROWS, parameters, same_gradients
from annotated_nlp.decoding import beam_search, greedy
from annotated_nlp.gpt import GPT, GPTConfig, GPTForSequenceClassification, prefix_mask
from annotated_nlp.parts.kernels import KVCache

unchecked = test_invariants.unchecked  # as a user has the package, which torch.compile needs too
SMALL = ROWS["gpt2"].small
CLASSIFIERS = {kind: replace(ROWS[kind], ours=GPTForSequenceClassification, theirs=theirs) for kind, theirs in (("gpt2", GPT2ForSequenceClassification), ("gpt1", OpenAIGPTForSequenceClassification))}
ODD = {odd: kind for kind in CLASSIFIERS for odd in ROWS[kind].odd}
ALL = pytest.mark.parametrize("name", ODD)
BOTH = pytest.mark.parametrize("kind", CLASSIFIERS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def both(kind, folder, **changes):
    return ROWS[kind].both(folder, **changes)


def small(kind="gpt2", loud=0.3, **changes):
    return ROWS[kind].alone(loud, **changes)


def continued(model, ids, *args, **options):
    "The prompts, and behind them what the model writes."
    return torch.cat([ids, model.generate(ids, *args, **options)], 1)


# Values, losses, gradients


@BOTH
def test_bfloat16_writes(kind, tmp_path):
    ours, _ = both(kind, tmp_path)
    assert continued(ours.bfloat16(), torch.randint(29, (4, 9)), 5).shape == (4, 14)


@BOTH
def test_states_and_logits(kind, tmp_path):
    ours, theirs = both(kind, tmp_path)
    ids = torch.randint(29, (3, 11))
    close(ours.states(ids), theirs.transformer(ids).last_hidden_state)
    close(ours.logits(ours.states(ids)[:, -1]), theirs(ids).logits[:, -1])
    assert torch.equal(ours.logits(ours.states(ids)), ours(ids))
    assert torch.equal(ours(ids.int()), ours(ids))


# Classification


@BOTH
@pytest.mark.parametrize("n_classes", [1, 2, 5])
def test_classification(kind, n_classes, tmp_path):
    "With padding at the end, whatever it holds; loss and gradients; both ways."
    ours, theirs = CLASSIFIERS[kind].both(tmp_path / "a", num_labels=n_classes)
    assert ours.config.n_classes == n_classes
    mask = lengths(9, 4, 1, 8)
    ids = torch.randint(1, 29, mask.shape).where(mask, 0)  # 0 is their padding
    labels = torch.randint(n_classes, (4,)) if n_classes > 1 else torch.randn(4, 1)
    found, wanted = ours(ids, mask), theirs(ids, attention_mask=mask.long(), labels=labels)
    close(found, wanted.logits)
    loss = F.cross_entropy(found, labels) if n_classes > 1 else F.mse_loss(found, labels)
    close(loss, wanted.loss)
    same_gradients(ours, theirs, (loss, wanted.loss), 3e-5, tmp_path / "gradients", floor=0.0)
    assert torch.equal(ours(ids.where(mask, 7), mask), found)
    for row, n in enumerate((9, 4, 1, 8)):
        close(ours(ids[row : row + 1, :n]), found[row : row + 1].detach())
    close(ours.classify(ours.gpt.states(ids), mask), found.detach())
    ours.save_pretrained(tmp_path / "b")
    again, info = type(theirs).from_pretrained(tmp_path / "b", output_loading_info=True, pad_token_id=0)
    assert not any(info.values()) and again.config.num_labels == n_classes
    close(again.eval()(ids).logits, theirs(ids).logits, 1e-6)


@BOTH
def test_a_language_model_becomes_a_classifier(kind, tmp_path):
    "The trunk as it was, the layer above anew; asked for by name or refused."
    ours, theirs = both(kind, tmp_path)
    with pytest.raises(ValueError, match=r"lacks score\.weight.*fresh"):
        GPTForSequenceClassification.from_pretrained(tmp_path)
    model = GPTForSequenceClassification.from_pretrained(tmp_path, fresh="score", n_classes=3)
    ids = torch.randint(29, (2, 9))
    assert torch.equal(model.gpt.states(ids), ours.states(ids)) and model(ids).shape == (2, 3)
    assert abs(model.score.weight.std() - 0.02) < 0.005
    assert torch.equal(model.gpt(ids), ours(ids))  # the language model's logits beside the classes', Radford et al. 2018, equation 5


# Sizes


# Brown et al. 2020, table 2.1: parameters, layers, width, heads, width of a head
GPT3 = {"125M": (125e6, 12, 768, 12, 64), "350M": (350e6, 24, 1024, 16, 64), "760M": (760e6, 24, 1536, 16, 96), "1.3B": (1.3e9, 24, 2048, 24, 128),
        "2.7B": (2.7e9, 32, 2560, 32, 80), "6.7B": (6.7e9, 32, 4096, 32, 128), "13B": (13e9, 40, 5140, 40, 128), "175B": (175e9, 96, 12288, 96, 128)}


@pytest.mark.parametrize("size", GPT3)
def test_sizes_of_gpt3(size):
    "Two rows of the table contradict themselves: 24 heads of 128 are no 2048, 40 of 128 no 5140."
    printed, n_layers, d_model, n_heads, d_head = GPT3[size]
    c = GPTConfig.gpt3(size)
    assert (c.n_layers, c.d_model, c.n_heads, c.d_head or c.d_model // c.n_heads, c.max_len, c.d_ff) == (n_layers, d_model, n_heads, d_head, 2048, 4 * d_model)
    count = parameters(lambda: GPT(c))
    width = n_heads * d_head
    block = 4 * d_model * width + 3 * width + d_model + 8 * d_model**2 + 5 * d_model + 4 * d_model
    assert count == n_layers * block + 2 * d_model + (50_257 + 2048) * d_model
    assert abs(count / printed - 1) < {"175B": 0.01, "1.3B": 0.17}.get(size, 0.05)
    if size not in ("1.3B", "13B"):
        theirs = GPT2Config(n_embd=d_model, n_layer=n_layers, n_head=n_heads, n_positions=2048)
        assert count == parameters(lambda: GPT2LMHeadModel(theirs))


def test_settings_of_the_papers():
    one, two, three = GPTConfig.gpt1(), GPTConfig.gpt2(), GPTConfig.gpt3()
    assert (one.vocab_size, one.max_len, two.vocab_size, two.max_len, three.vocab_size, three.max_len) == (40_478, 512, 50_257, 1024, 50_257, 2048)
    assert (one.norm_first, two.norm_first, three.norm_first) == (False, True, True)
    for c in (one, two, three):
        assert (c.norm, c.activation, c.gated, c.bias, c.scale, c.dropout, c.eps, c.prefix_lm, c.d_ff) == ("layer", "gelu_tanh", False, True, None, 0.1, 1e-5, False, 4 * c.d_model)
    changed = GPTConfig.gpt2("xl", vocab_size=7, dropout=0.0)
    assert (changed.vocab_size, changed.dropout, changed.d_model) == (7, 0.0, 1600)
    assert GPTConfig.gpt3() == GPTConfig.gpt3("175B") and GPTConfig.gpt2() == GPTConfig.gpt2("small")


def test_input_and_output_share_one_matrix():
    model, x = small(), torch.randn(2, 3, 32)
    assert_close(model.logits(x), x @ model.embedding.tokens.weight.T)
    assert sum(p.shape == (29, 32) for p in model.parameters()) == 1


# Initialisation


@BOTH
def test_initialisation(kind):
    "Normal with 0.02; in pre-norm models, what is added to the way through is divided by √(2 n_layers) (Radford et al. 2019, section 2.3)."
    model, seen = GPT(GPTConfig(vocab_size=3000, max_len=400, d_model=128, n_heads=4, n_layers=8, norm_first=kind == "gpt2")), Counter()
    for name, p in model.named_parameters():
        part = name.removesuffix(".weight").split(".")[-1]
        if name.endswith("bias"):
            assert p.abs().max() == 0, name
        elif part == "norm":
            assert (p == 1).all()
        else:
            std = 0.02 / 4 if part in ("out", "down") and kind == "gpt2" else 0.02
            seen[part] += 1
            assert abs(p.std() / std - 1) < 0.03 and abs(p.mean()) < 0.05 * std and 3 < p.abs().max() / std < 6.5, name
    assert seen == {"tokens": 1, "table": 1, "query_key_value": 8, "out": 8, "up": 8, "down": 8}


# Generation


def generated(theirs, ids, new, **options):
    return theirs.generate(ids, max_new_tokens=new, **dict(do_sample=False, pad_token_id=0) | options)


def again(model, ids, new, prefix=None):
    "Greedily, everything read anew for each token."
    for _ in range(new):
        logits = model(ids) if prefix is None else model(ids, prefix=torch.full((len(ids),), prefix))
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


@ALL
def test_greedy_as_theirs(name, tmp_path):
    "Token for token, up to the last place; a token more is written than is read."
    ours, theirs = both(ODD[name], tmp_path, odd=name)
    room = theirs.config.n_positions
    written = set()
    for n in sorted({1, 2, room // 2}):
        ids = torch.randint(1, theirs.config.vocab_size, (4, n))
        found = continued(ours, ids, room - n + 1)
        assert torch.equal(found, generated(theirs, ids, room - n + 1))
        assert torch.equal(found, again(ours, ids, room - n + 1))
        written |= set(found[:, n:].flatten().tolist())
    assert len(written) > 4 or theirs.config.vocab_size == 3 or room == 2


@BOTH
def test_stop_token_as_theirs(kind, tmp_path):
    "A row that has stopped is filled; all stop together or the limit comes first."
    ours, theirs = both(kind, tmp_path)
    ids, ends = torch.randint(1, 29, (6, 5)), set()
    free = continued(ours, ids, 15)[:, 5:]
    for stop in set(free[:, 3:12].flatten().tolist()):
        found = continued(ours, ids, 15, stop_id=stop)
        assert torch.equal(found, generated(theirs, ids, 15, eos_token_id=stop, pad_token_id=stop))
        for row, whole in zip(found[:, 5:].tolist(), free.tolist()):
            end = whole.index(stop) + 1 if stop in whole else 15
            ends.add(end)
            assert row[:end] == whole[: min(end, len(row))] and set(row[end:]) <= {stop}
        one = continued(ours, ids[:1], 15, stop_id=stop)
        assert one.shape[1] == 5 + ((free[0] == stop).nonzero()[:1].flatten().tolist() or [14])[0] + 1  # no more steps than needed
    assert len(ends) > 3


@BOTH
@pytest.mark.parametrize("beam,alpha", [(1, 0.0), (3, 0.0), (4, 1.0)])
def test_beam_search_as_theirs(kind, beam, alpha, tmp_path):
    ours, theirs = both(kind, tmp_path)
    ids, texts, sizes = torch.randint(1, 29, (3, 5)), set(), set()
    for stop in continued(ours, ids, 6)[:, 10].tolist():
        options = dict(stop_id=stop, pad_id=stop, length_penalty=alpha)
        found = beam_search(ours.step, ours.start(ids[:, :-1]), ids[:, -1], beam=beam, max_new_tokens=12, **options)
        options = dict(eos_token_id=stop, pad_token_id=stop, length_penalty=alpha, early_stopping="never" if beam > 1 else None)
        wanted = generated(theirs, ids, 12, num_beams=beam, num_return_sequences=beam, **options)
        assert torch.equal(found.ids, wanted[:, 5:].unflatten(0, (3, beam)))
        texts, sizes = texts | set(map(tuple, found.ids.flatten(0, 1).tolist())), sizes | set(found.lengths.flatten().tolist())
    assert len(texts) > 2 * beam and len(sizes) > 1  # none of it was trivial


@BOTH
def test_a_batch_of_lengths_as_theirs(kind, tmp_path):
    "Padding at the left, which their mask declares."
    ours, theirs = both(kind, tmp_path)
    mask = lengths(7, 3, 1, 5).flip(1)
    ids = torch.randint(1, 29, mask.shape).where(mask, 0)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    wanted, seen = ids, mask.long()
    for _ in range(14):
        logits = theirs(wanted, attention_mask=seen, position_ids=places).logits[:, -1:]
        wanted, seen = torch.cat([wanted, logits.argmax(-1)], 1), F.pad(seen, (0, 1), value=1)
        places = torch.cat([places, places[:, -1:] + 1], 1)
    assert torch.equal(continued(ours, ids, 14, mask=mask), wanted)
    if kind == "gpt2":  # GPT-1's generate knows no places of its own for such rows
        assert torch.equal(generated(theirs, ids, 14, attention_mask=mask.long()), wanted)


SHAPES = {  # where four prompts of 7, 3, 1 and 5 tokens stand in 9 columns
    "left": [[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1], [0] * 8 + [1], [0, 0, 0, 0, 1, 1, 1, 1, 1]],
    "right": [[1] * 7 + [0] * 2, [1] * 3 + [0] * 6, [1] + [0] * 8, [1] * 5 + [0] * 4],
    "scattered": [[1, 0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0, 1]],
}


@DEVICES
@BOTH
@pytest.mark.parametrize("side", SHAPES)
@pytest.mark.parametrize("prefix_lm", [False, True])
def test_a_batch_is_one_by_one(kind, side, prefix_lm, device):
    "Wherever the padding stands and whatever it holds: greedily, with a stop token, and by chance."
    model, mask = small(kind, prefix_lm=prefix_lm).to(device), torch.tensor(SHAPES[side], device=device).bool()
    ids = torch.randint(29, mask.shape, device=device)
    alone = [ids[row : row + 1, mask[row]] for row in range(4)]
    found = continued(model, ids, 12, mask=mask)
    assert torch.equal(found[:, :9], ids)
    wanted = torch.cat([continued(model, prompt, 12)[:, -12:] for prompt in alone])
    assert torch.equal(found[:, 9:], wanted) and len(set(wanted.flatten().tolist())) > 3
    junk = ids.where(mask, (ids + 11) % 29)
    assert torch.equal(continued(model, junk, 12, mask=mask)[:, 9:], wanted)
    stop = wanted[0, 4].item()
    found = continued(model, ids, 12, stop_id=stop, mask=mask)[:, 9:]
    for row in range(4):
        one = continued(model, alone[row], 12, stop_id=stop)[0, alone[row].shape[1] :]
        assert torch.equal(found[row, : len(one)], one) and (found[row, len(one) :] == stop).all()
    drawn = [continued(model, x, 12, temperature=1.0, mask=mask, generator=torch.Generator(device).manual_seed(3))[:, 9:] for x in (ids, junk)]
    assert torch.equal(*drawn)


def test_a_mask_that_is_true_everywhere_is_none():
    model, ids = small(), torch.randint(29, (3, 6))
    assert torch.equal(continued(model, ids, 9, mask=torch.ones(3, 6, dtype=torch.bool)), continued(model, ids, 9))


@BOTH
def test_steps_are_reading_again(kind):
    "Logits of the cache, with padding, rows exchanged, repeated and dropped on the way."
    model, mask = small(kind), lengths(5, 2, 4).flip(1)
    ids, padding = torch.randint(29, mask.shape), (~mask).sum(1)
    state, texts = model.start(ids[:, :-1], padding), [row[keep] for row, keep in zip(ids, mask)]
    token = ids[:, -1]
    for t in range(12):
        logits, state = model.step(token, state)
        for row, text in enumerate(texts):
            close(logits[row], model(text[None])[0, -1].detach())
        index = {3: [2, 0, 1, 1, 0], 6: [4, 2], 9: [1, 0, 1]}.get(t, range(len(texts)))
        state, texts = state.reorder(torch.tensor(list(index))), [texts[i] for i in index]
        token = torch.randint(29, (len(texts),))
        texts = [torch.cat([text, one[None]]) for text, one in zip(texts, token)]


def test_a_text_from_its_first_token():
    "start reads nothing: a column of first tokens is enough."
    model, begin = small(), torch.tensor([3, 9])
    empty = model.start(begin[:, None][:, :0])
    found = greedy(model.step, empty, begin, max_new_tokens=10).ids
    assert torch.equal(found, again(model, begin[:, None], 10)[:, 1:])


# Chance


def prompt(rows, n=4):
    "One prompt, many times."
    return torch.randint(29, (1, n)).expand(rows, n)


def chi_square(draws, probs):
    "The statistic over its limit at one in ten thousand (Wilson and Hilferty), of tokens that are expected five times and more."
    counts, expected = torch.bincount(draws, minlength=len(probs)).double(), probs.double() * len(draws)
    assert counts[expected == 0].sum() == 0, "a token was drawn that must not be"
    often = expected >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    keep = wanted > 1
    k = int(keep.sum()) - 1
    statistic = ((observed - wanted).square() / wanted)[keep].sum().item()
    limit = k * (1 - 2 / (9 * k) + 3.719 * math.sqrt(2 / (9 * k))) ** 3
    return statistic / limit


RULES = [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=3.0), dict(temperature=1.0, top_k=4), dict(temperature=0.7, top_k=1000),
         dict(temperature=1.0, top_p=0.6), dict(temperature=2.0, top_p=0.8), dict(temperature=1.5, top_k=6, top_p=0.7)]


def by_hand(logits, temperature, top_k=None, top_p=None):
    probs, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    if top_k:
        probs[top_k:] = 0
        probs /= probs.sum()
    if top_p:
        kept, total = 0, 0.0
        while total < top_p:
            total, kept = total + probs[kept].item(), kept + 1
        probs[kept:] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draws_are_distributed_as_the_model_says(rule):
    "The first token of 20,000 rows against softmax by hand; the wrong temperature shows."
    model, ids = small(), prompt(20_000)
    draws = continued(model, ids, 1, **rule, generator=torch.Generator().manual_seed(1))[:, -1]
    logits = model(ids[:1])[0, -1].detach()
    assert chi_square(draws, by_hand(logits, **rule)) < 1
    wrong = rule | dict(temperature=1.15 * rule["temperature"])
    if (by_hand(logits, **wrong) > 0).equal(by_hand(logits, **rule) > 0):
        assert chi_square(draws, by_hand(logits, **wrong)) > 1


def test_later_draws_are_distributed_as_the_model_says():
    "The second and the third token, given those before."
    model, ids = small(), prompt(30_000)
    found = continued(model, ids, 3, temperature=0.6, generator=torch.Generator().manual_seed(2))
    for t in (4, 5, 6):
        common = max(Counter(map(tuple, found[:, :t].tolist())).items(), key=lambda item: item[1])[0]
        rows = (found[:, :t] == torch.tensor(common)).all(1)
        assert rows.sum() > 500
        assert chi_square(found[rows, t], by_hand(model(torch.tensor([common]))[0, -1].detach(), 0.6)) < 1


def test_no_choice_is_greedy(unchecked):
    model, ids = small(), torch.randint(29, (5, 4))
    wanted = continued(model, ids, 12)
    for rule in (dict(temperature=1.0, top_k=1), dict(temperature=5.0, top_k=1), dict(temperature=1.0, top_p=1e-9), dict(temperature=1e-6)):
        assert torch.equal(continued(model, ids, 12, **rule), wanted), rule
    assert torch.equal(continued(model, ids, 12, temperature=0), wanted)


@DEVICES
def test_a_generator_makes_chance_repeatable(device):
    model, ids = small().to(device), torch.randint(29, (5, 4), device=device)
    draw = lambda seed: continued(model, ids, 15, temperature=1.0, generator=torch.Generator(device).manual_seed(seed))
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    torch.manual_seed(7)
    first = continued(model, ids, 15, temperature=1.0)
    torch.manual_seed(7)
    assert torch.equal(continued(model, ids, 15, temperature=1.0), first)
    state = torch.get_rng_state()
    draw(1)
    continued(model, ids, 15)
    assert torch.equal(torch.get_rng_state(), state), "a given generator, or none needed, leaves the global one alone"


# The loop: no waiting, no allocating


class Waits(TorchDispatchMode):
    "Counts operations at which a GPU would make Python wait: a number or a shape is read from values."

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique2", "_to_cpu", "bincount"):
            self.seen[name] += 1
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rule", [{}, dict(temperature=1.0), dict(temperature=1.0, top_k=3, top_p=0.9)], ids=["greedy", "drawn", "cut"])
def test_nothing_waits_for_the_device(rule, padded, unchecked):
    "Without a stop token, as often for two new tokens as for twenty. Ids are looked at on the CPU alone, where that costs nothing, and not under a dispatch mode."
    model, ids = small(), torch.randint(29, (3, 4))
    options = rule | (dict(mask=lengths(4, 2, 3)) if padded else {})

    def waits(new, **more):
        with Waits() as mode:
            continued(model, ids, new, **options | more)
        return mode.seen

    assert waits(2) == waits(20) and waits(20).total() <= (4 if padded else 2)
    free = continued(model, ids, 20, **options)
    unused = next(iter(set(range(29)) - set(free.flatten().tolist())), None)
    if not rule and unused is not None:  # and the count does count: one for each token
        assert waits(20, stop_id=unused).total() >= 18 + waits(2, stop_id=unused).total()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rule", [{}, dict(temperature=1.0, top_k=5, top_p=0.9)], ids=["greedy", "cut"])
def test_nothing_waits_for_the_gpu(rule):
    "CUDA itself complains of a wait: as often for 16 tokens as for 2."
    model, ids = small().cuda(), torch.randint(29, (3, 4), device="cuda")

    def waits(new):
        continued(model, ids, new, **rule)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                continued(model, ids, new, **rule)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in caught)

    assert waits(2) == waits(16) <= 4


def test_the_cache_is_allocated_once(monkeypatch):
    "One for each layer, of the room that the text needs, and written in place."
    made, places, original, step = [], set(), GPT.step, KVCache.__init__

    def init(self, k, v):
        made.append(tuple(k.shape))
        step(self, k, v)

    def stepped(self, ids, state):
        logits, state = original(self, ids, state)
        places.add(tuple(x.data_ptr() for cache in state.caches for x in (cache.own.k, cache.own.v)))
        return logits, state

    monkeypatch.setattr(KVCache, "__init__", init)
    monkeypatch.setattr(GPT, "step", stepped)
    model, ids = small(), torch.randint(29, (3, 4))
    continued(model, ids, 12)
    assert made == [(3, 4, 15, 8)] * 2 and len(places) == 1
    assert len(set(places.pop())) == 4


def test_start_makes_room():
    model, ids = small(), torch.randint(29, (3, 4))
    assert model.start(ids).caches[0].own.k.shape[2] == 24 and model.start(ids, max_len=9).caches[0].own.k.shape[2] == 9
    state = model.start(ids)
    assert not any(cache.own.k.requires_grad for cache in state.caches)
    twin = state.reorder(torch.tensor([2, 1, 0]))
    wanted, _ = model.step(ids[:, 0], twin.reorder(torch.tensor([2, 1, 0])))
    model.step(ids[:, 1], twin)
    close(model.step(ids[:, 0], state)[0], wanted)  # a reordered state leaves the old one alone


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_it_was(training, unchecked):
    "After success and after an error; dropout is off in between."
    model, ids = small(dropout=0.5).train(training), torch.randint(29, (3, 4))
    found = continued(model, ids, 10)
    assert model.training is training and torch.equal(found, continued(model, ids, 10))
    for wrong in (dict(temperature=-1.0), dict(stop_id=99), dict(top_k=0, temperature=1.0)):
        with pytest.raises(ValueError):
            continued(model, ids, 10, **wrong)
        assert {part.training for part in model.modules()} == {training}
    assert not continued(model, ids, 10).requires_grad


def test_parts_that_are_frozen_stay_so():
    "A module held at evaluation, as a frozen trunk is, is still there after generate."
    model = small(dropout=0.5).train()
    model.stack.blocks[0].eval()
    continued(model, torch.randint(29, (2, 4)), 3)
    assert model.training and not model.stack.blocks[0].training and not model.stack.blocks[0].attention.dropout.training


@BOTH
def test_a_compiled_step(kind, monkeypatch, unchecked):
    "The same tokens, compiled twice at most."
    torch._dynamo.reset()
    model, ids, counter = small(kind, n_layers=1), torch.randint(29, (2, 4)), CompileCounter()
    step = torch.compile(model.step, dynamic=True, fullgraph=True, backend=counter)
    found = greedy(step, model.start(ids[:, :-1]), ids[:, -1], max_new_tokens=15).ids
    assert torch.equal(found, continued(model, ids, 15)[:, 4:]) and len(set(found.flatten().tolist())) > 3
    assert counter.frame_count <= 2
    torch._dynamo.reset()


# Prefixes


def brute_force(prefix, n):
    return torch.tensor([[[j <= i or j < p for j in range(n)] for i in range(n)] for p in prefix])


def test_prefix_mask_by_brute_force():
    for n in (1, 2, 5):
        for prefix in itertools.product(range(n + 2), repeat=2):
            assert torch.equal(prefix_mask(torch.tensor(prefix), n), brute_force(prefix, n))


@BOTH
def test_no_prefix_is_a_gpt(kind):
    "With the same weights, prefixes of 0 and of 1 are the model that reads from left to right."
    model, prefixed = small(kind), GPT(GPTConfig(**SMALL | dict(norm_first=kind == "gpt2", prefix_lm=True))).eval()
    prefixed.load_state_dict(model.state_dict())
    ids = torch.randint(29, (3, 9))
    for prefix in (None, torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.long), torch.tensor([1, 0, 1], dtype=torch.int32)):
        close(prefixed(ids, prefix=prefix), model(ids))
    assert (prefixed(ids, prefix=torch.tensor([2, 5, 9])) - model(ids)).abs().amax((1, 2)).min() > 1e-3


@BOTH
def test_a_prefix_sees_itself_and_nothing_beyond(kind):
    "A change at j reaches i if j <= i or both are in the prefix; otherwise not a bit of i moves."
    model, n, prefix = small(kind, prefix_lm=True, n_layers=3), 8, torch.tensor([0, 1, 3, 8])
    ids = torch.randint(29, (4, n))
    before, allowed = model(ids, prefix=prefix), brute_force(prefix.tolist(), n)
    for j in range(n):
        changed = ids.clone()
        changed[:, j] = (ids[:, j] + 5) % 29
        moved = (model(changed, prefix=prefix) != before).any(-1)
        assert torch.equal(moved, allowed[:, :, j]), j


@BOTH
def test_a_prefix_as_their_layers_compute_it(kind, tmp_path):
    "Their model with its triangle replaced by our mask."
    theirs = ROWS[kind].model_of_theirs()
    ours, ids, prefix = ROWS[kind].twin(theirs, tmp_path, prefix_lm=True), torch.randint(29, (3, 9)), torch.tensor([4, 9, 0])
    allowed = brute_force(prefix.tolist(), 9)[:, None]
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    if kind == "gpt2":
        wanted = theirs(ids, attention_mask=added).logits
    else:
        for block in theirs.transformer.h:
            block.attn.bias = torch.ones_like(block.attn.bias)
        x = theirs.transformer.tokens_embed(ids) + theirs.transformer.positions_embed.weight[:9]
        for block in theirs.transformer.h:
            x = block(x, attention_mask=added)[0]
        wanted = theirs.lm_head(x)
    close(ours(ids, prefix=prefix), wanted)


@BOTH
def test_generation_after_a_prefix(kind):
    "The prompt but for its last token is read at once and is the prefix; cached and uncached agree."
    model, ids = small(kind, prefix_lm=True), torch.randint(29, (4, 7))
    found = continued(model, ids, 17)
    prefixes = {n: again(model, ids, 17, prefix=n) for n in (6, 7)}
    assert torch.equal(found, prefixes[6])


@pytest.mark.parametrize("prefix_lm", [False, True])
def test_a_mask_for_padding_at_the_end(prefix_lm):
    "With it a row gives what it gives alone, and padding in front is refused."
    model, ids, mask = small(prefix_lm=prefix_lm), torch.randint(29, (2, 9)), torch.arange(9) < torch.tensor([[9], [5]])
    prefix = torch.tensor([3, 2]) if prefix_lm else None
    found = model(ids, mask, prefix=prefix)
    close(found[0], model(ids[:1], prefix=prefix if prefix is None else prefix[:1])[0])
    close(found[1, :5], model(ids[1:, :5], prefix=prefix if prefix is None else prefix[1:])[0])
    with pytest.raises(ValueError, match="mask must be True at the beginning of each row"):
        model(ids, mask.flip(1), prefix=prefix)


def test_reading_on_after_a_prefix():
    "Several tokens at once, one by one, or all in one pass: what follows the prefix sees no later token."
    model, ids = small(prefix_lm=True), torch.randint(29, (2, 9))
    wanted = model.states(ids, prefix=torch.tensor([4, 4])).detach()
    for pieces in ([5], [2, 3], [1] * 5):
        state, found = model.start(ids[:, :4]), []
        for size in pieces:
            at = state.length
            x, state = model.read(ids[:, at : at + size], state)
            found.append(x)
        close(torch.cat(found, 1), wanted[:, 4:])


def test_padding_that_all_rows_have_takes_no_room():
    model, ids = small(), torch.randint(29, (2, 30))
    mask = torch.arange(30) >= torch.tensor([[27], [28]])
    found = model.generate(ids, 10, mask=mask)
    for row in range(2):
        assert torch.equal(found[row], model.generate(ids[row : row + 1, mask[row]], 10)[0])


def test_a_part_starts_anew_as_a_whole_does():
    "Residual matrices of a fresh stack too have the smaller spread."
    model = GPT(GPTConfig(**SMALL | dict(n_layers=4, d_model=64, d_ff=256)))
    before = {name: p.std().item() for name, p in model.stack.named_parameters() if p.ndim > 1}
    model.initialise(model.stack)
    for name, p in model.stack.named_parameters():
        if p.ndim > 1:
            assert abs(p.std().item() / before[name] - 1) < 0.1, name


# What a hostile user tries

says = partial(messages.says, or_else="shorten|ask|keep|call|none of the")


test_bad_settings = messages.refused([
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("vocab_size", "max_len", "d_model", "n_heads", "d_ff", "n_layers", "n_classes") for value in (0, -1)),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(eps=-1.0), ["eps=-1.0"]),
    (dict(norm="batch"), ["norm='batch'", "layer", "rms"]),
    (dict(activation="gelu_new"), ["activation='gelu_new'", "gelu_tanh"]),
    (dict(bias="no"), ["bias='no'", "True or False"]),
    (dict(gated=3), ["gated=3", "True or False"]),
    (dict(scale="a"), ["scale='a'"]),
    (dict(scale=math.nan), ["scale=nan"]),
    (dict(prefix_lm=1), ["prefix_lm=1"]),
], lambda changes: GPT(GPTConfig(**SMALL | changes)), or_else="shorten|ask|keep|call|none of the", errors=ValueError)


def test_unknown_sizes(unchecked):
    with pytest.raises(ValueError, match=says("'giant'", "'small'", "'medium'", "'large'", "'xl'")):
        GPTConfig.gpt2("giant")
    with pytest.raises(ValueError, match=says("'xl'", *map(repr, GPT3))):
        GPTConfig.gpt3("xl")
    with pytest.raises(TypeError, match="d_mode"):
        GPTConfig.gpt2(d_mode=3)


def ids_(*shape):
    return torch.full(shape, 5)


def write(ids=None, new=5, prefix_lm=False, **options):
    return small(prefix_lm=prefix_lm).generate(ids_(2, 5) if ids is None else ids, new, **options)


def read(ids=None, prefix=None, prefix_lm=False):
    return small(prefix_lm=prefix_lm)(ids_(2, 5) if ids is None else ids, prefix=prefix)


def stepped(ids):
    model = small()
    return model.step(ids, model.start(ids_(2, 5)))


def classified(ids=None, mask=None):
    return GPTForSequenceClassification(GPTConfig(**SMALL))(ids_(2, 5) if ids is None else ids, mask)


FLAG = torch.ones(2, 5, dtype=torch.bool)


test_bad_calls = messages.refused([
    # lengths
    (lambda: read(ids_(2, 25)), ["25", "max_len=24"]),
    (lambda: small().states(ids_(2, 25)), ["25", "max_len=24"]),
    (lambda: small().start(ids_(2, 25)), ["25"]),
    (lambda: small().start(ids_(2, 5), max_len=4), ["4", "5"]),
    (lambda: small().start(ids_(2, 5), max_len=-1), ["max_len=-1"]),
    (lambda: small().start(ids_(2, 5)[:, :0], max_len=0), ["max_len=0"]),
    (lambda: write(ids_(2, 25), 1), ["25", "max_len=24"]),
    (lambda: write(ids_(2, 21), 5), ["21", "5", "25", "max_len=24"]),
    (lambda: write(ids_(2, 1), 25), ["1", "25", "max_len=24"]),
    (lambda: classified(ids_(2, 25)), ["25", "max_len=24"]),
    # ids
    (lambda: read(ids_(2, 5) + 24), ["ids", "29"]),
    (lambda: read(ids_(2, 5) - 6), ["ids", "-1", "29"]),
    (lambda: read(ids_(2, 5).float()), ["ids", "float32"]),
    (lambda: read(FLAG), ["ids", "bool"]),
    (lambda: read(ids_(5)), ["ids", "(5,)"]),
    (lambda: read(ids_(2, 5, 1)), ["ids", "(2, 5, 1)"]),
    (lambda: read(ids_(0, 5)), ["ids", "(0, 5)"]),
    (lambda: read(ids_(2, 0)), ["ids", "(2, 0)"]),
    (lambda: write(ids_(2, 5) + 24), ["ids", "29"]),
    (lambda: write(ids_(2, 5).float()), ["ids", "float32"]),
    (lambda: write(ids_(2, 0)), ["ids", "(2, 0)"]),
    (lambda: write(ids_(0, 5)), ["ids", "(0, 5)"]),
    (lambda: write(ids_(5)), ["ids", "(5,)"]),
    (lambda: stepped(torch.tensor([5, 29])), ["ids", "29"]),
    (lambda: stepped(torch.tensor([5.0, 5.0])), ["ids", "float32"]),
    (lambda: stepped(ids_(3)), ["ids", "2"]),
    (lambda: stepped(ids_(1)), ["ids", "2"]),
    (lambda: classified(ids_(2, 5) + 24), ["ids", "29"]),
    # how much and which
    (lambda: write(new=0), ["max_new_tokens", "0"]),
    (lambda: write(new=-1), ["max_new_tokens", "-1"]),
    (lambda: write(new=2.5), ["max_new_tokens", "2.5"]),
    (lambda: write(temperature=-0.5), ["temperature", "-0.5"]),
    (lambda: write(temperature=math.nan), ["temperature", "nan"]),
    (lambda: write(temperature=math.inf), ["temperature", "inf"]),
    (lambda: write(temperature=1.0, top_k=0), ["top_k", "0"]),
    (lambda: write(temperature=1.0, top_p=0.0), ["top_p", "0.0"]),
    (lambda: write(temperature=1.0, top_p=1.5), ["top_p", "1.5"]),
    (lambda: write(stop_id=29), ["stop_id=29"]),
    (lambda: write(stop_id=-2), ["stop_id=-2"]),
    (lambda: write(stop_id=1.5), ["stop_id=1.5"]),
    (lambda: write(pad_id=0.5), ["pad_id=0.5"]),
    (lambda: write(top_p=0.9), ["top_p=0.9", "temperature=1.0"]),
    (lambda: write(top_k=3), ["top_k=3", "temperature=1.0"]),
    (lambda: write(beam=3, temperature=1.0), ["beam=3", "temperature=1.0"]),
    (lambda: write(beam=0), ["beam=0"]),
    (lambda: write(length_penalty=0.5), ["length_penalty=0.5", "beam"]),
    (lambda: write([[5]]), ["ids", "list"]),
    (lambda: read(prefix=torch.tensor([9, 2]), prefix_lm=True), ["prefix=[9, 2]", "0 to 5"]),
    # what ids are made of
    (lambda: read(ids_(2, 5).byte()), ["ids", "uint8"]),
    (lambda: read(ids_(2, 5).short()), ["ids", "int16"]),
    (lambda: read([[5, 5]]), ["ids", "list"]),
    # padding
    (lambda: small().start(ids_(2, 5), torch.tensor([99, 0])), ["padding=[99, 0]", "0 to 5"]),
    (lambda: small().start(ids_(2, 5), torch.tensor([-1, 0])), ["padding=[-1, 0]", "0 to 5"]),
    (lambda: read(prefix=torch.tensor([-1, 2]), prefix_lm=True), ["prefix=[-1, 2]"]),
    # masks
    (lambda: write(mask=FLAG.float()), ["mask", "float32", "bool"]),
    (lambda: write(mask=FLAG.long()), ["mask", "int64", "bool"]),
    (lambda: write(mask=FLAG[:, :4]), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: write(mask=FLAG[0]), ["mask", "(5,)", "(2, 5)"]),
    (lambda: write(mask=FLAG[:1]), ["mask", "(1, 5)", "(2, 5)"]),
    (lambda: write(mask=FLAG & torch.tensor([[True], [False]])), ["row 1", "mask", "no token"]),
    (lambda: classified(mask=FLAG.float()), ["mask", "float32"]),
    (lambda: classified(mask=FLAG.long()), ["mask", "int64"]),
    (lambda: classified(mask=FLAG[:, :4]), ["mask", "(2, 4)"]),
    (lambda: classified(mask=FLAG[:1]), ["mask", "(1, 5)"]),
    (lambda: classified(mask=FLAG & torch.tensor([[True], [False]])), ["mask", "one token or more"]),
    (lambda: classified(mask=lengths(5, 3).flip(1)), ["mask", "one token or more"]),
    # prefixes
    (lambda: read(prefix=torch.tensor([1, 2])), ["prefix", "prefix_lm=True"]),
    (lambda: read(prefix=torch.tensor([1, 2, 3]), prefix_lm=True), ["prefix", "(3,)", "2"]),
    (lambda: read(prefix=torch.tensor(3), prefix_lm=True), ["prefix", "()", "2"]),
    (lambda: read(prefix=torch.tensor([1.0, 2.0]), prefix_lm=True), ["prefix", "float32"]),
    (lambda: read(prefix=torch.tensor([True, False]), prefix_lm=True), ["prefix", "bool"]),
], or_else="shorten|ask|keep|call|none of the")


def test_padding_of_the_wrong_kind(unchecked):
    model = small()
    for padding in (torch.tensor([1.0, 0.0]), torch.tensor([1, 0, 2]), torch.tensor(1), torch.tensor([True, False])):
        with pytest.raises((ValueError, TypeError), match="padding"):
            model.start(ids_(2, 5), padding)


def test_exactly_full_is_not_too_much():
    model = small()
    assert model(ids_(1, 24)).shape == (1, 24, 29)
    assert continued(model, ids_(1, 24), 1).shape == (1, 25) and continued(model, ids_(1, 1), 24).shape == (1, 25)
    state = model.start(ids_(1, 24))
    with pytest.raises(ValueError, match="24"):
        model.step(ids_(1), state)


def test_padded_rows_have_no_more_positions_either(unchecked):
    "A row that begins later may write later, but no row gets a position beyond the last."
    model = small()
    state = model.start(ids_(2, 24), torch.tensor([3, 1]), max_len=30)
    _, state = model.step(ids_(2), state)
    with pytest.raises(ValueError, match="25 tokens are more than max_len=24"):
        model.step(ids_(2), state)


def test_upcast_attention_is_only_a_matter_of_precision(tmp_path):
    "`reorder_and_upcast_attn` changes how `transformers` rounds, not what it computes."
    ours, theirs = both("gpt2", tmp_path, reorder_and_upcast_attn=True)
    ids = torch.randint(29, (2, 9))
    close(ours(ids), theirs(ids).logits)


def test_dropout_where_the_papers_have_it():
    "On embeddings with places, on attention and on each sublayer's output; all with one rate, none at evaluation."
    model = small(dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25} and len(rates) == 1 + 2 * 2
    assert {block.attention.layer.dropout for block in model.stack.blocks} == {0.25}
    ids = torch.randint(29, (2, 5))
    assert torch.equal(model(ids), model(ids)) and not torch.equal(model.train()(ids), model(ids))


@pytest.mark.gpu
@GPU
@BOTH
def test_text_on_a_gpu(kind, tmp_path):
    "The CPU's tokens."
    ours, _ = both(kind, tmp_path)
    ids = torch.randint(29, (4, 5))
    text = continued(ours, ids, 19)
    assert torch.equal(continued(ours.cuda(), ids.cuda(), 19).cpu(), text)


@pytest.mark.gpu
@GPU
def test_a_compiled_step_on_a_gpu(unchecked):
    torch._dynamo.reset()
    model, ids = small().cuda(), torch.randint(29, (2, 4), device="cuda")
    wanted = continued(model, ids, 15)[:, 4:]
    step = torch.compile(model.step, dynamic=True)
    assert torch.equal(greedy(step, model.start(ids[:, :-1]), ids[:, -1], max_new_tokens=15).ids, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("given, remedy", [
    ([[1, 2]], r"ids is list; it must hold token ids.*: try torch.tensor\(ids\), or data.pad\(ids\)"),
    (["one", "two"], "ids is list.*tokenization.encode_texts"),
    ("one", r"ids is str.*torch.tensor\(\[tokenizer.encode\(text\).ids\]\)"),
    (None, r"ids is NoneType.*of shape \(b, n\).*give a tensor"),
    (torch.ones(1, 2), r"ids is torch.float32 of shape \(1, 2\).*try ids.long\(\)")])
def test_what_is_no_tensor_of_ids(given, remedy, unchecked):
    model = GPT(GPTConfig(vocab_size=9, max_len=4, d_model=8, n_heads=2, n_layers=1))
    for call in (model, lambda ids: model.generate(ids, 2)):
        with pytest.raises(ValueError, match=remedy):
            call(given)


def test_sizes_are_the_configurations():
    "Python's own message names the class; run apart, for the suite's checks of shapes have one of theirs."
    code = "from annotated_nlp import GPT; GPT(vocab_size=100)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TypeError: GPT.__init__() got an unexpected keyword argument 'vocab_size'" in done.stderr
