"Words in context: PyTorch's layers, closed forms, printed sizes; and what must not matter."

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import test_invariants
from parity import close, lengths
from annotated_nlp.contextual import CharacterEmbedding, ELMo, ElmoConfig, LSTMConfig
from annotated_nlp.contextual import LSTMLanguageModel, LockedDropout, Mix
from annotated_nlp.contextual import UlmfitClassifier, WeightDropLSTM, elmo_loss
from annotated_nlp.contextual import layer_rates, reading_order, slanted_triangular, spell, unfreeze

unchecked = test_invariants.unchecked
V, REAL = 20, lengths(7, 4, 6, 2)
SPELLING = spell(["", *(chr(97 + i) * (1 + i % 3) for i in range(V - 1))], 6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def lstm_model(**changes):
    return LSTMLanguageModel(LSTMConfig(**dict(vocab_size=V, d_model=12, d_hidden=16, n_layers=2) | changes))


def elmo(**changes):
    sizes = dict(vocab_size=V, d_model=8, d_hidden=12, filters=((1, 4), (3, 8)), dropout=0.0)
    return ELMo(ElmoConfig(**sizes | changes))


# A language model


def test_saved_and_loaded(tmp_path):
    "Weights and settings come back; a part that is asked for anew starts as the constructor starts it, the rest as it was."
    model = lstm_model(eos_id=3, dropout_weights=0.25).eval()
    model.save_pretrained(tmp_path)
    back = LSTMLanguageModel.from_pretrained(tmp_path)
    assert back.config == model.config
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in back.state_dict().items())
    fresh = LSTMLanguageModel.from_pretrained(tmp_path, fresh=["layers.1"])
    assert_close(fresh.layers[0].lstm.weight_hh_l0, model.layers[0].lstm.weight_hh_l0)
    gate = fresh.layers[1].lstm.weight_hh_l0[:12]
    assert not torch.equal(gate, model.layers[1].lstm.weight_hh_l0[:12])
    assert_close(gate @ gate.T, torch.eye(12))  # orthogonal, as start_well makes it
    assert fresh.layers[1].lstm.bias_ih_l0[12:24].mean() > 0.5  # an open forget gate


def test_stops_by_itself():
    model = lstm_model(eos_id=3).eval()
    with torch.no_grad():
        model.bias[3] = 50.0
    assert model.generate(torch.tensor([[5, 6]]), 4).tolist() == [[3]]
    assert model.generate(torch.tensor([[5, 6]]), 4, stop_id=-1).tolist() == [[3] * 4]


@torch.no_grad()
def test_language_model_is_pytorchs_lstm():
    "Layers of equal width against one nn.LSTM of two layers; then a state that is carried on, and all layers."
    model = lstm_model(d_hidden=12)
    theirs = nn.LSTM(12, 12, 2, batch_first=True)
    for depth, layer in enumerate(model.layers):
        for name, p in layer.lstm.named_parameters():
            getattr(theirs, name.replace("l0", f"l{depth}")).copy_(p)
    ids = torch.randint(V, (3, 8))
    wanted, (h, c) = theirs(model.embedding(ids))
    assert_close(model.states(ids), wanted)
    assert_close(model(ids), wanted @ model.embedding.weight.T + model.bias)
    first, state = model.read(ids[:, :5])
    second, state = model.read(ids[:, 5:], state)
    assert_close(torch.cat([first[-1], second[-1]], 1), wanted)
    assert_close(torch.cat([pair[0] for pair in state.layers]), h)
    assert_close(torch.cat([pair[1] for pair in state.layers]), c)
    assert [x.shape[-1] for x in lstm_model().states(ids, all_layers=True)] == [12, 16, 12]


def test_sizes_are_the_papers():
    "AWD-LSTM has 24M parameters on Penn Treebank and 33M on WikiText-2 (Merity et al. 2018, tables 1 and 2)."
    for vocab_size, millions in ((10_000, 24), (33_278, 33)):
        with torch.device("meta"):
            model = LSTMLanguageModel(LSTMConfig.ulmfit(vocab_size))
        assert sum(p.numel() for p in model.parameters()) // 10**6 == millions


