"Attention against PyTorch's layer, the equations in Python's arithmetic, and what must not change it."

import ast
import itertools
import math
from pathlib import Path

import nbformat
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.testing import assert_close

from annotated_nlp.attention import CrossAttention, SelfAttention, added, attention_maps
from annotated_nlp.attention import causal_mask, dot_product_attention
from annotated_nlp.attention import scaled_dot_product
from annotated_nlp.decoding import State
from annotated_nlp.parts.kernels import KVCache, fused_attention, local_attention
from annotated_nlp.parts.recording import record
from annotated_nlp.seq2seq import Seq2Seq, Seq2SeqConfig

ROOT = Path(__file__).resolve().parents[2]
EXACT = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


# By hand, against loops over plain numbers


def in_python(q, k, v, allowed, bias, scale):
    "One row of queries, lists of floats: equation 1 of Vaswani et al., term by term, in double precision."
    answers, all_weights = [], []
    for i, query in enumerate(q):
        scores = [scale * sum(a * b for a, b in zip(query, key)) + bias[i][j] for j, key in enumerate(k)]
        exps = [math.exp(s) if allowed[i][j] else 0.0 for j, s in enumerate(scores)]
        weights = [e / sum(exps) if sum(exps) else 0.0 for e in exps]
        answers.append([sum(w * value[c] for w, value in zip(weights, v)) for c in range(len(v[0]))])
        all_weights.append(weights)
    return torch.tensor(answers), torch.tensor(all_weights)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_by_hand_is_the_equation(n, m, k, w, scaled, seed):
    generator = torch.Generator().manual_seed(seed)
    q, keys, v, bias = (torch.randn(s, generator=generator) for s in ((n, k), (m, k), (m, w), (n, m)))
    mask = torch.rand(n, m, generator=generator) > 0.4
    scale = None if scaled else 1.0
    wanted = in_python(q.tolist(), keys.tolist(), v.tolist(), mask.tolist(), bias.tolist(), 1 / math.sqrt(k) if scaled else 1)
    assert_close(scaled_dot_product(q, keys, v, mask, bias, scale), wanted, **EXACT)


def test_gradients_by_finite_differences():
    q, k, v, bias = (x.double().detach().requires_grad_() for x in leaves((2, 3, 4), (2, 5, 4), (2, 5, 6), (3, 5)))
    mask = torch.rand(2, 3, 5) > 0.4
    mask[0, 1] = False
    for function in (lambda q, k, v, bias: scaled_dot_product(q, k, v, mask, bias)[0],
                     lambda q, k, v, bias: fused_attention(q[:, None], k[:, None], v[:, None], mask[:, None], bias[None, None])):
        assert torch.autograd.gradcheck(function, (q, k, v, bias))


def test_extreme_scores():
    "Scores of 1e10 and more: the largest wins, and nothing is NaN; a lone key gets all the weight."
    q, k, v = (1e5 * torch.randn(2, 2, 6, 8) for _ in range(3))
    output, weights = scaled_dot_product(q, k, v)
    assert_close(weights, F.one_hot((q @ k.mT).argmax(-1), 6).float())
    assert_close(fused_attention(q, k, v), output)
    assert_close(scaled_dot_product(q, k[:, :, :1], v[:, :, :1])[0], v[:, :, :1].expand(2, 2, 6, 8))


# Fused, against by hand


