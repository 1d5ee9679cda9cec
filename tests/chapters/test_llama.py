"Rotary positions, grouped queries and RMSNorm against Llama in `transformers`: parts, a block, a stack, and writing with a cache."

import jinja2
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

import annotated_nlp
from messages import refused, says
from annotated_nlp.attention import CrossAttention, SelfAttention, attention_maps
from annotated_nlp.parts.writing import new_caches
from annotated_nlp.llama import Llama, Rotary
from annotated_nlp.llama import LlamaConfig as LlamaConfigOfOurs
from annotated_nlp.transformer import Block, BlockConfig, FeedForward, RMSNorm, Stack

EXACT = dict(atol=2e-5, rtol=0)
BASE = 500.0
REAL = torch.arange(9) >= torch.tensor([[0], [4], [7]])  # padding on the left


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def their_config(n_kv_heads=2, **changes):
    sizes = dict(vocab_size=29, hidden_size=48, num_attention_heads=6, num_key_value_heads=n_kv_heads, intermediate_size=40, num_hidden_layers=3)
    return LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=BASE), attn_implementation="eager", **changes)


def our_config(n_kv_heads=2):
    settings = dict(norm="rms", norm_first=True, activation="silu", gated=True, bias=False, dropout=0.0, eps=1e-5)
    return BlockConfig(d_model=48, n_heads=6, n_kv_heads=n_kv_heads, d_ff=40, **settings)