def test_dropped_weights():
    "In training the recurrent matrix alone is dropped, once a call, its gradient too; as PyTorch's parametrization does it."
    layer, x = WeightDropLSTM(4, 5, dropout=0.5), torch.randn(2, 6, 4)
    torch.manual_seed(1)
    found, _ = layer.train()(x)
    found.sum().backward()
    torch.manual_seed(1)
    kept = F.dropout(torch.ones(20, 5), 0.5)
    weight = layer.lstm.weight_hh_l0
    assert weight.grad[kept == 0].eq(0).all() and weight.grad[kept > 0].ne(0).all()

    class Dropped(nn.Module):
        def forward(self, w):
            return w * kept

    cell = nn.LSTMCell(4, 5)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data.copy_(getattr(layer.lstm, f"{name}_l0"))
    parametrize.register_parametrization(cell, "weight_hh", Dropped())
    state, wanted = None, []
    for t in range(6):
        state = cell(x[:, t], state)
        wanted.append(state[0])
    wanted = torch.stack(wanted, 1)
    assert_close(found, wanted)
    wanted.sum().backward()
    assert_close(weight.grad, cell.parametrizations.weight_hh.original.grad)
    assert_close(layer.eval()(x)[0], layer.lstm(x)[0])


def test_locked_dropout():
    "The same features at every position of a row, others in another row, about p of them; nothing at evaluation."
    layer, x = LockedDropout(0.3), torch.ones(50, 4, 200)
    found = layer.train()(x)
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert not torch.equal(found[0], found[1])
    assert found.eq(0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert_close(found.max().item(), 1 / 0.7)
    assert layer.eval()(x) is not None and torch.equal(layer(x), x)


def test_words_are_dropped_whole():
    model = lstm_model(dropout_words=0.5).train()
    states, _ = model.read(torch.arange(V).repeat(2, 1))
    gone = states[0].eq(0).all(-1)
    assert torch.equal(gone[0], gone[1]) and 0 < gone[0].sum() < V


@torch.no_grad()
def test_writes_from_prompts_with_padding_anywhere():
    model = lstm_model().eval()
    model.embedding.weight.mul_(20)
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    ids = torch.randint(V, (2, 4))
    together = model.generate(ids, 6, mask=mask)
    for row in range(2):
        text = ids[row][mask[row]][None]
        alone = model.generate(text, 6)
        assert torch.equal(together[row], alone[0])
        for _ in range(6):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        assert torch.equal(text[0, -6:], alone[0])


# ELMo


def test_spelling():
    "As AllenNLP's, see its ELMoCharacterMapper, apart from padding."
    found = spell(["cat", "", "été", "abcdefgh"], 7)
    assert found.tolist() == [
        [259, 100, 98, 117, 260, 0, 0],
        [0] * 7,
        [259, 196, 170, 117, 196, 170, 260],
        [259, 98, 99, 100, 101, 102, 260],
    ]


def test_sizes_are_those_released():
    "93.6M and 13.6M, without the output layer, as AllenNLP lists them; PyTorch's LSTM has a second bias that theirs lacks."
    for config, wanted in ((ElmoConfig.original(9), 93.6), (ElmoConfig.small(9), 13.6)):
        with torch.device("meta"):
            model = ELMo(config)
        second = sum(p.numel() for name, p in model.named_parameters() if "bias_hh" in name)
        count = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.head.parameters()) - second
        assert round(count / 1e6, 1) == wanted


def test_a_spelling_has_one_vector():
    "Whatever stands beside it, and however many zeros follow."
    model = CharacterEmbedding(ElmoConfig(V))
    short, long = spell(["cat", "at", ""], 6), spell(["cat", "at", ""], 20)
    found = model(short[None])
    assert_close(model(long[None]), found)
    assert_close(model(short[1:2, None])[0, 0], found[0, 1])
    assert (found[0, 0] - found[0, 1]).abs().max() > 1e-3


def test_characters_by_brute_force():
    model, [word] = CharacterEmbedding(ElmoConfig(V, filters=((2, 3),), d_model=4)), spell(["ab"], 5).tolist()
    vectors = [model.characters.weight[i] for i in word]
    answers = []
    for w, b in zip(model.convolutions[0].weight, model.convolutions[0].bias):
        answers.append(max(((torch.stack(vectors[i : i + 2], 1) * w).sum() + b).item() for i in range(4)))
    x = torch.tensor(answers).clamp(min=0)
    new, carry = model.highways[0](x).chunk(2)
    wanted = model.project(carry.sigmoid() * x + (1 - carry.sigmoid()) * new.relu())
    assert_close(model(torch.tensor([[word]]))[0, 0], wanted)