def allowed(kind, b, n, m):
    mask = {"none": None, "padding": torch.arange(m) < torch.tensor([[m], [max(1, m // 2)]]), "left": torch.arange(m) >= torch.tensor([[0], [m // 2]]),
            "pairs": torch.rand(b, n, m) > 0.5, "nothing": torch.zeros(b, m, dtype=torch.bool)}[kind]
    if kind == "pairs":
        mask[:, n // 2] = False
    return None if mask is None else mask[:, None, None] if mask.ndim == 2 else mask[:, None]


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", ["none", "shared", "forbids"])
@pytest.mark.parametrize("kind", ["none", "padding", "left", "pairs", "nothing"])
def test_both_paths(kind, bias, causal, dtype, tolerance):
    "Output and every gradient, rows that may attend to nothing among them; fewer queries than keys, as many, and one."
    for n, m in ((5, 5), (3, 7), (1, 4)):
        q, k, v = leaves((2, 4, n, 8), (2, 4, m, 8), (2, 4, m, 8), dtype=dtype)
        wanted, mask, scores = [q, k, v], allowed(kind, 2, n, m), None
        if bias != "none":
            scores, = leaves((1, 4, n, m), dtype=dtype)
            wanted.append(scores)
        if bias == "forbids":
            scores = scores.masked_fill(torch.rand(1, 4, n, m) > 0.8, -math.inf)
        triangle = causal_mask(n, m)[None, None] if causal else torch.ones(1, 1, n, m, dtype=torch.bool)
        by_hand, weights = scaled_dot_product(q, k, v, triangle if mask is None else mask & triangle, scores)
        fused = fused_attention(q, k, v, mask, scores, causal=causal)
        upstream = torch.randn_like(fused)
        gradients = [torch.autograd.grad(out, wanted, upstream, retain_graph=True) for out in (by_hand, fused)]
        for ours, theirs in [(by_hand, fused), *zip(*gradients)]:
            assert ours.isfinite().all() and theirs.isfinite().all()
            assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        seeing = weights.float().sum(-1)
        assert ((seeing - 1).abs() < 1e-2).logical_or(seeing == 0).all()
        assert fused[seeing == 0].abs().sum() == 0


def test_rows_that_the_bias_empties():
    "-inf in the bias alone, and where the mask leaves only such keys: zeros and finite gradients on both paths."
    q, k, v, bias = leaves((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), (1, 4, 3, 5))
    some = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    some[:, :, 1] = True
    some[:, :, 2, :2] = True
    for mask, emptied in ((None, [1]), ((torch.arange(5) < 2)[None, None, None], [1, 2])):
        forbidding = bias.masked_fill(some, -math.inf)
        by_hand, weights = scaled_dot_product(q, k, v, mask, forbidding)
        fused = fused_attention(q, k, v, mask, forbidding)
        assert [i for i in range(3) if weights[:, :, i].sum() == 0] == emptied and fused[:, :, emptied].abs().max() == 0
        upstream = torch.randn_like(fused)
        gradients = [torch.autograd.grad(out, (q, k, v, bias), upstream, retain_graph=True) for out in (by_hand, fused)]
        for ours, theirs in [(by_hand, fused), *zip(*gradients)]:
            assert ours.isfinite().all() and theirs.isfinite().all()
            assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("need_weights", [False, True])
def test_nothing_to_attend_to(need_weights):
    "An empty batch, no queries, an empty memory: shapes as ever, and the output's bias where there is nothing to see."
    def run(layer, *inputs):
        result = layer(*inputs, need_weights=need_weights)
        return result[0] if need_weights else result

    layer, across = SelfAttention(16, 4), CrossAttention(16, 4, d_memory=12)
    assert run(layer, torch.zeros(0, 3, 16)).shape == (0, 3, 16) and run(layer, torch.zeros(2, 0, 16)).shape == (2, 0, 16)
    assert_close(run(across, torch.randn(2, 3, 16), torch.zeros(2, 0, 12)), across.out.bias.expand(2, 3, 16))


@pytest.mark.parametrize("need_weights", [False, True])
def test_under_autocast(need_weights):
    "As `training.fit` runs it in bf16: the layer's weights, and a cache, stay in float32."
    layer, x, bias = SelfAttention(16, 4, causal=True), torch.randn(2, 5, 16), torch.randn(1, 4, 5, 5)

    def run(*args, **kwargs):
        result = layer(*args, **kwargs, need_weights=need_weights)
        return result[0] if need_weights else result

    with torch.no_grad():
        whole, cache = run(x, relative=added(bias)), layer.new_cache(2, 5)
        with torch.autocast("cpu", torch.bfloat16):
            halved = run(x, relative=added(bias))
            steps = [run(x[:, t : t + 1], relative=added(bias[:, :, t : t + 1, : t + 1]), cache=cache, start=t) for t in range(5)]
    assert halved.dtype == torch.bfloat16 and cache.k.dtype == torch.float32
    assert 0 < (halved - whole).abs().max() < 0.05
    assert_close(torch.cat(steps, 1), halved, atol=0.05, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_scale(scale):
    q, k, v = leaves(*[(2, 4, 5, 8)] * 3)
    assert_close(fused_attention(q, k, v, scale=scale), F.softmax(scale * q @ k.mT, -1) @ v, **EXACT)
    assert_close(scaled_dot_product(q, k, v, scale=scale)[0], F.softmax(scale * q @ k.mT, -1) @ v, **EXACT)


# The module, against nn.MultiheadAttention


def like(theirs, causal=False):
    "Our module with the weights of PyTorch's, whatever widths its memory has."
    cross = theirs.in_proj_weight is None
    bias = theirs.in_proj_bias is not None
    if cross:
        ours = CrossAttention(theirs.embed_dim, theirs.num_heads, theirs.kdim, bias=bias)
    else:
        ours = SelfAttention(theirs.embed_dim, theirs.num_heads, bias=bias, causal=causal)
    state = {"out." + name: value for name, value in theirs.out_proj.state_dict().items()}
    if cross:
        state |= {"query.weight": theirs.q_proj_weight, "key_value.weight": torch.cat([theirs.k_proj_weight, theirs.v_proj_weight])}
        if theirs.in_proj_bias is not None:
            state |= {"query.bias": theirs.in_proj_bias[: theirs.embed_dim], "key_value.bias": theirs.in_proj_bias[theirs.embed_dim :]}
    else:
        state |= {"query_key_value.weight": theirs.in_proj_weight} | ({} if theirs.in_proj_bias is None else {"query_key_value.bias": theirs.in_proj_bias})
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["self", "causal", "pairs", "cross"])
def test_against_pytorch(kind, bias, need_weights):
    memory_width = 24 if kind == "cross" else 32
    theirs = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True, kdim=memory_width, vdim=memory_width)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = like(theirs, causal=kind == "causal")
    n, m = 6, 9 if kind == "cross" else 6
    x, memory = leaves((3, n, 32), (3, m, memory_width))
    real = torch.arange(m) < torch.tensor([[m], [m - 2], [1]])
    pairs = (torch.rand(3, n, m) > 0.5) | torch.eye(n, m, dtype=torch.bool)
    mask = pairs if kind == "pairs" else real
    forbidden = ~causal_mask(n, m) if kind == "causal" else rearrange(~pairs[:, None].expand(3, 4, n, m), "b h n m -> (b h) n m") if kind == "pairs" else None
    keys = memory if kind == "cross" else x
    expected, expected_weights = theirs(x, keys, keys, key_padding_mask=None if kind == "pairs" else ~real, attn_mask=forbidden, average_attn_weights=False)
    result = ours(x, *([memory] if kind == "cross" else []), mask=mask, need_weights=need_weights)
    output = result[0] if need_weights else result
    assert_close(output, expected, **EXACT)
    if need_weights:
        assert_close(result[1], expected_weights, **EXACT)
    upstream = torch.randn_like(output)
    inputs = [x, memory] if kind == "cross" else [x]
    found = torch.autograd.grad(output, inputs + list(ours.parameters()), upstream)
    wanted = torch.autograd.grad(expected, inputs + list(theirs.parameters()), upstream)
    assert_close(found[: len(inputs)], wanted[: len(inputs)], **EXACT)
    total = [sum(g.double().square().sum() for g in grads[len(inputs) :]) for grads in (found, wanted)]
    assert_close(*total, rtol=1e-5, atol=0)  # all parameters' gradients, however they are laid out
    if kind != "cross":
        names = [name for name, _ in ours.named_parameters()]
        assert_close(dict(zip(names, found[1:]))["query_key_value.weight"], dict(zip([n for n, _ in theirs.named_parameters()], wanted[1:]))["in_proj_weight"], **EXACT)


def test_head_width_of_its_own():
    "T5-11B has 128 heads of 128 in a model of width 1,024: the projections are then not square."
    layer = SelfAttention(12, 3, d_head=8, bias=False, scale=1.0)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"query_key_value.weight": (72, 12), "out.weight": (12, 24)}
    x, bias = torch.randn(2, 5, 12), torch.randn(1, 3, 5, 5)
    q, k, v = rearrange(x @ layer.query_key_value.weight.T, "b n (p h k) -> p b h n k", p=3, h=3)
    wanted = rearrange(F.softmax(q @ k.mT + bias, -1) @ v, "b h n k -> b n (h k)") @ layer.out.weight.T
    assert_close(layer(x, relative=added(bias)), wanted, **EXACT)
    assert_close(layer(x, relative=added(bias), need_weights=True)[0], wanted, **EXACT)


@pytest.mark.parametrize("need_weights", [False, True])
def test_bias_learns_under_a_mask(need_weights):
    layer, (x, bias) = SelfAttention(16, 4), leaves((2, 5, 16), (1, 4, 5, 5))
    mask = torch.tensor([[True] * 5, [False] * 5])
    output = layer(x, mask=mask, relative=added(bias), need_weights=need_weights)
    output = output[0] if need_weights else output
    output.square().sum().backward()
    assert bias.grad.isfinite().all() and bias.grad.abs().max() > 0
    assert_close(output[1], layer.out.bias.expand(5, 16))


def test_dropout():
    "Off at evaluation; in training it leaves the mean as it is, on both paths."
    layer, x = SelfAttention(16, 4, dropout=0.5), torch.randn(1, 6, 16)
    still = layer.eval()(x)
    assert_close(layer(x, need_weights=True)[0], still, **EXACT)
    layer.train()
    many = x.expand(20000, 6, 16)
    for output in (layer(many), layer(many, need_weights=True)[0]):
        assert output.std(0).mean() > 0.01
        assert_close(output.mean(0, keepdim=True), still, atol=0.02, rtol=0)


# What must not matter


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6))
def test_order_of_the_memory(b, n, m, seed):
    torch.manual_seed(seed)
    layer, x, memory = CrossAttention(16, 4, d_memory=12), torch.randn(b, n, 16), torch.randn(b, m, 12)
    order, mask = torch.randperm(m), torch.rand(b, m) > 0.3
    assert_close(layer(x, memory, mask=mask), layer(x, memory[:, order], mask=mask[:, order]), **EXACT)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 10**6))
