"""seq2seq against PyTorch's own layers, closed forms and brute force: values, losses and gradients."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import test_invariants
from annotated_nlp.attention import dot_product_attention
from annotated_nlp.data import Batch, batches
from annotated_nlp.decoding import greedy
from annotated_nlp.parts.recurrent import CELLS, RNN, FusedRNN, GRUCell, LSTMCell
from annotated_nlp.parts.recurrent import RNNCell, start_well
from annotated_nlp.seq2seq import Seq2Seq, Seq2SeqConfig, Seq2SeqState, cross_entropy
from annotated_nlp.seq2seq import teacher_forcing

unchecked = test_invariants.unchecked

BOS, EOS = 2, 3


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


CELL_NAMES = list(CELLS)


def ragged(lengths, width, n=None):
    "Random inputs (float64) with a right-padded mask."
    n = max(lengths) if n is None else n
    mask = torch.arange(n) < torch.tensor(lengths)[:, None]
    return torch.randn(len(lengths), n, width, dtype=torch.float64), mask


def grads(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


# Cells and their loop


@pytest.mark.parametrize("ours, theirs", [(RNNCell, nn.RNNCell), (GRUCell, nn.GRUCell), (LSTMCell, nn.LSTMCell)])
def test_cell_equals_pytorchs(ours, theirs):
    torch.manual_seed(0)
    ours, theirs = ours(5, 7).double(), theirs(5, 7).double()
    ours.load_state_dict(theirs.state_dict())
    x, state = torch.randn(3, 5).double(), torch.randn(ours.n_states, 3, 7).double()
    a, b = state.clone().requires_grad_(), state.clone().requires_grad_()
    y = ours(x, a)
    wanted = theirs(x, tuple(b) if ours.n_states == 2 else b[0])
    wanted = torch.stack(wanted) if ours.n_states == 2 else wanted[None]
    assert_close(y, wanted, atol=1e-12, rtol=0)
    (y**2).sum().backward()
    (wanted**2).sum().backward()
    assert_close(a.grad, b.grad, atol=1e-12, rtol=0)
    for name, p in theirs.named_parameters():
        assert_close(getattr(ours, name).grad, p.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("n_layers, bidirectional", [(1, False), (2, False), (1, True), (3, True)])
def test_rnn_equals_pytorchs_on_packed_sequences(cell, n_layers, bidirectional):
    torch.manual_seed(0)
    lengths = [6, 4, 4, 1]
    x, mask = ragged(lengths, 5)
    theirs = CELLS[cell][1](5, 4, n_layers, batch_first=True, bidirectional=bidirectional).double()
    ours = RNN(5, 4, n_layers, cell, bidirectional).double()
    twins = {}
    for depth, side in itertools.product(range(n_layers), range(1 + bidirectional)):
        for name, _ in ours.layers[depth][side].named_parameters():
            twins[f"layers.{depth}.{side}.{name}"] = f"{name}_l{depth}" + "_reverse" * side
    ours.load_state_dict({name: theirs.state_dict()[twin] for name, twin in twins.items()})

    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, finals = ours(x_ours, mask)
    packed, last = theirs(pack_padded_sequence(x_theirs, torch.tensor(lengths), batch_first=True))
    wanted, _ = pad_packed_sequence(packed, batch_first=True)
    assert_close(y, wanted, atol=1e-12, rtol=0)
    assert_close(finals, torch.stack(last if cell == "lstm" else (last,)), atol=1e-12, rtol=0)
    for out, states in ((y, finals), (wanted, torch.stack(last if cell == "lstm" else (last,)))):
        ((out**2).sum() + states.sum()).backward()
    assert_close(x_ours.grad, x_theirs.grad, atol=1e-11, rtol=0)
    theirs = grads(theirs)
    for name, gradient in grads(ours).items():
        assert_close(gradient, theirs[twins[name]], atol=1e-11, rtol=0)


@settings(max_examples=60)
@given(
    cell=st.sampled_from(CELL_NAMES),
    rows=st.integers(1, 7).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)),
    bidirectional=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fused_equals_loop_for_any_mask(cell, rows, bidirectional, seed):
    "Holes, padding on the left, rows without any real token: outputs, last outputs and gradients."
    torch.manual_seed(seed)
    mask = torch.tensor(rows)
    fused, loop = (make(3, 4, 2, cell, bidirectional).double() for make in (FusedRNN, RNN))
    loop.load_state_dict({name.removesuffix("_l0"): weight for name, weight in fused.state_dict().items()})
    x = torch.randn(*mask.shape, 3, dtype=torch.float64)
    x_fused, x_loop = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_fused, last = fused(x_fused, mask)
    y_loop, finals = loop(x_loop, mask)
    wanted = torch.cat(list(finals[0, -(1 + bidirectional) :]), dim=-1)
    assert_close(y_fused, y_loop, atol=1e-12, rtol=0)
    assert_close(last, wanted, atol=1e-12, rtol=0)
    ((y_fused**2).sum() + last.sum()).backward()
    ((y_loop**2).sum() + wanted.sum()).backward()
    assert_close(x_fused.grad, x_loop.grad, atol=1e-11, rtol=0)
    assert not x_fused.grad[~mask].any()
    wanted = grads(loop)
    for name, gradient in grads(fused).items():
        assert_close(gradient, wanted[name.removesuffix("_l0")], atol=1e-11, rtol=0)


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("make", [RNN, FusedRNN])
def test_padding_may_hold_anything(make, cell):
    "NaN and infinity at padding give the outputs and the gradients that zeros give."
    torch.manual_seed(0)
    net = make(3, 4, 2, cell, bidirectional=True)
    x, mask = torch.randn(2, 5, 3), torch.tensor([[True] * 5, [False, True, True, False, False]])
    results = []
    for filling in (0.0, math.nan, math.inf):
        net.zero_grad()
        inputs = torch.where(mask[..., None], x, filling).requires_grad_()
        outputs, finals = net(inputs, mask)
        (outputs.sum() + finals.sum()).backward()
        results.append([outputs, finals, inputs.grad, *grads(net).values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("make", [RNN, FusedRNN])
def test_layers_and_masks_that_cannot_be(unchecked, make):
    for n_layers in (0, -2):
        with pytest.raises(ValueError, match=f"n_layers={n_layers} must be an integer of at least 1"):
            make(3, 4, n_layers)
    net, x, mask = make(3, 4), torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    for inputs, bad in ((x, mask.long()), (x, mask[:, :4]), (x[:, :4], mask), (x, mask[:1])):
        with pytest.raises(ValueError, match=r"mask (is torch.*must hold booleans|of shape \(\d, \d\) must be \(2, \d\): True at)"):
            net(inputs, bad)
    with pytest.raises(ValueError, match="n=0 must be an integer of at least 1"):
        net(x[:, :0], mask[:, :0])


def test_dropout_acts_between_layers_only():
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    one, two = FusedRNN(3, 4, 1, dropout=0.5), FusedRNN(3, 4, 2, dropout=0.5)
    assert torch.equal(one(x, mask)[0], one(x, mask)[0])
    assert not torch.equal(two(x, mask)[0], two(x, mask)[0])
    assert torch.equal(two.eval()(x, mask)[0], two(x, mask)[0])


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_starts_with_open_forget_gates(layer):
    torch.manual_seed(0)
    net = layer(6, 8, num_layers=2)
    before = {name: p.clone() for name, p in net.named_parameters()}
    start_well(net)
    for name, p in net.named_parameters():
        if name.startswith("weight_hh"):
            for gate in p.split(8):
                assert_close(gate @ gate.T, torch.eye(8), atol=1e-5, rtol=0)
        elif name.startswith("bias_ih") and layer is nn.LSTM:  # PyTorch's order: input, forget, cell, output
            assert_close(p - before[name], torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(8))
        else:
            assert torch.equal(p, before[name])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_lstm_of_a_model_starts_so(bidirectional):
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(13, 11, 16, n_layers=2, bidirectional=bidirectional))
    layers = [module for module in model.modules() if isinstance(module, nn.LSTM)]
    assert len(layers) == 2 * (1 + bidirectional) + 1
    for layer in layers:
        d = layer.hidden_size
        for name, p in layer.named_parameters():
            if name.startswith("weight_hh"):
                assert all(torch.allclose(gate @ gate.T, torch.eye(d), atol=1e-5) for gate in p.split(d))
            elif name.startswith("bias_ih"):
                assert ((p[d : 2 * d] - 1).abs() <= d**-0.5).all() and (p[2 * d :].abs() <= d**-0.5).all()


# The whole model

CONFIG = dict(src_vocab_size=13, tgt_vocab_size=11, d_model=8)


def example(seed=0, b=3):
    "A ragged batch of sources and targets, right-padded."
    torch.manual_seed(seed)
    src, tgt = torch.randint(4, 13, (b, 6)), torch.randint(4, 11, (b, 5))
    tgt[:, 0] = BOS
    lengths = torch.tensor([6, 4, 1])[:b]
    return torch.where(torch.arange(6) < lengths[:, None], src, 0), tgt


def dot(query, keys, mask):
    weights = torch.einsum("bnd,bmd->bnm", query, keys).masked_fill(~mask[:, None], -math.inf).softmax(-1)
    return weights @ keys, weights


def packed_reference(model, src, tgt):
    "The model's logits from PyTorch's bidirectional layers on packed sequences, with the same weights."
    lengths = (src != 0).sum(1)
    x = F.embedding(src, model.src_embedding.weight, padding_idx=0)
    for directions in model.encoder.layers:
        fused = type(directions[0])(x.shape[-1], directions[0].hidden_size, batch_first=True, bidirectional=True).to(x)
        weights = dict(directions[0].named_parameters())
        weights |= {f"{n}_reverse": w for n, w in directions[1].named_parameters()}
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, last = torch.func.functional_call(fused, weights, (packed,))
        x, _ = pad_packed_sequence(packed, batch_first=True)
    h = last[0] if isinstance(last, tuple) else last
    z = torch.cat([h[0], h[1]], dim=-1)
    first = torch.tanh(F.linear(z, model.bridge.weight, model.bridge.bias))
    first = first.unflatten(1, (-1, model.config.n_layers, model.config.d_model)).permute(1, 2, 0, 3).contiguous()
    s, _ = model.decoder(model.tgt_embedding(tgt), tuple(first) if len(first) == 2 else first[0])
    return F.linear(s, model.head.weight, model.head.bias)


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("n_layers", [1, 2])
def test_model_equals_pytorch_layers_on_packed_sequences(cell, n_layers):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell, n_layers=n_layers)).double()
    logits, wanted = model(src, tgt), packed_reference(model, src, tgt)
    assert_close(logits, wanted, atol=1e-12, rtol=0)
    targets, mask = torch.randint(4, 11, tgt.shape), torch.rand(tgt.shape) < 0.7
    loss = cross_entropy(logits, targets, mask)
    reference = F.cross_entropy(wanted[mask], targets[mask])
    assert_close(loss, reference, atol=1e-12, rtol=0)
    parameters = list(model.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(reference, parameters)):
        assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_encoder_gradients_by_finite_differences(cell):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell, n_layers=2)).double()
    embedded = model.src_embedding(src).detach().requires_grad_()

    def summary(x):
        return torch.cat([part.flatten() for part in model.encoder(x, src != 0)])

    assert torch.autograd.gradcheck(summary, embedded)


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("attention", [None, dot])
def test_steps_equal_teacher_forcing(cell, bidirectional, attention):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell, n_layers=2, bidirectional=bidirectional), attention).double()
    state, by_step = model.start(src), []
    for t in range(tgt.shape[1]):
        logits, state = model.step(tgt[:, t], state)
        by_step.append(logits)
    assert_close(torch.stack(by_step, 1), model(src, tgt), atol=1e-12, rtol=0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", [None, dot])
def test_padding_and_company_change_nothing(training, attention):
    "A row alone, without padding, gives the logits and the gradients it gives in a padded batch."
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, n_layers=2), attention).double().train(training)
    together = model(F.pad(src, (0, 3)), F.pad(tgt, (0, 2)))
    (together[:, : tgt.shape[1]] ** 2).sum().backward()
    wanted = grads(model)
    model.zero_grad()
    for row, length in enumerate((src != 0).sum(1).tolist()):
        alone = model(src[row : row + 1, :length], tgt[row : row + 1])
        assert_close(alone[0], together[row, : tgt.shape[1]], atol=1e-12, rtol=0)
        (alone**2).sum().backward()
    for name, gradient in grads(model).items():
        assert_close(gradient, wanted[name], atol=1e-10, rtol=0)
    assert not model.src_embedding.weight.grad[0].any()


@pytest.mark.parametrize("attention", [None, dot])
def test_decoder_never_sees_the_future(attention):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, n_layers=2), attention)
    logits = model(src, tgt)
    for t in range(1, tgt.shape[1]):
        changed = tgt.clone()
        changed[:, t] = 4 + (changed[:, t] + 1) % 7
        moved = (model(src, changed) - logits).abs().amax((0, 2))
        assert not moved[:t].any() and moved[t:].all()


def test_decoder_sees_the_source_only_through_z():
    "Whatever the source, the same z gives the same logits, and another z others."
    (src, tgt), (other, _) = example(0), example(1)
    model = Seq2Seq(Seq2SeqConfig(**CONFIG))
    assert not torch.equal(model(src, tgt), model(other, tgt))
    encode, z = model.encoder.forward, torch.randn(len(src), 8)
    model.encoder.forward = lambda x, mask: (encode(x, mask)[0], z)
    one = model(src, tgt)
    assert torch.equal(one, model(other, tgt))
    model.encoder.forward = lambda x, mask: (encode(x, mask)[0], z + 1)
    assert not torch.equal(one, model(src, tgt))


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_z_enters_only_the_first_state(cell):
    "From one decoder state the logits are the same to the last step, whichever source was encoded."
    (src, tgt), (other, _) = example(0), example(1)
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell))
    wanted, state = model.start(src), model.start(other)
    assert not torch.equal(wanted.hidden, state.hidden)
    state = Seq2SeqState(wanted.hidden, state.memory, state.mask)
    for t in range(tgt.shape[1]):
        a, wanted = model.step(tgt[:, t], wanted)
        b, state = model.step(tgt[:, t], state)
        assert torch.equal(a, b)


def test_mask_is_taken_at_its_word():
    "With a mask given, ids equal to pad_id may be real; without one they are padding. Holes and left padding work."
    model = Seq2Seq(Seq2SeqConfig(**CONFIG)).double()
    tgt = torch.tensor([[BOS, 5]])
    plain = model(torch.tensor([[7, 8, 9]]), tgt)
    for src in ([[0, 0, 7, 8, 9]], [[7, 0, 8, 9, 0]]):
        src = torch.tensor(src)
        assert_close(model(src, tgt), plain, atol=1e-12, rtol=0)
        assert_close(model(src, tgt, src != 0), plain, atol=1e-12, rtol=0)
        assert not torch.allclose(model(src, tgt, torch.ones_like(src, dtype=torch.bool)), plain)
    moved = Seq2Seq(Seq2SeqConfig(**CONFIG, pad_id=10))
    assert_close(moved(torch.tensor([[7, 8, 10]]), tgt), moved(torch.tensor([[7, 8]]), tgt))


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("attention", [None, dot])
def test_reordered_state_continues_like_the_rows_it_took(cell, attention):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell, n_layers=2), attention).double()
    _, state = model.step(tgt[:, 0], model.start(src))
    index = torch.tensor([2, 0, 0, 1, 2])
    logits, _ = model.step(tgt[index, 1], state.reorder(index))
    wanted, _ = model.step(tgt[:, 1], state)
    for row, source in enumerate(index.tolist()):
        same = tgt[index, 1][row] == tgt[source, 1]
        assert same
        assert_close(logits[row], wanted[source], atol=1e-12, rtol=0)


def test_attention_sees_states_keys_and_mask_and_its_context_reaches_the_head():
    src, tgt = example()
    seen = {}

    def attention(query, keys, mask):
        seen.update(query=query, keys=keys, mask=mask)
        return dot(query, keys, mask)

    model = Seq2Seq(Seq2SeqConfig(**CONFIG), attention)
    logits = model(src, tgt)
    assert torch.equal(seen["mask"], src != 0)
    assert seen["query"].shape == (*tgt.shape, 8) and seen["keys"].shape == (*src.shape, 8)
    context, _ = dot(seen["query"], seen["keys"], seen["mask"])
    assert_close(logits, model.head(torch.cat([context, seen["query"]], -1)))


def test_attention_module_is_part_of_the_model():
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(8, 8, bias=False)

        def forward(self, query, keys, mask):
            return dot(self.map(query), keys, mask)

    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG), Bilinear())
    model(src, tgt).sum().backward()
    assert "attention.map.weight" in model.state_dict() and model.attention.map.weight.grad.abs().max() > 0


@settings(max_examples=20)
@given(cell=st.sampled_from(CELL_NAMES), seed=st.integers(0, 999), n=st.integers(1, 4))
def test_probabilities_of_all_sequences_sum_to_one(cell, seed, n):
    torch.manual_seed(seed)
    model = Seq2Seq(Seq2SeqConfig(5, 5, 4, cell=cell)).double()
    every = torch.cartesian_prod(*[torch.arange(5)] * n).reshape(-1, n)
    inputs = torch.cat([torch.full((len(every), 1), BOS), every[:, :-1]], dim=1)
    src = torch.tensor([[4, 1, 3]]).expand(len(every), -1)
    log_probs = model(src, inputs).log_softmax(-1).gather(2, every[..., None]).sum((1, 2))
    assert math.isclose(log_probs.exp().sum().item(), 1, rel_tol=1e-9)


# Errors


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(cell="transformer"), r"cell='transformer'.*'rnn', 'gru', 'lstm'"),
        (dict(d_model=7), r"d_model=7 must be even"),
        (dict(n_layers=0), r"n_layers=0 must be an integer of at least 1"),
        (dict(pad_id=11), r"pad_id=11 must be a token: an integer from 0 to 10"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        Seq2Seq(Seq2SeqConfig(**CONFIG | change))
    Seq2Seq(Seq2SeqConfig(**CONFIG | dict(d_model=7), bidirectional=False))


SRC, TGT = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[2, 4], [2, 5]])


@pytest.mark.parametrize(
    "src, tgt, mask, message",
    [
        (SRC[0], TGT, None, r"src of shape \(3,\)"),
        (SRC[:0], TGT[:0], None, r"src of shape \(0, 3\)"),
        (SRC[:1], TGT, None, r"tgt of shape \(2, 2\) must be \(1, n\)"),
        (SRC[:, :0], TGT, None, r"src of shape \(2, 0\)"),
        (SRC, TGT[:1], None, r"tgt of shape \(1, 2\) must be \(2, n\)"),
        (SRC, TGT[:, :0], None, r"tgt of shape \(2, 0\)"),
        (SRC, TGT[0], None, r"tgt of shape \(2,\)"),
        (SRC, TGT, (SRC != 0)[:, :2], r"src_mask .*\(2, 2\).*\(2, 3\)"),
        (SRC, TGT, (SRC != 0).long(), r"src_mask is torch.int64.*boolean"),
        (SRC, TGT, (SRC != 0).to("meta"), r"src=.*cpu.* and src_mask=.*meta.* must be equal: try src_mask.to"),
        (SRC, TGT, SRC == 100, r"row 0 of src_mask has no real token: drop"),
        (SRC.float(), TGT, None, r"src is torch.float32 of shape .* must hold token ids"),
        (SRC, TGT > 0, None, r"tgt is torch.bool of shape .* must hold token ids"),
        (SRC + 5, TGT, None, r"src holds id 14, outside the vocabulary of 13"),
        (SRC - 1, TGT, None, r"src holds id -1, outside"),
        (SRC, TGT + 6, None, r"tgt holds id 11, outside the vocabulary of 11"),
        (SRC * 0, TGT, None, r"row 0 of src_mask has no real token: drop"),
        (SRC, TGT, torch.tensor([[True, True, False], [False] * 3]), r"row 1 of src_mask has no real token"),
    ],
)
def test_bad_input(unchecked, src, tgt, mask, message):
    model = Seq2Seq(Seq2SeqConfig(**CONFIG))
    with pytest.raises(ValueError, match=message):
        model(src, tgt, mask)


def test_ids_of_32_bits_are_ids():
    model = Seq2Seq(Seq2SeqConfig(**CONFIG))
    assert torch.equal(model(SRC.int(), TGT.int()), model(SRC, TGT))


def test_no_configuration(unchecked):
    for config in (None, dict(src_vocab_size=9)):
        with pytest.raises(TypeError, match=f"config is {type(config).__name__}, give Seq2SeqConfig"):
            Seq2Seq(config)


def test_an_empty_row_encodes_as_zeros_where_it_is_not_refused():
    x, mask = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[True, True, False], [False] * 3])
    outputs, last = FusedRNN(4, 3, bidirectional=True)(x, mask)
    assert not outputs[1].any() and not last[1].any() and last[0].all()
    (outputs.sum() + last.sum()).backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()


# Loss and training


def test_loss_equals_pytorchs():
    torch.manual_seed(0)
    logits, targets, mask = torch.randn(3, 5, 7).double(), torch.randint(7, (3, 5)), torch.rand(3, 5) < 0.6
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ours = cross_entropy(a, targets, mask)
    theirs = F.cross_entropy(b.flatten(0, 1), targets.masked_fill(~mask, -100).flatten())
    assert_close(ours, theirs, atol=1e-14, rtol=0)
    ours.backward()
    theirs.backward()
    assert_close(a.grad, b.grad, atol=1e-14, rtol=0)


def test_loss_does_not_read_targets_at_padding():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 4, 5), torch.tensor([[1, 2, 3, 4], [4, 3, 0, 0]])
    mask = targets > 0
    for filling in (-100, -1, 99):
        assert torch.equal(cross_entropy(logits, torch.where(mask, targets, filling), mask), cross_entropy(logits, targets, mask))


def test_loss_refuses_shapes_that_would_broadcast(unchecked):
    logits, targets, mask = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    for bad in ((logits, targets, mask[0]), (logits, targets, mask[:, :1]), (logits, targets[:, :2], mask[:, :2]), (logits[:, 0], targets, mask)):
        with pytest.raises(ValueError, match=r"(logits|targets|mask) of shape .* must be \("):
            cross_entropy(*bad)


def test_loss_of_nothing_is_zero_and_moves_nothing():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype, most", [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_loss_of_many_tokens_in_half_precision(dtype, most, smoothing):
    "A sum of 16,384 losses of five nats is beyond float16, and bfloat16 counts no further than 256. The logits alone are rounded."
    torch.manual_seed(0)
    logits, targets = torch.randn(16, 1024, 150), torch.randint(150, (16, 1024))
    half = logits.to(dtype).requires_grad_()
    mask = torch.ones(16, 1024, dtype=torch.bool)
    loss = cross_entropy(half, targets, mask, smoothing)
    wanted = F.cross_entropy(half.detach().double().flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    assert loss.dtype == torch.float32 and abs(loss - wanted) < 1e-5
    (16384 * loss).backward()
    assert half.grad.dtype == dtype and half.grad.isfinite().all()
    precise = torch.autograd.grad(16384 * cross_entropy(inputs := half.detach().double().requires_grad_(), targets, mask, smoothing), inputs)[0]
    assert_close(half.grad.double(), precise, atol=most, rtol=most)


@pytest.mark.parametrize("target", [-100, -1, 7])
def test_loss_refuses_a_real_target_that_is_no_token(target):
    with pytest.raises(ValueError, match=f"targets holds id {target}, outside the vocabulary of 7; make mask False"):
        cross_entropy(torch.randn(1, 2, 7), torch.tensor([[3, target]]), torch.ones(1, 2, dtype=torch.bool))


def copies(n=64, seed=0):
    "Pairs whose target is the source read backwards."
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(4, 9, (int(k),), generator=generator).tolist() for k in torch.randint(1, 5, (n,), generator=generator)]
    return [(w, [BOS, *w[::-1], EOS]) for w in words]


def test_learns_to_reverse():
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(9, 9, 32))
    history = teacher_forcing(model, batches(copies(400), 32), steps=250, lr=1e-2)
    assert len(history) == 250 and history[-1] < 0.3 < 1.5 < history[0]
    assert not model.training
    (batch,) = batches(copies(50, seed=1), 50, shuffle=False, key=None)
    written = greedy(model.step, model.start(batch.src, batch.src_mask), batch.tgt[:, 0], max_new_tokens=6, stop_id=EOS).ids
    wanted = F.pad(batch.tgt[:, 1:], (0, written.shape[1] - batch.tgt.shape[1] + 1))
    assert (written == wanted).all(1).float().mean() > 0.8


def test_teacher_forcing_is_deterministic_by_seed():
    def run(seed):
        torch.manual_seed(0)
        model = Seq2Seq(Seq2SeqConfig(9, 9, 8, dropout=0.2))
        torch.manual_seed(seed)
        return teacher_forcing(model, batches(copies(), 16), steps=6)

    assert run(0) == run(0) != run(1)


def test_teacher_forcing_is_adamw_by_hand():
    "Each update written out: decoupled weight decay, clipping, the rate up to lr in a tenth of the run, then down."
    torch.manual_seed(0)
    model, twin = (Seq2Seq(Seq2SeqConfig(9, 9, 4)).double() for _ in range(2))
    with torch.no_grad():
        model.head.weight *= 20  # gradients above the limit
    twin.load_state_dict(model.state_dict())
    data, lr, clip, decay, norms = list(batches(copies(32), 16)), 0.05, 1.0, 0.01, []
    steps, factors = 20, [0.5, 1.0] + [k / 18 for k in range(18, 0, -1)]
    teacher_forcing(model, data, steps=steps, lr=lr)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in twin.named_parameters()}
    for step, (batch, factor) in enumerate(zip(itertools.cycle(data), factors, strict=False), 1):
        twin.zero_grad()
        logits = twin(batch.src, batch.tgt[:, :-1])
        real = batch.tgt_mask[:, 1:]
        F.cross_entropy(logits[real], batch.tgt[:, 1:][real]).backward()
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in twin.parameters()))
        rate = lr * factor
        norms.append(norm)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                gradient = p.grad * min(1, clip / (norm + 1e-6))
                m, v = moments[name] = (0.9 * moments[name][0] + 0.1 * gradient, 0.999 * moments[name][1] + 0.001 * gradient**2)
                p *= 1 - rate * decay
                p -= rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    for ours, wanted in zip(model.parameters(), twin.parameters()):
        assert_close(ours, wanted, atol=1e-9, rtol=0)
    assert max(norms) > 1.5 * clip and min(norms) < clip


def test_teacher_forcing_reads_a_list_again():
    model, data = Seq2Seq(Seq2SeqConfig(9, 9, 8)), list(batches(copies(32), 16))
    assert len(data) == 2 and len(teacher_forcing(model, data, steps=5)) == 5


def test_teacher_forcing_refuses_what_it_cannot_train_on():
    model, data = Seq2Seq(Seq2SeqConfig(9, 9, 8)), list(batches(copies(32), 16))
    with pytest.raises(ValueError, match="steps=0 must be an integer of at least 1"):
        teacher_forcing(model, data, steps=0)
    for nothing in ([], (batch for batch in data)):
        with pytest.raises(ValueError, match="batches gave nothing on a pass"):
            teacher_forcing(model, nothing, steps=3)


def test_teacher_forcing_stops_at_a_loss_that_is_not_finite_before_the_weights_are_touched():
    model, data = Seq2Seq(Seq2SeqConfig(9, 9, 8)), list(batches(copies(32), 16))
    with torch.no_grad():
        model.head.bias[5] = math.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(FloatingPointError, match="at step 1 the loss is nan .* lower lr=0.003"):
        teacher_forcing(model, data, steps=3)
    for name, p in model.named_parameters():
        assert_close(p, before[name], equal_nan=True, rtol=0, atol=0)


def test_teacher_forcing_stops_at_a_gradient_that_is_not_finite():
    "The loss is finite, but the root of zero has an infinite slope."

    def rooted(query, keys, mask):
        return (0 * query).sqrt(), query.new_zeros(*query.shape[:2], keys.shape[1])

    torch.manual_seed(0)
    model, data = Seq2Seq(Seq2SeqConfig(9, 9, 8), rooted), list(batches(copies(32), 16))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"at step 1 the loss is [0-9.]+ and its gradient's norm nan"):
        teacher_forcing(model, data, steps=3)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_teacher_forcing_survives_a_batch_without_targets():
    model = Seq2Seq(Seq2SeqConfig(9, 9, 8))
    src, tgt = torch.tensor([[4, 5]]), torch.tensor([[BOS, 0, 0]])
    assert teacher_forcing(model, [Batch(src, src != 0, tgt, tgt != 0)], steps=2) == [0, 0]
    assert all(p.isfinite().all() for p in model.parameters())


@gpu
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_gpu_equals_cpu(cell):
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG, cell=cell, n_layers=2), dot).double()
    wanted = model(src, tgt)
    model = model.cuda()
    logits = model(src.cuda(), tgt.cuda())
    assert_close(logits.cpu(), wanted, atol=1e-9, rtol=0)
    state, by_step = model.start(src.cuda()), []
    for t in range(tgt.shape[1]):
        step, state = model.step(tgt[:, t].cuda(), state)
        by_step.append(step)
    assert_close(torch.stack(by_step, 1), logits, atol=1e-9, rtol=0)
    assert isinstance(state.reorder(torch.tensor([1, 0, 2]).cuda()), Seq2SeqState)


@gpu
def test_an_update_does_not_wait_for_the_gpu():
    src, tgt = example()
    model = Seq2Seq(Seq2SeqConfig(**CONFIG)).cuda()
    src, tgt, mask = src.cuda(), tgt.cuda(), (src != 0).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cross_entropy(model(src, tgt, mask), tgt, tgt != 0).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", [None, dot_product_attention])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_traced_at_one_length_it_runs_at_others(cell, attention, unchecked):
    "torch.jit.trace gives lengths as tensors, which stand for all lengths."
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(9, 9, 8, 2, cell), attention).eval()

    def batch(b, m, n):
        ids = torch.randint(1, 9, (b, m + n))
        return ids[:, :m], ids[:, m:], torch.arange(m) < torch.tensor([m] + [m - 2] * (b - 1))[:, None]

    traced = torch.jit.trace(model, batch(3, 5, 4))
    for sizes in ((3, 5, 4), (2, 8, 6), (4, 3, 1)):
        given = batch(*sizes)
        assert torch.allclose(traced(*given), model(*given), atol=1e-6)