@torch.no_grad()
def test_elmo_is_pytorchs_bidirectional_lstm():
    "One layer: each direction of a packed nn.LSTM. Two layers are not: each direction is alone, with a residual path."
    words = SPELLING[torch.randint(1, V, (4, 7))]
    model = elmo(n_layers=1).eval()
    theirs = nn.LSTM(8, 12, proj_size=8, bidirectional=True, batch_first=True)
    for name, ending in (("rightward", ""), ("leftward", "_reverse")):
        for key, p in model.directions[name][0].named_parameters():
            getattr(theirs, key + ending).copy_(p)
    x = model.embedding(words)
    packed = nn.utils.rnn.pack_padded_sequence(x, REAL.sum(1), batch_first=True, enforce_sorted=False)
    wanted, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    assert_close(model.states(words, REAL), wanted)
    deep = elmo().eval()
    (_, one, two), _ = deep.layers(words, REAL)
    assert_close(two, (deep.directions["rightward"][1](one)[0] + one) * REAL[..., None])


@torch.no_grad()
def test_no_direction_sees_the_other_side():
    "A changed word changes forward states from itself on and backward states up to itself, in every layer."
    model, ids = elmo().eval(), torch.randint(1, V, (1, 7))
    changed = ids.clone()
    changed[0, 3] = 1 + ids[0, 3] % (V - 1)
    for before, after, sees in zip(model.layers(SPELLING[ids]), model.layers(SPELLING[changed]), (range(3, 7), range(4))):
        differs = (before - after)[1:, 0].abs().amax(-1) > 0
        assert differs.tolist() == [[i in sees for i in range(7)]] * 2
    after, before = model(SPELLING[ids])
    assert after.shape == before.shape == (1, 7, V)


@torch.no_grad()
def test_elmo_loss_by_hand():
    model, ids = elmo().eval(), torch.randint(1, V, (4, 7))
    logits = model(SPELLING[ids], REAL)
    after, before = (x.log_softmax(-1) for x in logits)
    n = (7, 4, 6, 2)
    forward = [-after[b, t, ids[b, t + 1]] for b in range(4) for t in range(n[b] - 1)]
    backward = [-before[b, t, ids[b, t - 1]] for b in range(4) for t in range(1, n[b])]
    assert_close(elmo_loss(logits, ids, REAL), (torch.stack(forward).mean() + torch.stack(backward).mean()) / 2)


def test_mix():
    mix, states = Mix(3), torch.randn(3, 2, 4, 5)
    assert_close(mix(tuple(states)), states.mean(0))
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([0.0, math.log(2), math.log(5)]))
        mix.scale.fill_(3)
    assert_close(mix.shares, torch.tensor([1, 2, 5]) / 8)
    assert_close(mix(tuple(states)), 3 * (states[0] + 2 * states[1] + 5 * states[2]) / 8)


def test_reading_order():
    mask = torch.tensor([[True, True, True, False], [False, True, False, True]])
    assert reading_order(mask)[:, :2].tolist() == [[0, 1], [1, 3]]
    assert reading_order(mask, backward=True).tolist() == [[2, 1, 0, 3], [3, 1, 0, 2]]


# ULMFiT


def test_slanted_triangle_is_equation_3():
    steps, cut, ratio = 100, 10, 32
    for t in range(1, steps + 1):
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (steps / cut - 1))  # as printed, with 1 / cut_frac = T / cut
        assert slanted_triangular(t, steps, cut) == pytest.approx((1 + p * (ratio - 1)) / ratio)
    assert slanted_triangular(cut, steps, cut) == 1 and slanted_triangular(steps, steps, cut) == 1 / ratio
    assert all(0 < slanted_triangular(t, 1, warmup) <= 1 for t in (1,) for warmup in (0, 1))


def test_rates_by_layer():
    found = layer_rates(["a", "b", "c"])
    assert found == pytest.approx({"a": 1 / 2.6**2, "b": 1 / 2.6, "c": 1.0})