def test_equivariance(b, n, seed):
    torch.manual_seed(seed)
    layer, x, order = SelfAttention(16, 4), torch.randn(b, n, 16), torch.randperm(n)
    first, second = layer(x, need_weights=True), layer(x[:, order], need_weights=True)
    assert_close(first[0][:, order], second[0], **EXACT)
    assert_close(first[1][:, :, order][..., order], second[1], **EXACT)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_no_trace_of_padding_or_future(need_weights, train):
    "Bit for bit, and no gradient either."
    def run(layer, x, **kwargs):
        result = layer.train(train)(x, need_weights=need_weights, **kwargs)
        return result[0] if need_weights else result

    x = torch.randn(3, 8, 16, requires_grad=True)
    real = torch.arange(8) < torch.tensor([[8], [5], [1]])
    left = torch.arange(8) >= torch.tensor([[0], [3], [7]])
    for causal, mask in itertools.product((False, True), (real, left)):
        layer = SelfAttention(16, 4, causal=causal)
        output = run(layer, x, mask=mask)
        noisy = torch.where(mask[..., None], x, torch.randn(3, 8, 16) * 1e3)
        assert torch.equal(output[mask], run(layer, noisy, mask=mask)[mask])
        gradient, = torch.autograd.grad(output[mask].square().sum(), x)
        assert gradient[~mask].abs().max() == 0
    layer = SelfAttention(16, 4, causal=True)
    output = run(layer, x)
    for t in range(7):
        changed = torch.cat([x[:, : t + 1], torch.randn(3, 7 - t, 16)], dim=1)
        assert torch.equal(output[:, : t + 1], run(layer, changed)[:, : t + 1])
    gradient, = torch.autograd.grad(output[:, 3].square().sum(), x)
    assert gradient[:, 4:].abs().max() == 0 < gradient[:, 3].abs().max()