def disturbed(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
    return model.eval()


def from_llama(p):
    "A layer's weights, or their gradients, under the names of a block."
    return {
        "attention.layer.query_key_value.weight": torch.cat([p[f"self_attn.{x}_proj.weight"] for x in "qkv"]),
        "attention.layer.out.weight": p["self_attn.o_proj.weight"],
        "attention.norm.weight": p["input_layernorm.weight"],
        "feed_forward.layer.up.weight": torch.cat([p["mlp.gate_proj.weight"], p["mlp.up_proj.weight"]]),
        "feed_forward.layer.down.weight": p["mlp.down_proj.weight"],
        "feed_forward.norm.weight": p["post_attention_layernorm.weight"],
    }


def whole(n_kv_heads=2):
    "Their model, our stack with its weights, and the slot of its positions."
    theirs = disturbed(LlamaForCausalLM(their_config(n_kv_heads)))
    state = {"norm.weight": theirs.model.norm.weight}
    for i, layer in enumerate(theirs.model.layers):
        state |= {f"blocks.{i}.{name}": p for name, p in from_llama(dict(layer.named_parameters())).items()}
    ours = Stack(our_config(n_kv_heads), 3, causal=True).eval()
    ours.load_state_dict(state)
    return ours, theirs, Rotary(8, BASE)


@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("start", [0, 3, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_as_llamas(base, start, dtype):
    q, k = torch.randn(2, 6, 5, 8, dtype=dtype), torch.randn(2, 3, 5, 8, dtype=dtype)
    options = dict(hidden_size=48, num_attention_heads=6, rope_parameters=dict(rope_type="default", rope_theta=base))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**options))
    wanted = apply_rotary_pos_emb(q, k, *theirs(q, torch.arange(start, start + 5)[None]))
    assert_close(Rotary(8, base)(5, start)(q, k, start)[:2], wanted)


def test_turned_as_complex_numbers():
    "Su et al. 2021, equation 12: a pair of features is a complex number, times e^(i p theta)."
    x, theta = torch.randn(1, 1, 6, 10), 10_000.0 ** (-torch.arange(0, 10, 2) / 10)
    wanted = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * torch.arange(6)[:, None] * theta)
    found, _, bias = Rotary(10)(6)(x, x, 0)
    assert_close(torch.complex(*found.chunk(2, -1)), wanted, **EXACT)
    assert bias is None and not [*Rotary(10).parameters()] and not Rotary(10).state_dict()


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_block_is_llamas(n_kv_heads, padded):
    "Outputs, and the gradients of input and parameters."
    config = their_config(n_kv_heads)
    theirs, ours = disturbed(LlamaDecoderLayer(config, 0)), Block(our_config(n_kv_heads), causal=True)
    weights = dict(theirs.named_parameters())
    ours.load_state_dict(from_llama(weights))
    x = torch.randn(3, 9, 48, requires_grad=True)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril() & (REAL[:, None] if padded else torch.tensor(True))
    allowed = allowed.expand(3, 9, 9)
    additive = torch.zeros(3, 1, 9, 9).masked_fill(~allowed[:, None], -1e9)
    angles = LlamaRotaryEmbedding(config)(x, torch.arange(9)[None])
    real = REAL if padded else torch.ones_like(REAL)
    found = ours(x, real if padded else None, Rotary(8, BASE)(9))[real]
    wanted = theirs(x, attention_mask=additive, position_embeddings=angles)[real]
    assert_close(found, wanted, **EXACT)
    upstream, mine = torch.randn_like(wanted), dict(ours.named_parameters())
    gradients = torch.autograd.grad((found * upstream).sum(), [x, *mine.values()])
    expected = torch.autograd.grad((wanted * upstream).sum(), [x, *weights.values()])
    by_name = from_llama(dict(zip(weights, expected[1:])))
    for name, gradient, right in zip(["x", *mine], gradients, [expected[0], *(by_name[name] for name in mine)], strict=True):
        assert right.abs().max() > 0
        assert_close(gradient, right, atol=2e-5 * max(1.0, right.abs().max().item()), rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("n_kv_heads", [2, 6])
def test_stack_is_llamas(n_kv_heads):
    ours, theirs, rotary = whole(n_kv_heads)
    ids = torch.randint(29, (3, 9))
    x = ours(theirs.model.embed_tokens(ids), relative=rotary(9))
    assert_close(theirs.lm_head(x), theirs(ids).logits, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("pieces", [[1] * 9, [5, 1, 1, 2]], ids=str)
def test_with_a_cache_and_left_padding_as_llama(n_kv_heads, pieces):
    """Theirs counts positions from the first real token, ours from the first column: distances are the same.

    The cache has room for the shared heads alone, as theirs.
    """
    ours, theirs, rotary = whole(n_kv_heads)
    ids, start, steps = torch.randint(29, (3, 9)), 0, []
    positions = (REAL.cumsum(1) - 1).clamp(min=0)
    wanted = theirs(ids, attention_mask=REAL.long(), position_ids=positions, use_cache=True)
    caches = new_caches(ours.layers, 3, 12)
    assert all(cache.own.k.shape == cache.own.v.shape == (3, n_kv_heads, 12, 8) for cache in caches)
    for n in pieces:
        x = theirs.model.embed_tokens(ids[:, start : start + n])
        steps.append(ours(x, REAL[:, : start + n], rotary(n, start), caches=caches, start=start))
        start += n
    assert_close(theirs.lm_head(torch.cat(steps, 1))[REAL], wanted.logits[REAL], **EXACT)
    unpadded = theirs(ids[:1], use_cache=True).past_key_values.layers[0]
    assert_close((caches[0].own.k[:1, :, :9], caches[0].own.v[:1, :, :9]), (unpadded.keys, unpadded.values), **EXACT)


# Grouped queries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_grouped_is_whole_with_repeated_heads(causal, masked, n_kv_heads):
    "Fused and by hand, with gradients: as if each head of keys and values stood there for every query head of its group."
    grouped = SelfAttention(24, 4, n_kv_heads=n_kv_heads, causal=causal)
    every, times = SelfAttention(24, 4, causal=causal), 4 // n_kv_heads
    heads = grouped.query_key_value.weight.detach().unflatten(0, (-1, 6)), grouped.query_key_value.bias.detach().unflatten(0, (-1, 6))
    repeated = [torch.cat([x[:4], *(part.repeat_interleave(times, 0) for part in x[4:].chunk(2))]).flatten(0, 1) for x in heads]
    every.query_key_value.load_state_dict(dict(zip(("weight", "bias"), repeated)))
    every.out.load_state_dict(grouped.out.state_dict())
    x, mask = torch.randn(3, 9, 24, requires_grad=True), REAL if masked else None
    upstream, found = torch.randn(3, 9, 24), {}
    for name, layer in dict(whole=every, fused=grouped, hand=grouped).items():
        out = layer(x, mask, need_weights=name == "hand")
        out = out[0] if name == "hand" else out
        found[name] = out, *torch.autograd.grad((out * upstream).sum(), [x, layer.query_key_value.weight, layer.out.weight])
    for name in ("fused", "hand"):
        for mine, wanted in zip(found[name][:2] + found[name][3:], found["whole"][:2] + found["whole"][3:]):
            assert_close(mine, wanted, **EXACT)
        shared = found["whole"][2].unflatten(0, (-1, 6))
        shared = torch.cat([shared[:4], *(part.unflatten(0, (n_kv_heads, times)).sum(1) for part in shared[4:].chunk(2))])
        assert_close(found[name][2], shared.flatten(0, 1), **EXACT)
    assert_close(grouped(x, mask, need_weights=True)[1], every(x, mask, need_weights=True)[1], **EXACT)


def test_grouped_cross_attention():
    "As self-attention of the same matrices, where the memory is the text itself; and no smaller if not asked for."
    own, cross = SelfAttention(24, 6, n_kv_heads=2), CrossAttention(24, 6, 24, n_kv_heads=2)
    for part in ("weight", "bias"):
        q, kv = getattr(own.query_key_value, part).detach().split((24, 16))
        cross.load_state_dict({f"query.{part}": q, f"key_value.{part}": kv, f"out.{part}": getattr(own.out, part).detach()}, strict=False)
    x = torch.randn(2, 5, 24)
    assert_close(cross(x, x), own(x), **EXACT)
    assert_close(cross(x, cross.remember(x), need_weights=True), own(x, need_weights=True), **EXACT)
    assert cross.remember(x).k.shape == (2, 2, 5, 4)


def test_grouped_maps_of_a_block():
    stack = Stack(our_config(), 2, causal=True)
    with attention_maps(stack) as maps, torch.no_grad():
        stack(torch.randn(2, 5, 48), relative=Rotary(8)(5))
    assert [x.shape for x in maps.values()] == [(2, 6, 5, 5)] * 2


# Activation and norm


def test_silu_is_pytorchs():
    layer, x = FeedForward(our_config()), torch.randn(2, 3, 48)
    gate, up = layer.up(x).chunk(2, -1)
    assert_close(layer(x), layer.down(nn.SiLU()(gate) * up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [7, 64, 576])
def test_rms_norm_rounds_as_llamas(dtype, d):
    "Bit for bit, where PyTorch's own, which rounds once, differs in half precision."
    theirs, ours = LlamaRMSNorm(d, 1e-5).to(dtype), RMSNorm(d, 1e-5).to(dtype)
    theirs.weight.data = torch.randn(d).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x = (3 * torch.randn(200, d)).to(dtype)
    assert torch.equal(ours(x), theirs(x))
    once = nn.RMSNorm(d, 1e-5, dtype=dtype)
    once.load_state_dict(theirs.state_dict())
    assert torch.equal(once(x), theirs(x)) == (dtype == torch.float32)


# Errors


test_errors = refused([
    (lambda: Rotary(7), ["d_head=7", "even"]),
    (lambda: Rotary(0), ["d_head=0"]),
    (lambda: Rotary(8, 0.0), ["base=0.0"]),
    (lambda: SelfAttention(12, 2)(torch.zeros(1, 3, 12), relative=Rotary(4)(3)), ["6 features", "d_head=4"]),
    (lambda: SelfAttention(24, 6, n_kv_heads=4), ["n_heads=6", "n_kv_heads=4"]),
    (lambda: SelfAttention(24, 6, n_kv_heads=0), ["n_kv_heads=0"]),
    (lambda: our_config(0), ["n_kv_heads=0"]),
    (lambda: our_config(4), ["n_heads=6", "n_kv_heads=4"]),
])


@pytest.fixture
def pair(tmp_path):
    "Their language model, and ours read from its file."
    theirs = disturbed(LlamaForCausalLM(their_config(max_position_embeddings=64, pad_token_id=None, eos_token_id=None, bos_token_id=None)))
    theirs.save_pretrained(tmp_path)
    return Llama.from_pretrained(tmp_path), theirs


def generated(theirs, ids, new, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)[:, ids.shape[1]:]


def test_writes_behind_padding_as_theirs(pair):
    ours, theirs = pair
    ids = torch.randint(29, (3, 9))
    assert torch.equal(ours.generate(ids, 20, mask=REAL), generated(theirs, ids, 20, attention_mask=REAL.long()))


def test_ends_where_theirs_ends(pair):
    ours, theirs = pair
    ids = torch.randint(29, (8, 5))
    free = generated(theirs, ids, 12)
    stop = free[0, 3].item()
    wanted = generated(theirs, ids, 12, eos_token_id=stop)
    found = ours.generate(ids, 12, stop_id=stop, pad_id=0)
    assert torch.equal(found, wanted[:, : found.shape[1]]) and (wanted[:, found.shape[1]:] == 0).all()


def test_beams_as_theirs(pair):
    ours, theirs = pair
    ids = torch.randint(29, (3, 6))
    assert torch.equal(ours.generate(ids, 8, beam=4), generated(theirs, ids, 8, num_beams=4))


def test_a_text_longer_than_the_model_is_refused_and_a_longer_model_reads_it(pair, tmp_path):
    ours, theirs = pair
    ids = torch.randint(29, (1, 80))
    with pytest.raises(ValueError, match=says("80", "64", "max_len")):
        ours(ids)
    longer = Llama.from_pretrained(tmp_path, max_len=100)  # no weight depends on it
    with torch.no_grad():
        assert_close(longer(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def test_the_real_model():
    "What its own library wrote down for this file: llama.cpp's names, sizes and facts give a model that knows a capital and stops by itself."
    model, tokenizer = annotated_nlp.load("annotated-nlp/smollm2")
    assert model.n_parameters == 134_515_008 and model.config == LlamaConfigOfOurs.smollm2(eos_id=2, eps=model.config.eps)
    said = [dict(role="user", content="What is the capital of France? Answer with one word.")]
    text = jinja2.Template(tokenizer.template).render(messages=said, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text).ids])
    answer = model.generate(ids, 30)[0].tolist()
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.token_to_id("<|im_end|>")
    with torch.no_grad():  # in a batch beside a longer prompt, and fused or by hand
        first = tokenizer.encode("The capital of France is").ids
        rows = torch.tensor([[0] * (ids.shape[1] - len(first)) + first, ids[0].tolist()])
        mask = torch.arange(ids.shape[1]) >= torch.tensor([[ids.shape[1] - len(first)], [0]])
        assert torch.equal(model.generate(rows, 4, mask=mask)[0], model.generate(torch.tensor([first]), 4)[0])


test_settings_refused = refused([
    (lambda: LlamaConfigOfOurs.smollm2("1B"), ["size='1B'", "135M"]),
    (lambda: LlamaConfigOfOurs.llama2("8B"), ["size='8B'", "70B"]),
    (lambda: LlamaConfigOfOurs(n_kv_heads=5), ["n_kv_heads=5", "n_heads"]),
    (lambda: LlamaConfigOfOurs(eos_id=32_000), ["eos_id=32000"]),
    (lambda: LlamaConfigOfOurs(tied="yes"), ["tied='yes'"]),
    (lambda: Llama(LlamaConfigOfOurs(d_head=33, n_layers=1, d_model=64, d_ff=8, vocab_size=9)), ["d_head=33", "even"]),
    (lambda: Llama(LlamaConfigOfOurs(base=0.0, n_layers=1, d_model=64, d_ff=8, vocab_size=9)), ["base=0.0"]),
])