def test_unfreezing():
    model = UlmfitClassifier(lstm_model(dropout_output=0.1))
    assert model.parts == ["trunk.embedding", "trunk.layers.0", "trunk.layers.1", "head"]
    for n in range(1, 5):
        unfreeze(model, model.parts, n)
        free = {name for name, p in model.named_parameters() if p.requires_grad}
        assert free == {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{part}." for part in model.parts[-n:]))}


@torch.no_grad()
def test_head_reads_last_max_and_mean():
    model, ids = UlmfitClassifier(lstm_model(), n_classes=3).eval(), torch.randint(V, (4, 7))
    states, pooled = model.trunk.states(ids), model.pooled(ids, REAL)
    for row, n in enumerate((7, 4, 6, 2)):
        own = states[row, :n]
        assert_close(pooled[row], torch.cat([own[-1], own.amax(0), own.mean(0)]))
    assert_close(model(ids, REAL), model.head(pooled))
    assert_close(model(F.pad(ids, (0, 4), value=5), F.pad(REAL, (0, 4))), model(ids, REAL))


def test_gradients_are_those_of_float64():
    model, ids = UlmfitClassifier(lstm_model()), torch.randint(V, (4, 7))
    double = UlmfitClassifier(lstm_model()).double()
    double.load_state_dict(model.state_dict())
    for one in (model, double):
        F.cross_entropy(one.eval()(ids, REAL), torch.tensor([0, 1, 1, 0])).backward()
    for p, q in zip(model.parameters(), double.parameters()):
        if p.grad is not None:
            close(p.grad.double(), q.grad, 1e-4)


# Wrong calls


WRONG = {
    "dropout": (lambda: LockedDropout(1.0), "p=1.0"),
    "weights": (lambda: WeightDropLSTM(2, 2, -0.1), "dropout=-0.1"),
    "config": (lambda: LSTMConfig(10, n_layers=0), "n_layers=0"),
    "rate": (lambda: LSTMConfig(10, dropout_words=1.5), "dropout_words=1.5"),
    "no config": (lambda: LSTMLanguageModel(10), "LSTMConfig"),
    "ids": (lambda: lstm_model()(torch.full((1, 3), V)), f"id {V}"),
    "floats": (lambda: lstm_model()(torch.zeros(1, 3)), "ids"),
    "prompt": (lambda: lstm_model().generate(torch.zeros(2, 3, dtype=torch.long), 2, mask=lengths(3, 0)), "row 1"),
    "spell": (lambda: spell(["a"], 2), "max_chars=2"),
    "elmo": (lambda: ElmoConfig(5, d_model=8, d_hidden=4), "d_hidden=4"),
    "no filters": (lambda: ElmoConfig(5, filters=()), "filters is empty"),
    "words": (lambda: elmo()(torch.zeros(1, 2, 5)), "words"),
    "elmo mask": (lambda: elmo()(SPELLING[None], torch.ones(1, 2, dtype=torch.bool)), "mask"),
    "layers": (lambda: Mix(3)(torch.zeros(2, 1, 1, 1)), "2 layers"),
    "factor": (lambda: layer_rates(["a"], 0.5), "factor=0.5"),
    "parts": (lambda: unfreeze(nn.Linear(1, 1), ["weight"], 2), "n=2"),
    "names": (lambda: unfreeze(nn.Linear(1, 1), ["head"], 1), "'head'"),
    "padding first": (lambda: UlmfitClassifier(lstm_model())(torch.zeros(2, 3, dtype=torch.long), lengths(3, 2).flip(1)), "beginning"),
}


@pytest.mark.parametrize("call,words", WRONG.values(), ids=WRONG)
def test_wrong_calls_are_refused(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
        call()


# The invariants of every model, asked here of ELMo, which reads spellings


class Spelled(nn.Module):
    "An ELMo that takes ids of V made-up words."

    def __init__(self, **changes):
        super().__init__()
        self.elmo = elmo(**changes)

    def forward(self, ids, mask=None):
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return torch.cat(self.elmo(SPELLING.to(ids.device)[ids], mask), -1)


CASE = test_invariants.Case("elmo", lambda **changes: Spelled(**changes), "text", compiles=False)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_elmo_has_no_trace_of_padding(train):
    test_invariants.no_trace_of_padding(CASE, "cpu", train)


def test_elmo_in_a_batch_is_elmo_alone():
    test_invariants.batch_is_one_by_one(CASE, "cpu")


def test_elmo_round_trip(tmp_path):
    test_invariants.state_round_trip(CASE, "cpu", tmp_path)


@pytest.mark.parametrize("extreme", ["weights", "repeated", "padding"])
def test_elmo_gradients_stay_finite(extreme):
    test_invariants.gradients_stay_finite(CASE, "cpu", extreme)


def test_configurations_are_frozen():
    config = LSTMConfig.ulmfit(times=0.5)
    assert (config.dropout_weights, config.dropout_input, config.vocab_size) == (0.25, 0.2, 30_000)
    assert replace(config, n_layers=1).n_layers == 1
    with pytest.raises(AttributeError):
        config.n_layers = 2