def test_batch_is_one_by_one():
    layer, x = SelfAttention(16, 4), torch.randn(4, 6, 16)
    lengths = torch.tensor([6, 4, 2, 1])
    together = layer(x, mask=torch.arange(6) < lengths[:, None])
    for row, length in enumerate(lengths.tolist()):
        assert_close(together[row, :length], layer(x[row : row + 1, :length])[0], **EXACT)


# The cache


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 10**6), st.booleans())
def test_cached_is_whole(pieces, seed, padded):
    "In pieces of any size, with rows exchanged between the pieces and padding on the left."
    torch.manual_seed(seed)
    n, layer = sum(pieces), SelfAttention(16, 4, causal=True)
    x, start = torch.randn(3, n, 16), 0
    mask = torch.arange(n) >= torch.tensor([[0], [n // 2], [n - 1]]) if padded else None
    with torch.no_grad():
        cache = layer.new_cache(3, n + 2)
        for size in pieces:
            stop = start + size
            seen = None if mask is None else mask[:, :stop]
            output = layer(x[:, start:stop], mask=seen, cache=cache, start=start)
            assert_close(output, layer(x[:, :stop], mask=seen)[:, start:], **EXACT)
            again, weights = layer(x[:, start:stop], mask=seen, cache=cache, start=start, need_weights=True)
            assert_close(again, output, **EXACT)
            assert weights.shape == (len(x), 4, size, stop)
            index = torch.randint(len(x), (int(torch.randint(1, 5, ())),))
            before = cache.k.clone()
            cache, old, x, start = cache.reorder(index), cache, x[index], stop
            mask = None if mask is None else mask[index]
            assert torch.equal(old.k, before) and torch.equal(cache.k, before[index])


class Rounded(torch.Tensor):
    "As a weight of torchao, which knows its shape, dtype and device, and little else."

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.new_zeros, torch.zeros_like):
            raise NotImplementedError(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_cache_asks_little_of_the_weight():
    layer = SelfAttention(8, 2).double()
    layer.out.weight = nn.Parameter(layer.out.weight.detach().as_subclass(Rounded))
    cache = layer.new_cache(3, 5)
    assert cache.k.shape == cache.v.shape == (3, 2, 5, 4) and cache.k.dtype == torch.float64
    assert type(cache.k) is torch.Tensor


def test_cache_allocates_once():
    layer = SelfAttention(16, 4, causal=True)
    cache = layer.new_cache(2, 50)
    assert isinstance(cache, State) and cache.k.shape == cache.v.shape == (2, 4, 50, 4)
    k, v = torch.randn(2, 2, 4, 1, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        for t in range(50):
            keys, values = cache.update(k, v, t)
    assert not [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert keys.data_ptr() == cache.k.data_ptr() and values.data_ptr() == cache.v.data_ptr()


def test_cross_attention_remembers():
    layer, x, memory = CrossAttention(16, 4, d_memory=12), torch.randn(2, 3, 16), torch.randn(2, 7, 12)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    cache, index = layer.remember(memory), torch.tensor([1, 0, 1])
    assert_close(layer(x, cache, mask=mask), layer(x, memory, mask=mask))
    assert_close(layer(x[index], cache.reorder(index), mask=mask[index]), layer(x, memory, mask=mask)[index])


# The rest of the module's surface


def test_translator_attention():
    "The lecture's equations, inside Seq2Seq too: teacher forcing and stepping agree, padding leaves no trace."
    s, h = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    context, weights = dot_product_attention(s, h, mask)
    assert_close(weights[1, :, :2], (s[1] @ h[1, :2].T).softmax(-1))
    assert_close(context[1], (s[1] @ h[1, :2].T).softmax(-1) @ h[1, :2], **EXACT)
    model = Seq2Seq(Seq2SeqConfig(12, 12, 16), dot_product_attention).eval()
    src, tgt = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]]), torch.randint(4, 12, (2, 5))
    whole, state = model(src, tgt), model.start(src)
    for t in range(5):
        logits, state = model.step(tgt[:, t], state)
        assert_close(logits, whole[:, t], **EXACT)
    assert_close(model(src[1:, :2], tgt[1:]), whole[1:], **EXACT)


def test_recurrence_first():
    "Unlike the papers' decoders: a step leaves the same state without attention, and the output layer alone reads the context."
    config = Seq2SeqConfig(9, 9, 8)
    plain, attentive = Seq2Seq(config), Seq2Seq(config, dot_product_attention)
    shared = {name: value for name, value in plain.state_dict().items() if not name.startswith("head")}
    attentive.load_state_dict(shared, strict=False)
    ids = torch.randint(4, 9, (2, 5))
    first, second = (model.step(ids[:, 0], model.start(ids))[1].hidden for model in (plain, attentive))
    assert torch.equal(first, second)
    more = sum(p.numel() for p in attentive.parameters()) - sum(p.numel() for p in plain.parameters())
    assert attentive.head.in_features == 16 and more == 9 * 8


def test_departures():
    "Biases unless told otherwise, no dropout unless told, zeros (and the output's bias) for rows of padding, no global tokens."
    layer, x, nothing = SelfAttention(16, 4), torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    assert layer.query_key_value.bias is not None and layer.out.bias is not None and layer.dropout == 0
    assert not [name for name, _ in SelfAttention(16, 4, bias=False).named_parameters() if "bias" in name]
    assert scaled_dot_product(*torch.randn(3, 2, 6, 8), mask=nothing[:, None])[0].abs().max() == 0
    assert_close(layer(x, mask=nothing), layer.out.bias.expand(2, 6, 16))
    q, k, v = torch.randn(3, 1, 1, 100, 8)
    far = torch.where(torch.arange(100)[:, None] > 10, v, v + 1)
    near, other = (local_attention(q, k, values, 8)[:, :, 20:] for values in (v, far))
    assert torch.equal(near, other)


def test_maps_of_a_model():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.itself, self.across = SelfAttention(16, 2, causal=True), CrossAttention(16, 4, d_memory=12)

        def forward(self, x, memory):
            return self.across(self.itself(x), memory=memory)

    model, x, memory = Two(), torch.randn(2, 3, 16), torch.randn(2, 5, 12)
    plain = model(x, memory)
    with attention_maps(model) as maps:
        assert_close(model(x, memory), plain, **EXACT)
    assert {name: tuple(w.shape) for name, w in maps.items()} == {"itself": (2, 2, 3, 3), "across": (2, 4, 3, 5)}
    assert_close(maps["itself"], model.itself(x, need_weights=True)[1])
    maps.clear()
    assert torch.equal(model(x, memory), plain) and not maps  # the hooks are gone
    with pytest.raises(KeyError), attention_maps(model):
        raise KeyError
    assert torch.equal(model(x, memory), plain)
    with pytest.raises(ValueError, match="Linear has no Attention module"), attention_maps(nn.Linear(2, 2)):
        pass


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_window_is_a_band(n, half, seed):
    torch.manual_seed(seed)
    q, k, v = leaves((2, 2, n, 4), (2, 2, n, 4), (2, 2, n, 6))
    mask = torch.rand(2, n) > 0.3
    band = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= half
    windowed, (full, _) = local_attention(q, k, v, 2 * half, mask), scaled_dot_product(q, k, v, band & mask[:, None, None])
    assert_close(windowed, full, **EXACT)
    upstream = torch.randn_like(full)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True) for out in (windowed, full))):
        assert_close(a, b, **EXACT)


def test_window_never_holds_all_pairs():
    "Memory at 8,192 tokens is far below one n x n matrix, even of single bytes."
    q, k, v = torch.randn(3, 1, 1, 8192, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        local_attention(q, k, v, 64)
    largest = max(event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]")
    assert 0 < largest < 8192**2 / 8


def test_compiles_without_a_break(unchecked):
    "The training pass, and one compiled step for every position: after the second, nothing is compiled again."
    torch._dynamo.reset()
    layer, x = SelfAttention(16, 2, causal=True), torch.randn(2, 6, 16)
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    assert_close(whole(x, mask=mask), layer(x, mask=mask), **EXACT)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        cache, expected = layer.new_cache(2, 6), layer(x)
        for t in range(6):
            assert_close(step(x[:, t : t + 1], cache=cache, start=t), expected[:, t : t + 1], **EXACT)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_state_dict_round_trip():
    first, second = (CrossAttention(16, 4, d_memory=12) for _ in range(2))
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 5, 12)
    assert not torch.equal(first(x, memory), second(x, memory))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x, memory), second(x, memory))


def test_what_one_kind_has_the_other_has_not(unchecked):
    "A causal cross-attention, a cross-attention without memory, a cache of the other kind: Python's own errors name it."
    for call in (
        lambda: CrossAttention(8, 4, 8, causal=True), lambda: CrossAttention(8, 4, 6)(torch.zeros(1, 2, 8)),
        lambda: SelfAttention(8, 4).remember(torch.zeros(1, 2, 8)), lambda: CrossAttention(8, 4, 6).new_cache(1, 2),
    ):
        with pytest.raises((TypeError, AttributeError), match="causal|memory|remember|new_cache"):
            call()


def rotary(q, k, start):
    "Su et al. 2021, equation 34: each pair of features turned by an angle that grows with the position."
    def turned(x, first):
        angles = (first + torch.arange(x.shape[2]))[:, None] * 10000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3])
        pairs = torch.view_as_complex(rearrange(x, "b h n (f two) -> b h n f two", two=2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)

    return turned(q, start), turned(k, start), None


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_slot_sees_queries_and_keys(need_weights):
    "Rotary positions: scores depend on distances alone, moved queries and keys agree, and stepping with a cache is the whole."
    layer, x = SelfAttention(16, 2, causal=True), torch.randn(2, 6, 16)

    def run(*args, **kwargs):
        result = layer(*args, **kwargs, relative=rotary, need_weights=need_weights)
        return result[0] if need_weights else result

    q, k, v = layer.split(layer.query_key_value(x))
    moved = [rotary(part, part, 5)[0] for part in (q, k)]
    here = [rotary(part, part, 0)[0] for part in (q, k)]
    assert_close(moved[0] @ moved[1].mT, here[0] @ here[1].mT, **EXACT)
    scores = (here[0] @ here[1].mT / 8**0.5).masked_fill(~causal_mask(6, 6), -math.inf)
    wanted = layer.out(rearrange(scores.softmax(-1) @ v, "b h n k -> b n (h k)"))
    assert_close(run(x), wanted, **EXACT)
    with torch.no_grad():
        cache = layer.new_cache(2, 6)
        steps = [run(x[:, t : t + 1], cache=cache, start=t) for t in range(6)]
    assert_close(torch.cat(steps, 1), wanted, **EXACT)


def test_record():
    "Every call of every module of a kind, detached, in order; nothing once the block is left."
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with record(model, nn.Linear) as given:
        model(model(x))
    assert list(given) == ["0", "2"] and [len(calls) for calls in given.values()] == [2, 2]
    assert_close(given["0"][0], model[0](x)) and not given["2"][1].requires_grad
    assert_close(given["2"][1], model(model(x)))
    model(x)
    assert len(given["0"]) == 2
    with pytest.raises(ValueError, match="Sequential has no GRU or LSTM module"), record(model, nn.GRU, nn.LSTM):
        pass


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_once_for_all_lengths(dynamic, unchecked):
    "A causal layer meets batches of many lengths in training: no graph break, at most one more compilation."
    torch._dynamo.reset()
    layer, counter = SelfAttention(16, 2, causal=True), torch._dynamo.testing.CompileCounter()
    whole = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
    for n in (6, 9, 4, 11, 2):
        x = torch.randn(2, n, 16)
        assert_close(whole(x), layer(x), **EXACT)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


# Errors


@pytest.mark.parametrize("make,message", [
    (lambda: SelfAttention(10, 4), "d_model=10 is not divisible by n_heads=4; change one, or give d_head"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)), r"mask is torch.float32 .*must hold booleans.*mask.bool\(\)"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 2, 8), start=1), r"start=1 needs cache=new_cache\(batch_size, max_len\)"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 2, 8), mask=torch.ones(1, 2)), r"mask is torch.float32 .*must hold booleans.*mask.bool\(\)"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 2, 8), mask=torch.ones(1, 3, dtype=torch.bool)), r"mask of shape \(1, 3\) must be \(1, 2\)"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 3, 8), cache=SelfAttention(8, 4).new_cache(1, 2)), "room for 2 positions, 3 are needed.*max_len=3 or more"),
    (lambda: SelfAttention(8, 0), "n_heads=0 must be an integer of at least 1"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 1, 8), cache=SelfAttention(8, 4).new_cache(2, 2)), r"keys of shape \(1, 4, 1, 2\) must be \(2, 4, n, 2\).*reorder"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 1, 8), cache=SelfAttention(8, 2).new_cache(1, 2)), "must be .*this layer's new_cache"),
    (lambda: SelfAttention(8, 4)(torch.zeros(1, 1, 8), cache=SelfAttention(8, 4).new_cache(1, 4), start=-2), "start=-2 must be an integer of at least 0"),
    (lambda: fused_attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 4, 4)), "keys=5 and values=4 must be equal"),
    (lambda: local_attention(*torch.zeros(3, 1, 1, 4, 2), window=3), "window=3 must be even"),
    (lambda: local_attention(*torch.zeros(3, 1, 1, 4, 2), window=0), "window=0 must be an integer of at least 2"),
    *((lambda mask=mask: local_attention(*torch.zeros(3, 2, 1, 4, 2), 2, mask), r"mask .*\(2, 4\).*True at keys")
      for mask in (torch.ones(2, 4), torch.ones(2, 3) > 0, torch.ones(1, 4) > 0, torch.ones(2, 4, 4) > 0, [True])),
    (lambda: local_attention(torch.zeros(1, 2, 4, 2), *torch.zeros(2, 1, 2, 6, 2), 2), r"k of shape \(1, 2, 6, 2\) must be \(1, 2, 4, 2\): the shape of q"),
    (lambda: local_attention(torch.zeros(1, 2, 4, 2), *torch.zeros(2, 1, 1, 4, 2), 2), r"k of .*the shape of q"),
    (lambda: local_attention(*torch.zeros(2, 1, 2, 4, 2), torch.zeros(1, 2, 5, 2), 2), "keys=4 and values=5 must be equal"),
])
def test_errors_name_the_remedy(make, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("call,argument,axis", [
    (lambda: scaled_dot_product(torch.zeros(1, 2, 4), torch.zeros(1, 3, 5), torch.zeros(1, 3, 4)), "k", "k=4"),
    (lambda: scaled_dot_product(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)), "v", "m=3"),
    (lambda: CrossAttention(8, 4, d_memory=6)(torch.zeros(2, 2, 8), torch.zeros(1, 2, 6)), "memory", "b=2"),
    (lambda: KVCache(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)), "v", "t=3"),
])
def test_wrong_shapes_name_the_axis(call, argument, axis):
    "Which argument broke the agreement, and what the axis had been until then."
    with pytest.raises(TypeCheckError) as error:
        call()
    _, agreed = str(error.value).split("current values for each jaxtyping axis")
    assert f"typechecking parameter '{argument}'" in str(error.value) and axis in agreed.split()


def test_same_experiment_as_chapter_3():
    "The figure is drawn on chapter 3's data with chapter 3's settings: the same statements, however they are wrapped."
    names = {"settings", "numbers", "of_length", "english", "german", "pairs"}

    def statements(name):
        cells = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", as_version=4).cells
        nodes = [node for cell in cells if cell.cell_type == "code" for node in ast.parse(cell.source).body]
        return {ast.unparse(node) for node in nodes
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names}

    here = statements("05_attention")
    assert len(here) == 6 and here <= statements("03_seq2seq")
