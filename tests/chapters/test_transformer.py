"The Transformer against PyTorch's, one block against eight papers' layers in `transformers`, and decoding with a cache against reading again."

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BertConfig, BertModel, DeiTConfig, ElectraConfig, GPT2Config, GPT2Model, OpenAIGPTConfig, T5Config, T5Model, ViTConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.deit.modeling_deit import DeiTLayer
from transformers.models.electra.modeling_electra import ElectraLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.openai.modeling_openai import Block as OpenAIBlock
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from messages import says
from annotated_nlp.attention import added, attention_maps
from annotated_nlp.decoding import State, beam_search, greedy, sample
from annotated_nlp.parts.embedding import Positions, initialise_normal
from annotated_nlp.parts.embedding import sinusoidal_positions
from annotated_nlp.parts.model import reset_buffers
from annotated_nlp.parts.recording import record
from annotated_nlp.parts.writing import DecoderState, new_caches
from annotated_nlp.seq2seq import cross_entropy
from annotated_nlp.transformer import Block, BlockConfig, Stack, Sublayer, Transformer
from annotated_nlp.transformer import TransformerConfig

BOS, EOS = 2, 3
SMALL = dict(src_vocab_size=20, tgt_vocab_size=23, d_model=32, n_heads=4, d_ff=48, n_layers=2, dropout=0.0, max_len=40)
MODERN = dict(norm="rms", norm_first=True, activation="gelu_tanh", gated=True, bias=False, positions="learned", tgt_vocab_size=20, shared_vocab=True)
BOTH = pytest.mark.parametrize("changes", [{}, MODERN], ids=["paper", "modern"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(**changes):
    return Transformer(TransformerConfig(**SMALL | changes)).eval()


def disturb(module):
    "Weights of a size that keeps signals alive; no bias at zero and no norm at one."
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))


def lengths(*sizes):
    return torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]


def close(found, wanted, name=""):
    "To 1e-5 of the largest entry, or of 1 where all are smaller."
    atol = 1e-5 * max(1.0, wanted.detach().abs().max().item())
    assert_close(found, wanted, atol=atol, rtol=0, msg=lambda text: f"{name}: {text}")


# The same weights under our names. Each map is linear, so that it carries gradients too.


def renamed(p, **pairs):
    "Weight and bias of each of theirs under our name, as far as they have them."
    return {f"{PLACES[ours]}.{part}": p[f"{theirs}.{part}"] for ours, theirs in pairs.items() for part in ("weight", "bias") if f"{theirs}.{part}" in p}


def joined(p, ours, *theirs):
    return {f"{PLACES[ours]}.{part}": torch.cat([p[f"{name}.{part}"] for name in theirs]) for part in ("weight", "bias") if f"{theirs[0]}.{part}" in p}


PLACES = {"qkv": "attention.layer.query_key_value", "out": "attention.layer.out", "norm": "attention.norm", "cross_q": "cross.layer.query", "cross_kv": "cross.layer.key_value", "cross_out": "cross.layer.out",
          "cross_norm": "cross.norm", "up": "feed_forward.layer.up", "down": "feed_forward.layer.down", "last_norm": "feed_forward.norm"}


def from_pytorch(p):
    cross = "multihead_attn.in_proj_weight" in p
    found = renamed(p, out="self_attn.out_proj", norm="norm1", cross_out="multihead_attn.out_proj", up="linear1", down="linear2", last_norm="norm3" if cross else "norm2")
    found |= {f"attention.layer.query_key_value.{part}": p[f"self_attn.in_proj_{part}"] for part in ("weight", "bias")}
    if cross:
        found |= renamed(p, cross_norm="norm2")
        for part in ("weight", "bias"):
            q, k, v = p[f"multihead_attn.in_proj_{part}"].chunk(3)
            found |= {f"cross.layer.query.{part}": q, f"cross.layer.key_value.{part}": torch.cat([k, v])}
    return found


def from_bert(p):
    qkv = joined(p, "qkv", *(f"attention.self.{name}" for name in ("query", "key", "value")))
    return qkv | renamed(p, out="attention.output.dense", norm="attention.output.LayerNorm", up="intermediate.dense", down="output.dense", last_norm="output.LayerNorm")


def from_gpt(p):
    "Both GPTs; their matrices are transposed."
    p = {name: value.T if value.ndim == 2 else value for name, value in p.items()}
    return renamed(p, qkv="attn.c_attn", out="attn.c_proj", norm="ln_1", up="mlp.c_fc", down="mlp.c_proj", last_norm="ln_2")


def from_t5(p):
    "The activated half of a gated `up` is the first: their wi_0."
    own, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    decoder = f"{cross}.q.weight" in p
    last = "layer.2" if decoder else "layer.1"
    found = joined(p, "qkv", *(f"{own}.{name}" for name in "qkv")) | renamed(p, out=f"{own}.o", norm="layer.0.layer_norm", down=f"{last}.DenseReluDense.wo", last_norm=f"{last}.layer_norm")
    gated = f"{last}.DenseReluDense.wi_0.weight" in p
    found |= joined(p, "up", *(f"{last}.DenseReluDense.{name}" for name in (("wi_0", "wi_1") if gated else ("wi",))))
    if decoder:
        found |= renamed(p, cross_q=f"{cross}.q", cross_out=f"{cross}.o", cross_norm="layer.1.layer_norm") | joined(p, "cross_kv", f"{cross}.k", f"{cross}.v")
    return found


def from_vit(p):
    qkv = joined(p, "qkv", *(f"attention.{name}_proj" for name in "qkv"))
    return qkv | renamed(p, out="attention.o_proj", norm="layernorm_before", up="mlp.fc1", down="mlp.fc2", last_norm="layernorm_after")


def within(p, prefix):
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def stacked(p, convert, layers, norm=None):
    "A whole stack, whose layers stand under `layers` and whose final norm under `norm`."
    found = {f"norm.{part}": value for part, value in (within(p, f"{norm}.") if norm else {}).items()}
    for i in range(1 + max(int(name.removeprefix(f"{layers}.").split(".")[0]) for name in p if name.startswith(f"{layers}."))):
        found |= {f"blocks.{i}.{name}": value for name, value in convert(within(p, f"{layers}.{i}.")).items()}
    return found


def compare(ours, theirs, convert, run, their_run, inputs, skip=()):
    """Same weights: outputs, a loss, and the gradients of inputs and of every parameter of ours agree.

    `skip`: prefixes of their parameters that have no counterpart here.
    """
    disturb(theirs)
    weights = {name: p for name, p in theirs.named_parameters() if not name.startswith(tuple(skip))}
    ours.load_state_dict(convert(weights))
    found, wanted = run(), their_run()
    close(found, wanted, "output")
    upstream = torch.randn_like(wanted)
    losses = [(x * upstream).sum() / len(x) for x in (found, wanted)]
    close(*losses, "loss")
    mine = dict(ours.named_parameters())
    gradients = torch.autograd.grad(losses[0], [*inputs, *mine.values()])
    wanted = torch.autograd.grad(losses[1], [*inputs, *weights.values()])
    expected = convert(dict(zip(weights, wanted[len(inputs) :])))
    assert mine.keys() == expected.keys()
    for i in range(len(inputs)):
        close(gradients[i], wanted[i], f"input {i}")
    for name, gradient in zip(mine, gradients[len(inputs) :]):
        assert expected[name].abs().max() > 0 or name.endswith("query_key_value.bias"), f"{name} has no part in the output"
        close(gradient, expected[name], name)


def states(*shape):
    return torch.randn(shape, requires_grad=True)


# PyTorch's layers and stacks

PLACEMENTS = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])
MASKS = pytest.mark.parametrize("padded,causal", list(itertools.product([False, True], repeat=2)))
LAYER = dict(d_model=32, nhead=4, dim_feedforward=48, dropout=0.0, batch_first=True)


def block_config(norm_first, activation, **changes):
    return BlockConfig(**dict(d_model=32, n_heads=4, d_ff=48, dropout=0.0, norm_first=norm_first, activation=activation) | changes)


def forbidden(n, causal):
    return torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None


@MASKS
@ACTIVATIONS
@PLACEMENTS
def test_encoder_as_pytorchs(norm_first, activation, padded, causal):
    config, layer = block_config(norm_first, activation), nn.TransformerEncoderLayer(**LAYER, norm_first=norm_first, activation=activation)
    x, mask = states(3, 7, 32), lengths(7, 4, 1) if padded else None
    masks = dict(src_key_padding_mask=~mask if padded else None)
    block = Block(config, causal=causal)
    compare(block, layer, from_pytorch, lambda: block(x, mask), lambda: layer(x, src_mask=forbidden(7, causal), **masks), [x])
    stack, norm = Stack(config, 3, causal=causal), nn.LayerNorm(32) if norm_first else None
    encoder = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
    convert = partial(stacked, convert=from_pytorch, layers="layers", norm="norm")
    compare(stack, encoder, convert, lambda: stack(x, mask), lambda: encoder(x, mask=forbidden(7, causal), **masks), [x])


@MASKS
@ACTIVATIONS
@PLACEMENTS
def test_decoder_as_pytorchs(norm_first, activation, padded, causal):
    config, layer = block_config(norm_first, activation), nn.TransformerDecoderLayer(**LAYER, norm_first=norm_first, activation=activation)
    x, memory, mask = states(3, 5, 32), states(3, 7, 32), lengths(7, 4, 1) if padded else None
    masks = dict(tgt_mask=forbidden(5, causal), memory_key_padding_mask=~mask if padded else None)
    block = Block(config, causal=causal, cross=True)
    compare(block, layer, from_pytorch, lambda: block(x, memory=memory, memory_mask=mask), lambda: layer(x, memory, **masks), [x, memory])
    stack, norm = Stack(config, 3, causal=causal, cross=True), nn.LayerNorm(32) if norm_first else None
    decoder = nn.TransformerDecoder(layer, 3, norm)
    convert = partial(stacked, convert=from_pytorch, layers="layers", norm="norm")
    compare(stack, decoder, convert, lambda: stack(x, memory=memory, memory_mask=mask), lambda: decoder(x, memory, **masks), [x, memory])


def formula(n, d):
    "Section 3.5 of the paper, term by term."
    return torch.tensor([[math.sin(p / 10000 ** (i / d)) if i % 2 == 0 else math.cos(p / 10000 ** ((i - 1) / d)) for i in range(d)] for p in range(n)], dtype=torch.float64)


class Theirs(nn.Module):
    "PyTorch's nn.Transformer between embeddings, positions and the tied output layer."

    def __init__(self, norm_first, activation, shared):
        super().__init__()
        self.src = nn.Embedding(20, 32)
        self.tgt = self.src if shared else nn.Embedding(23, 32)
        parts = {}
        if not norm_first:  # otherwise PyTorch's puts a norm of its own after each stack
            layer = partial(nn.TransformerEncoderLayer, **LAYER, activation=activation)
            parts["custom_encoder"] = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
            parts["custom_decoder"] = nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, activation=activation), 2)
        sizes = dict(d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48, dropout=0.0, batch_first=True)
        self.core = nn.Transformer(**sizes, norm_first=norm_first, activation=activation, **parts)

    def forward(self, src, tgt, mask, causal):
        a, b = (embedding(ids) * 32**0.5 + formula(ids.shape[1], 32).float() for embedding, ids in ((self.src, src), (self.tgt, tgt)))
        padding = None if mask is None else ~mask
        x = self.core(a, b, tgt_mask=forbidden(tgt.shape[1], causal), src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return x @ self.tgt.weight.T


def from_whole(p, shared):
    found = {"src_embedding.tokens.weight": p["src.weight"], "decoder.embedding.tokens.weight": p["src.weight" if shared else "tgt.weight"]}
    for side in ("encoder", "decoder"):
        part = stacked(within(p, f"core.{side}."), from_pytorch, "layers", "norm")
        found |= {f"{dict(encoder='encoder', decoder='decoder.stack')[side]}.{name}": value for name, value in part.items()}
    return found


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("shared", [False, True], ids=["two vocabularies", "one"])
@pytest.mark.parametrize("padded", [False, True])
@ACTIVATIONS
@PLACEMENTS
def test_transformer_as_pytorchs(norm_first, activation, padded, shared):
    "From ids to the smoothed loss and back to every weight, embeddings included."
    ours = small(norm_first=norm_first, activation=activation, shared_vocab=shared, **dict(tgt_vocab_size=20) if shared else {})
    theirs = Theirs(norm_first, activation, shared)
    disturb(theirs)
    ours.load_state_dict(from_whole(dict(theirs.named_parameters()), shared))
    real = lengths(9, 5, 1) if padded else torch.ones(3, 9, dtype=torch.bool)
    src, tgt = torch.randint(4, 20, (3, 9)).where(real, 0), torch.randint(4, 20, (3, 7))
    here = lengths(7, 3, 2) if padded else torch.ones(3, 7, dtype=torch.bool)
    mask = real if padded else None
    found, wanted = ours(src, tgt[:, :-1], mask), theirs(src, tgt[:, :-1], mask, causal=True)
    close(found, wanted, "logits")
    close(ours(src, tgt[:, :-1]), wanted, "mask from pad_id")
    losses = [cross_entropy(found, tgt[:, 1:], here[:, 1:], 0.1), F.cross_entropy(wanted[here[:, 1:]], tgt[:, 1:][here[:, 1:]], label_smoothing=0.1)]
    close(*losses, "loss")
    for loss in losses:
        (100 * loss).backward()  # the mean over tokens is small; the tolerance is not
    expected = from_whole({name: p.grad for name, p in theirs.named_parameters()}, shared)
    for name, p in ours.named_parameters():
        assert expected[name].abs().max() > 1e-3 or name.endswith("query_key_value.bias")
        close(p.grad, expected[name], name)


# One block, eight papers: the layers of `transformers`


def layer_config(config):
    config._attn_implementation = "eager"
    return config


def additive(allowed):
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["bert", "electra"])
def test_block_is_berts_and_electras(name, padded):
    make, layer = {"bert": (BertConfig, BertLayer), "electra": (ElectraConfig, ElectraLayer)}[name]
    config = layer_config(make(hidden_size=32, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu", 1e-12)
    theirs, ours = layer(config), Block(block_config(False, "gelu", eps=1e-12))
    x, mask = states(3, 7, 32), lengths(7, 4, 1) if padded else None
    compare(ours, theirs, from_bert, lambda: ours(x, mask), lambda: theirs(x, additive(mask[:, None, None]) if padded else None), [x])


def test_stack_is_berts():
    "The whole of BertModel above its embeddings, and the gradients that reach these."
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    theirs, ours = BertModel(config, add_pooling_layer=False), Stack(block_config(False, "gelu", eps=1e-12), 3)
    ids, mask = torch.randint(50, (3, 9)), lengths(9, 5, 2)
    run, their_run = lambda: ours(theirs.embeddings(ids), mask), lambda: theirs(ids, attention_mask=mask.long()).last_hidden_state
    compare(ours, theirs, partial(stacked, convert=from_bert, layers="encoder.layer"), run, their_run, list(theirs.embeddings.parameters()), skip=["embeddings"])


def test_block_and_stack_are_gpt2s():
    config = GPT2Config(vocab_size=50, n_positions=20, n_embd=32, n_layer=3, n_head=4, n_inner=48, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    assert (config.activation_function, config.layer_norm_epsilon) == ("gelu_new", 1e-5)
    x, settings = states(3, 7, 32), block_config(True, "gelu_tanh")
    theirs, ours, triangle = GPT2Block(layer_config(config), layer_idx=0), Block(settings, causal=True), additive(~forbidden(7, True))
    compare(ours, theirs, from_gpt, lambda: ours(x), lambda: theirs(x, attention_mask=triangle), [x])
    config._attn_implementation = "sdpa"
    model, stack = GPT2Model(config), Stack(settings, 3, causal=True)
    ids, embeddings = torch.randint(50, (3, 7)), [model.wte.weight, model.wpe.weight]
    run = lambda: stack(model.wte(ids) + model.wpe.weight[:7])
    compare(stack, model, partial(stacked, convert=from_gpt, layers="h", norm="ln_f"), run, lambda: model(ids).last_hidden_state, embeddings, skip=["wte", "wpe"])


def test_block_is_openai_gpts():
    "Post-norm, and what its configuration calls gelu is the tanh form."
    config = OpenAIGPTConfig(n_positions=20, n_embd=32, n_head=4, resid_pdrop=0, attn_pdrop=0)
    assert (config.afn, config.layer_norm_epsilon) == ("gelu", 1e-5)
    theirs, ours, x = OpenAIBlock(20, config, scale=True), Block(block_config(False, "gelu_tanh", d_ff=128), causal=True), states(3, 7, 32)
    compare(ours, theirs, from_gpt, lambda: ours(x), lambda: theirs(x)[0], [x])


T5 = pytest.mark.parametrize("version,projection,activation,gated", [("1.0", "relu", "relu", False), ("1.1", "gated-gelu", "gelu_tanh", True)])
T5_SIZES = dict(vocab_size=50, d_model=32, d_kv=12, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=8, relative_attention_max_distance=16)


def t5_settings(activation, gated):
    return block_config(True, activation, norm="rms", gated=gated, bias=False, d_head=12, scale=1.0, eps=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
@T5
def test_block_is_t5s(version, projection, activation, gated, decoder, padded):
    "The relative bias is an argument; its table gets the same gradient. The activated half of a gated `up` is the first."
    config = layer_config(T5Config(**T5_SIZES, feed_forward_proj=projection))
    config.is_decoder, table = decoder, "layer.0.SelfAttention.relative_attention_bias.weight"
    assert (config.is_gated_act, config.dense_act_fn, config.layer_norm_epsilon) == (gated, "gelu_new" if gated else "relu", 1e-6)
    theirs, ours = T5Block(config, has_relative_attention_bias=True, layer_idx=0), Block(t5_settings(activation, gated), causal=decoder, cross=decoder)
    n, x, memory = 7, states(3, 7, 32), states(3, 5, 32)
    mask, memory_mask = lengths(7, 4, 1) if padded else None, lengths(5, 3, 1) if padded else None
    relative = theirs.layer[0].SelfAttention
    allowed = torch.ones(3, 1, n, n, dtype=torch.bool) if mask is None else mask[:, None, None].expand(3, 1, n, n)
    allowed = allowed.tril() if decoder else allowed
    extra = dict(memory=memory, memory_mask=memory_mask) if decoder else {}
    their_extra = dict(encoder_hidden_states=memory, encoder_attention_mask=additive(memory_mask[:, None, None]) if padded else None) if decoder else {}
    inputs = [x, relative.relative_attention_bias.weight, *([memory] if decoder else [])]
    run, their_run = lambda: ours(x, mask, added(relative.compute_bias(n, n)), **extra), lambda: theirs(x, attention_mask=additive(allowed), **their_extra)[0]
    compare(ours, theirs, from_t5, run, their_run, inputs, skip=[table])


@T5
def test_stacks_are_t5s(version, projection, activation, gated):
    "Encoder and decoder of T5Model, with padding: one relative bias for all layers, a final norm on each stack."
    theirs = T5Model(T5Config(**T5_SIZES, feed_forward_proj=projection, num_decoder_layers=2))
    parts = nn.ModuleDict({"encoder": Stack(t5_settings(activation, gated), 3), "decoder": Stack(t5_settings(activation, gated), 2, causal=True, cross=True)})
    src, tgt, mask = torch.randint(50, (3, 9)), torch.randint(50, (3, 6)), lengths(9, 4, 1)
    encoder, decoder = (theirs.get_submodule(f"{side}.block.0.layer.0.SelfAttention") for side in parts)

    def run():
        memory = parts["encoder"](theirs.shared(src), mask, added(encoder.compute_bias(9, 9)))
        return parts["decoder"](theirs.shared(tgt), relative=added(decoder.compute_bias(6, 6)), memory=memory, memory_mask=mask)

    def convert(p):
        found = {side: stacked(within(p, f"{side}."), from_t5, "block", "final_layer_norm") for side in parts}
        return {f"{side}.{name}": value for side, part in found.items() for name, value in part.items()}

    inputs = [theirs.shared.weight, encoder.relative_attention_bias.weight, decoder.relative_attention_bias.weight]
    skip = ["shared", *(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias" for side in parts)]
    compare(parts, theirs, convert, run, lambda: theirs(input_ids=src, attention_mask=mask.long(), decoder_input_ids=tgt).last_hidden_state, inputs, skip)


@pytest.mark.parametrize("make,layer", [(ViTConfig, ViTLayer), (DeiTConfig, DeiTLayer)], ids=["vit", "deit"])
def test_block_is_vits_and_deits(make, layer):
    config = layer_config(make(hidden_size=32, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu", 1e-12)
    theirs, ours, x = layer(config), Block(block_config(True, "gelu", eps=1e-12)), states(3, 10, 32)
    compare(ours, theirs, from_vit, lambda: ours(x), lambda: theirs(x), [x])


# Sizes


def count(c):
    "Parameters by arithmetic."
    width, wide = c.n_heads * (c.d_head or c.d_model // c.n_heads), c.d_ff * (1 + c.gated)
    attention = 4 * c.d_model * width + c.bias * (3 * width + c.d_model)
    feed_forward = c.d_model * (wide + c.d_ff) + c.bias * (wide + c.d_model)
    norm = c.d_model * (1 + (c.norm == "layer" and c.bias))
    blocks = c.n_layers * (3 * attention + 2 * feed_forward + 5 * norm) + 2 * norm * c.norm_first
    tables = c.max_len * (c.positions == "learned")
    words = c.src_vocab_size + tables + (0 if c.shared_vocab else c.tgt_vocab_size + tables)
    return blocks + words * c.d_model


def parameters(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert all(p.is_meta for p in model.parameters())
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config,printed,exact", [(TransformerConfig.base(), 65e6, 63_082_496), (TransformerConfig.big(), 213e6, 214_245_376)], ids=["base", "big"])
def test_sizes_of_the_paper(config, printed, exact):
    "Table 3, with the 37,000 shared pieces of section 5.1."
    assert parameters(config) == count(config) == exact
    assert abs(exact / printed - 1) < 0.035


def test_settings_of_the_paper():
    base, big = TransformerConfig.base(), TransformerConfig.big()
    table = [(c.n_layers, c.d_model, c.d_ff, c.n_heads, c.d_head or c.d_model // c.n_heads, c.dropout) for c in (base, big)]
    assert table == [(6, 512, 2048, 8, 64, 0.1), (6, 1024, 4096, 16, 64, 0.3)]
    for c in (base, big):
        assert (c.norm, c.norm_first, c.activation, c.gated, c.bias, c.scale, c.positions, c.shared_vocab) == ("layer", False, "relu", False, True, None, "sinusoidal", True)
    changed = TransformerConfig.big(100, dropout=0.1, norm_first=True)
    assert (changed.src_vocab_size, changed.tgt_vocab_size, changed.dropout, changed.norm_first, changed.d_ff) == (100, 100, 0.1, True, 4096)


@pytest.mark.parametrize("norm,norm_first,gated,bias", list(itertools.product(["layer", "rms"], [False, True], [False, True], [False, True])))
@pytest.mark.parametrize("rest", [{}, dict(positions="learned", d_head=24), dict(positions="learned", tgt_vocab_size=20, shared_vocab=True), dict(positions="none")], ids=str)
def test_sizes_of_every_setting(norm, norm_first, gated, bias, rest):
    config = TransformerConfig(**SMALL | dict(norm=norm, norm_first=norm_first, gated=gated, bias=bias) | rest)
    assert parameters(config) == count(config)


# Positions


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 40))
def test_sinusoid_is_the_formula(n, half):
    assert_close(sinusoidal_positions(n, 2 * half), formula(n, 2 * half).float(), atol=1e-6, rtol=0)


def test_sinusoid_far_out():
    "Angles of thousands of radians keep float32's precision."
    assert_close(sinusoidal_positions(20_000, 4)[-3:], formula(20_000, 4)[-3:].float(), atol=1e-6, rtol=0)


@settings(max_examples=30)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_a_shift_is_a_rotation(p, k, half):
    "PE(p + k) is PE(p) turned, in each pair of features, by an angle that depends on k alone."
    table = sinusoidal_positions(101, 2 * half).double()
    angles = [k / 10000 ** (2 * i / (2 * half)) for i in range(half)]
    turn = torch.block_diag(*(torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64) for a in angles))
    assert_close(turn @ table[p], table[p + k], atol=1e-5, rtol=0)
    assert_close(table.square().sum(-1), torch.full((101,), half, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "none"])
def test_positions(kind, unchecked):
    positions, x = Positions(kind, 10, 6), torch.randn(2, 4, 6)
    wanted = {"sinusoidal": sinusoidal_positions(10, 6), "learned": positions.table, "none": torch.zeros(10, 6)}[kind]
    for start in (0, 3, 6):
        assert_close(positions(x, start), x + wanted[start : start + 4], atol=0, rtol=0)
    assert len(list(positions.parameters())) == (kind == "learned") == len(positions.state_dict())
    for wrong in (partial(positions, x, 7), partial(positions, torch.zeros(2, 11, 6))):
        with pytest.raises(ValueError, match="11.*max_len=10"):
            wrong()


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "none"])
def test_rows_that_begin_at_places_of_their_own(kind):
    "Row by row the same as alone; before place 0 stands padding, which may get anything but must not fail."
    positions, x, starts = Positions(kind, 10, 6), torch.randn(4, 4, 6), [0, 6, 2, -3]
    together = positions(x, torch.tensor(starts))
    for row, alone, start in zip(together, x, starts):
        real = max(0, -start)
        assert_close(row[real:], positions(alone[None, real:], start + real)[0], atol=0, rtol=0)


def test_normal_initialisation():
    "Standard deviation 0.02 for every matrix whatever its size, zero biases, norms that begin as the identity."
    torch.manual_seed(0)
    stack = Stack(BlockConfig(d_model=64, n_heads=4, d_ff=256, norm_first=True), 2)
    with torch.no_grad():
        for p in stack.parameters():
            p.fill_(7.0)
    initialise_normal(stack)
    for name, p in stack.named_parameters():
        if p.ndim > 1:
            assert abs(p.std().item() / 0.02 - 1) < 0.05 and abs(p.mean().item()) < 1e-3, name
        else:
            assert (p == float("norm" in name and name.endswith("weight"))).all(), name


def test_embedding_is_scaled():
    "Section 3.4: weights times √d, then the position; dropout on their sum (section 5.4)."
    model, ids = small(dropout=0.5), torch.randint(4, 20, (2, 5))
    wanted = model.src_embedding.tokens.weight[ids] * 32**0.5 + formula(5, 32).float()
    assert_close(model.src_embedding(ids), wanted, atol=1e-6, rtol=0)
    assert_close(model.src_embedding(ids[:, 3:], start=3), wanted[:, 3:], atol=1e-6, rtol=0)
    dropped = model.train().src_embedding(ids)
    assert_close(dropped, (2 * wanted).where(dropped != 0, 0), atol=1e-5, rtol=0)
    assert 0.3 < (dropped == 0).float().mean() < 0.7


def test_dropout_where_the_paper_has_it():
    "On embeddings with positions, and on each sublayer's output before it is added; all with one rate, none at evaluation."
    model = small(dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25} and len(rates) == 2 + 2 * (2 + 3)
    src, tgt = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert torch.equal(model(src, tgt), model(src, tgt))
    assert not torch.equal(model.train()(src, tgt), model(src, tgt))


@PLACEMENTS
def test_sublayer(norm_first):
    "Dropout on what the sublayer adds, on either side of the norm."
    layer, x = Sublayer(block_config(norm_first, "relu", dropout=0.4), nn.Linear(32, 32)), torch.randn(2, 5, 32)
    disturb(layer)
    torch.manual_seed(3)
    found = layer(x)
    torch.manual_seed(3)
    added = F.dropout(layer.layer(layer.norm(x) if norm_first else x), 0.4)
    assert_close(found, x + added if norm_first else layer.norm(x + added))
    assert_close(layer.eval()(x), x + layer.layer(layer.norm(x)) if norm_first else layer.norm(x + layer.layer(x)))


def test_ids_of_any_integer_type():
    model, src, tgt = small(), torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert torch.equal(model(src.int(), tgt.int()), model(src, tgt))


def test_maps_of_every_attention():
    model, mask = small(), lengths(5, 3)
    with attention_maps(model) as maps, torch.no_grad():
        model(torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6)), mask)
    assert [tuple(w.shape) for w in maps.values()] == [(2, 4, 5, 5)] * 2 + [(2, 4, 6, 6), (2, 4, 6, 5)] * 2
    for weights in maps.values():
        assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        if weights.shape[-1] == 5:
            assert weights[1, ..., 3:].abs().max() == 0
        else:
            assert weights.triu(1).abs().max() == 0 < weights[:, :, 1:, 0].min()


# Label smoothing


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smoothing_as_pytorchs(smoothing, dtype):
    logits, targets, mask = (5 * torch.randn(4, 6, 11, dtype=dtype)).requires_grad_(), torch.randint(11, (4, 6)), torch.rand(4, 6) > 0.3
    found, wanted = cross_entropy(logits, targets, mask, smoothing), F.cross_entropy(logits[mask], targets[mask], label_smoothing=smoothing)
    assert found.dtype == dtype
    tolerance = dict(atol=1e-12 if dtype == torch.float64 else 1e-5, rtol=1e-12 if dtype == torch.float64 else 1e-5)
    assert_close(found, wanted, **tolerance)
    assert_close(*(torch.autograd.grad(24 * loss, logits)[0] for loss in (found, wanted)), **tolerance)


def test_no_smoothing_is_the_default():
    logits, targets, mask = torch.randn(2, 3, 5), torch.randint(5, (2, 3)), torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(cross_entropy(logits, targets, mask), cross_entropy(logits, targets, mask, 0.0))
    assert cross_entropy(logits, targets, mask) != cross_entropy(logits, targets, mask, 0.1)


def test_smoothing_by_finite_differences():
    logits, targets, mask = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (2, 3)), lengths(3, 1)
    assert torch.autograd.gradcheck(lambda logits: cross_entropy(logits, targets, mask, 0.3), logits)


def test_smoothing_in_bfloat16():
    "Computed in float32: as if the logits had been upcast."
    logits, targets, mask = (5 * torch.randn(4, 6, 500)).bfloat16().requires_grad_(), torch.randint(500, (4, 6)), lengths(6, 3, 2, 1)
    precise = logits.detach().float().requires_grad_()
    found, wanted = (cross_entropy(x, targets, mask, 0.1) for x in (logits, precise))
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    (found + wanted).backward()
    assert logits.grad.dtype == torch.bfloat16
    assert_close(logits.grad, precise.grad.bfloat16(), atol=0, rtol=0)


def test_smoothing_does_not_depend_on_a_shift():
    "A confident model's logits may all be large; its loss is small and stays exact."
    logits = torch.randint(-40, 40, (4, 6, 11)) / 8  # exact after the shift too
    targets, mask = logits.argmax(-1), torch.ones(4, 6, dtype=torch.bool)
    for smoothing in (0.0, 0.1):
        wanted = cross_entropy(logits, targets, mask, smoothing)
        assert_close(cross_entropy(logits + 16384, targets, mask, smoothing), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_one_class(smoothing):
    "Nothing to be wrong about."
    logits = (100 * torch.randn(2, 3, 1)).requires_grad_()
    loss = cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long), lengths(3, 1), smoothing)
    gradient, = torch.autograd.grad(loss, logits)
    assert loss == 0 and gradient.abs().max() == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("left", [1, 2, 5])
def test_impossible_classes(left, smoothing):
    "Where -inf leaves a few classes, it is the loss of a vocabulary of those few."
    few = (3 * torch.randn(4, 6, left)).requires_grad_()
    places = torch.rand(4, 6, 11).argsort(-1)[..., :left].sort(-1).values
    logits = torch.full((4, 6, 11), -math.inf).scatter(-1, places, few)
    among, mask = torch.randint(left, (4, 6)), lengths(6, 4, 1, 2)
    found = cross_entropy(logits, places.take_along_dim(among[..., None], -1)[..., 0], mask, smoothing)
    gradient, theirs = torch.autograd.grad(found, [few], retain_graph=True), torch.autograd.grad(F.cross_entropy(few[mask], among[mask], label_smoothing=smoothing), [few])
    assert_close(found, F.cross_entropy(few[mask], among[mask], label_smoothing=smoothing), atol=1e-5, rtol=1e-5)
    assert_close(gradient, theirs, atol=1e-6, rtol=1e-5)
    whole = logits.detach().requires_grad_()
    cross_entropy(whole, places.take_along_dim(among[..., None], -1)[..., 0], mask, smoothing).backward()
    assert whole.grad.isfinite().all() and whole.grad[whole == -math.inf].abs().sum() == 0


@pytest.mark.parametrize("filling", [0.0, math.nan, math.inf, -math.inf])
def test_only_padding(filling):
    logits = torch.full((2, 3, 5), filling, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2, 3), -100), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros(2, 3, 5))


@settings(max_examples=30)
@given(st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), st.sampled_from([-100, -1, 10**6]), st.sampled_from([0.0, 0.1]), st.integers(0, 10**6))
def test_junk_at_padding(value, target, smoothing, seed):
    torch.manual_seed(seed)
    logits, targets, mask = torch.randn(3, 4, 7), torch.randint(7, (3, 4)), torch.rand(3, 4) > 0.5
    clean, dirty = logits.clone().requires_grad_(), logits.masked_fill(~mask[..., None], value).requires_grad_()
    losses = cross_entropy(clean, targets, mask, smoothing), cross_entropy(dirty, targets.masked_fill(~mask, target), mask, smoothing)
    assert torch.equal(*losses) and losses[0].isfinite()
    for loss in losses:
        loss.backward()
    assert torch.equal(clean.grad, dirty.grad) and dirty.grad[~mask].abs().sum() == 0


@pytest.mark.parametrize("target", [-100, -1, 7])
def test_a_real_target_outside_the_vocabulary_is_no_padding(target, unchecked):
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        cross_entropy(torch.randn(1, 2, 7), torch.tensor([[3, target]]), torch.ones(1, 2, dtype=torch.bool))


# Decoding with a cache


class Again(NamedTuple):
    "A state that is source and prefix themselves, read anew at every step."

    src: Tensor
    mask: Tensor
    ids: Tensor

    def reorder(self, index):
        return Again(*(x[index] for x in self))


def reading_again(model):
    def step(ids, state):
        seen = torch.cat([state.ids, ids[:, None]], dim=1)
        return model(state.src, seen, state.mask)[:, -1], state._replace(ids=seen)

    return step


def opinionated(**changes):
    "Weights with which no token is simply repeated: the last norm turns what it lets through."
    model = small(**changes)
    disturb(model)
    last = model.decoder.stack.norm if model.config.norm_first else model.decoder.stack.blocks[-1].feed_forward.norm
    nn.init.normal_(last.weight)
    return model


def sources(b=6):
    mask = lengths(*[8, 3, 5, 1, 7, 8][:b])
    return torch.randint(4, 20, mask.shape).where(mask, 0), mask


def begin(b):
    return torch.full((b,), BOS)


@BOTH
def test_step_by_step_is_forward(changes):
    model, (src, mask), tgt = opinionated(**changes), sources(), torch.randint(4, 20, (6, 9))
    for src_mask in (mask, None):
        whole, state = model(src, tgt, src_mask), model.start(src, src_mask)
        assert isinstance(state, State) and isinstance(state, DecoderState)
        for t in range(9):
            logits, state = model.step(tgt[:, t], state)
            close(logits, whole[:, t], f"step {t}")


@BOTH
def test_rows_may_be_exchanged_between_steps(changes):
    model, (src, mask) = opinionated(**changes), sources()
    state, again = model.start(src, mask), Again(src, mask, torch.empty(6, 0, dtype=torch.long))
    slow = reading_again(model)
    for rows in (6, 4, 9, 1, 3):
        ids = torch.randint(4, 20, (len(again.src),))
        (logits, state), (wanted, again) = model.step(ids, state), slow(ids, again)
        close(logits, wanted)
        index = torch.randint(len(ids), (rows,))
        state, again = state.reorder(index), again.reorder(index)


def test_a_reordered_state_leaves_the_old_one_alone():
    model, (src, mask) = opinionated(), sources(2)
    _, state = model.step(begin(2), model.start(src, mask))
    twin = state.reorder(torch.tensor([1, 0]))
    wanted, _ = model.step(torch.tensor([5, 6]), twin.reorder(torch.tensor([1, 0])))
    model.step(torch.tensor([9, 9]), twin)
    close(model.step(torch.tensor([5, 6]), state)[0], wanted)


@BOTH
@pytest.mark.parametrize("beam,alpha", [(3, 0.0), (5, 1.0)])
def test_cached_search_is_reading_again(beam, alpha, changes, monkeypatch):
    "Tokens equal, scores to 1e-5, hypotheses that change their places among them."
    moved, original = [], DecoderState.reorder

    def reorder(self, index):
        moved.append(index.tolist() != list(range(len(index))))
        return original(self, index)

    monkeypatch.setattr(DecoderState, "reorder", reorder)
    lengths, texts = set(), set()
    for seed in range(3):
        torch.manual_seed(seed)
        model, (src, mask) = opinionated(**changes), sources()
        stop = greedy(model.step, model.start(src, mask), begin(6), max_new_tokens=6).ids[seed, -1].item()
        options = dict(max_new_tokens=12, stop_id=stop)
        both = ((model.step, partial(model.start, src, mask)), (reading_again(model), partial(Again, src, mask, torch.empty(6, 0, dtype=torch.long))))
        line, wanted = (greedy(step, state(), begin(6), **options) for step, state in both)
        assert torch.equal(line.ids, wanted.ids) and torch.equal(line.lengths, wanted.lengths)
        close(line.scores, wanted.scores)
        found, wanted = (beam_search(step, state(), begin(6), beam=beam, length_penalty=alpha, **options) for step, state in both)
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.lengths, wanted.lengths)
        close(found.scores, wanted.scores)
        for row in range(6):
            alone = src[row : row + 1, mask[row]]
            one = beam_search(model.step, model.start(alone), begin(1), beam=beam, length_penalty=alpha, **options)
            width = one.ids.shape[-1]
            assert torch.equal(one.ids[0], found.ids[row, :, :width]) and not found.ids[row, :, width:].any()
            close(one.scores[0], found.scores[row])
        lengths |= set(found.lengths.flatten().tolist())
        texts |= {tuple(row.tolist()) for row in found.ids.flatten(0, 1)}
    assert len(lengths) > 2 and len(texts) > 6 and sum(moved) > 9  # none of it was trivial


def test_cached_sampling_is_reading_again():
    model, (src, mask) = opinionated(), sources()
    drawn = [sample(step, state, begin(6), max_new_tokens=10, stop_id=EOS, generator=torch.Generator().manual_seed(1))
             for step, state in ((model.step, model.start(src, mask)), (reading_again(model), Again(src, mask, torch.empty(6, 0, dtype=torch.long))))]
    assert torch.equal(drawn[0].ids, drawn[1].ids)
    close(drawn[0].scores, drawn[1].scores)


def pointers(state):
    return [x.data_ptr() for cache in state.caches for kv in cache for x in (kv.k, kv.v)]


def test_memory_is_allocated_once():
    model, (src, mask) = opinionated(), sources()
    state = model.start(src, mask, max_len=12)
    assert {kv.k.shape[2] for cache in state.caches for kv in cache} == {12, src.shape[1]}
    assert model.start(src, mask).caches[0].own.k.shape[2] == 40
    before = pointers(state)
    assert len(set(before)) == 2 * 2 * 2
    for _ in range(12):
        _, state = model.step(begin(6), state)
        assert pointers(state) == before
    assert not any(kv.k.requires_grad for cache in state.caches for kv in cache)


def test_a_step_costs_no_more_memory_in_a_larger_cache():
    def allocated(room):
        model = small(max_len=room)
        _, state = model.step(begin(6), model.start(*sources(), max_len=room))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
            model.step(begin(6), state)
        return sum(max(0, event.nbytes()) for event in record.profiler.kineto_results.events() if event.name() == "[memory]")

    assert 0 < allocated(20) == allocated(5000)


@pytest.mark.parametrize("search", [greedy, beam_search])
def test_no_room_left(search, unchecked):
    model = opinionated()
    with pytest.raises(ValueError, match="room for 3 positions, 4 are needed.*max_len=4 or more"):
        search(model.step, model.start(*sources(), max_len=3), begin(6), max_new_tokens=4)
    with pytest.raises(ValueError, match="max_len=40"):
        search(model.step, model.start(*sources(), max_len=60), begin(6), max_new_tokens=41)


@pytest.mark.parametrize("cross", [False, True])
def test_a_prompt_goes_in_at_once_or_in_pieces(cross, unchecked):
    stack = Stack(block_config(True, "gelu"), 3, causal=True, cross=cross).eval()
    x, memory, mask = torch.randn(2, 9, 32), torch.randn(2, 5, 32) if cross else None, lengths(5, 2) if cross else None
    with torch.no_grad():
        whole = stack(x, memory=memory, memory_mask=mask)
        for pieces in ([9], [5, 1, 1, 2], [1] * 9):
            caches, start = new_caches(stack.layers, 2, 9, memory), 0
            for size in pieces:
                part = stack(x[:, start : start + size], memory_mask=mask, caches=caches, start=start)
                close(part, whole[:, start : start + size])
                start += size
        with pytest.raises(ValueError, match="room for 8 positions, 9 are needed"):
            stack(x, memory_mask=mask, caches=new_caches(stack.layers, 2, 8, memory))


# The rest of a stack


@pytest.mark.parametrize("norm_first", [False, True])
def test_states_of_all_layers(norm_first):
    "What came in, then what each block gave, the last one after the last norm; `record` sees the same."
    stack, x = Stack(block_config(norm_first, "gelu"), 3), torch.randn(2, 5, 32)
    disturb(stack)
    with record(stack, Block) as given:
        layers = stack(x, all_layers=True)
    assert len(layers) == 4 and layers[0] is x and torch.equal(layers[-1], stack(x))
    for i, found in enumerate(layers[1:]):
        (wanted,) = given[f"blocks.{i}"]
        assert_close(found, stack.norm(wanted) if i == 2 else wanted)


def test_states_of_both_sides():
    model, src, tgt = small(), torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    encoder, decoder = model.states(src, tgt, all_layers=True)
    assert len(encoder) == len(decoder) == 3
    assert_close(model.decoder.logits(decoder[-1]), model(src, tgt))
    assert_close(encoder[-1], model.encode(src)[0])
    assert all(map(torch.equal, model.states(src, tgt), (encoder[-1], decoder[-1])))


@pytest.mark.parametrize("part", ["encoder", "src_embedding", "decoder.stack.blocks.1"])
@BOTH
def test_a_part_starts_anew_as_a_whole_does(part, changes):
    "No parameter keeps what stood there: norms and learned positions too."
    model = small(**changes)
    module = model.get_submodule(part)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(math.nan)
    model.initialise(module)
    fresh = small(**changes).get_submodule(part)
    for (name, p), wanted in zip(module.named_parameters(), fresh.parameters(), strict=True):
        assert p.isfinite().all() and abs(p.std(correction=0) - wanted.std(correction=0)) <= 0.3 * wanted.std(correction=0), name


def test_one_memory_does_not_serve_all_rows(unchecked):
    block = Block(block_config(False, "relu"), cross=True)
    with pytest.raises(ValueError, match="rows=2 and memories=1 must be equal: give each row its own"):
        block(torch.zeros(2, 5, 32), memory=torch.zeros(1, 3, 32))


def test_waves_of_a_model_on_meta_that_takes_the_files_tensors():
    whole = small()
    with torch.device("meta"):
        model = Transformer(whole.config)
    model.load_state_dict(whole.state_dict(), assign=True)
    reset_buffers(model)
    src, tgt = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert torch.equal(model.eval()(src, tgt), whole(src, tgt))


def test_maps_of_a_shared_block():
    stack, x = Stack(block_config(True, "gelu"), 3, shared=True), torch.randn(2, 5, 32)
    with attention_maps(stack) as maps:
        stack(x)
    assert list(maps) == ["blocks.0.attention.layer" + again for again in ("", "#2", "#3")]
    assert not torch.equal(*[*maps.values()][:2])


def test_one_block_many_times():
    "ALBERT's sharing: the parameters of one block, the outputs of a stack whose blocks are equal, a cache for each layer."
    config, x = block_config(True, "gelu"), torch.randn(2, 5, 32)
    shared, plain = Stack(config, 3, causal=True, shared=True).eval(), Stack(config, 3, causal=True).eval()
    disturb(shared)
    for block in plain.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    plain.norm.load_state_dict(shared.norm.state_dict())
    assert sum(p.numel() for p in shared.blocks.parameters()) * 3 == sum(p.numel() for p in plain.blocks.parameters())
    assert_close(shared(x), plain(x))
    with torch.no_grad():
        caches = new_caches(shared.layers, 2, 5)
        steps = [shared(x[:, t : t + 1], caches=caches, start=t) for t in range(5)]
    assert_close(torch.cat(steps, 1), plain(x))


def test_checkpointing_changes_memory_alone():
    "Same values, same gradients, dropout included; what is kept for the backward pass is the blocks' inputs."
    stack, x = Stack(block_config(True, "gelu", dropout=0.3), 6, causal=True).train(), torch.randn(4, 32, 32, requires_grad=True)
    found, kept = [], []
    for stack.checkpoint in (False, True):
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t.numel()) or t, lambda t: t):
            torch.manual_seed(0)
            output = stack(x)
        kept.append(sum(held))
        found.append([output, *torch.autograd.grad(output.square().sum(), [x, *stack.parameters()])])
    for plain, again in zip(*found):
        assert_close(again, plain, atol=0, rtol=0)
    assert kept[1] < kept[0] / 5


def test_values_for_waves_that_were_built_without():
    "On the meta device, then given memory, then weights: the sinusoids are in no file, and are there all the same."
    whole = small()
    with torch.device("meta"):
        model = Transformer(whole.config)
    model.to_empty(device="cpu")
    model.src_embedding.positions.table.fill_(math.nan)
    model.load_state_dict(whole.state_dict())
    reset_buffers(model)
    src, tgt = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert torch.equal(model.eval()(src, tgt), whole(src, tgt))


@BOTH
@pytest.mark.parametrize("rule", [{}, dict(beam=3), dict(temperature=1.0, top_k=5)], ids=str)
def test_generate_is_decoding(rule, changes):
    "New tokens only, as `decoding`'s functions write them from [BOS] on; ended rows are filled with the padding."
    model, (src, mask) = opinionated(**changes), sources()
    draw = lambda: torch.Generator().manual_seed(1)
    options = dict(max_new_tokens=12, stop_id=EOS)
    found = model.generate(src, 12, **rule, mask=mask, **dict(generator=draw()) if "temperature" in rule else {})
    if "beam" in rule:
        best = beam_search(model.step, model.start(src, mask), begin(6), beam=3, **options)
        wanted = best.ids[:, 0, : found.shape[1]]
        assert not best.ids[:, 0, found.shape[1] :].any()
    elif rule:
        wanted = sample(model.step, model.start(src, mask), begin(6), **options, **rule, generator=draw()).ids
    else:
        wanted = greedy(model.step, model.start(src, mask), begin(6), **options).ids
    assert torch.equal(found, wanted)


# Initialisation


@BOTH
def test_initialisation(changes):
    "Glorot's uniform distribution for each linear map by itself: a fused matrix is several."
    torch.manual_seed(1)
    config = TransformerConfig(**SMALL | changes | dict(d_model=64, d_ff=160, src_vocab_size=2000, tgt_vocab_size=2000, max_len=300))
    model, seen = Transformer(config), set()
    for name, p in model.named_parameters():
        kind = name.split(".")[-2]
        seen.add(kind)
        if kind in ("tokens", "positions"):
            assert abs(p.std() * 8 - 1) < 0.03 and abs(p.mean()) < 0.01 and p.abs().max() > 3 / 8
        elif name.endswith("bias"):
            assert p.abs().max() == 0, name
        elif kind == "norm":
            assert (p == 1).all()
        else:
            parts = {"query_key_value": 3, "key_value": 2, "up": 1 + config.gated}.get(kind, 1)
            for part in p.chunk(parts):
                bound = math.sqrt(6 / sum(part.shape))
                assert 0.99 * bound < part.abs().max() <= bound, name
                assert abs(part.std() * math.sqrt(3) / bound - 1) < 0.04 and abs(part.mean()) < 0.05 * bound, name
    assert seen == {"tokens", "query_key_value", "query", "key_value", "out", "up", "down", "norm"} | ({"positions"} if config.positions == "learned" else set())
    first, second = (Transformer(config).encoder.blocks[0].attention.layer.query_key_value.weight for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(*first.chunk(3)[:2])


def test_weights_are_tied():
    "Section 3.4: one matrix for the output layer and the decoder's embedding, and with a shared vocabulary for the encoder's too."
    model, shared = small(), small(tgt_vocab_size=20, shared_vocab=True)
    x = torch.randn(2, 3, 32)
    assert_close(model.decoder.embedding.logits(x), x @ model.decoder.embedding.tokens.weight.T)
    names = [name for name, _ in model.named_parameters() if "tokens" in name]
    assert names == ["src_embedding.tokens.weight", "decoder.embedding.tokens.weight"]
    assert [name for name, _ in shared.named_parameters() if "tokens" in name] == names[:1]
    assert shared.src_embedding.tokens.weight is shared.decoder.embedding.tokens.weight


# Errors


@pytest.mark.parametrize("changes,words", [
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("d_model", "n_heads", "d_ff", "n_layers", "max_len", "src_vocab_size", "tgt_vocab_size") for value in (0, -1)),
    (dict(d_head=0), ["d_head=0"]),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(d_model=15, n_heads=3), ["15", "even"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(dropout=-0.1), ["dropout=-0.1"]),
    (dict(eps=-1e-5), ["eps=-1e-05"]),
    (dict(norm="batch"), ["norm='batch'", "layer", "rms"]),
    (dict(activation="swish"), ["activation='swish'", "relu", "gelu", "gelu_tanh"]),
    (dict(positions="rotary"), ["positions='rotary'", "sinusoidal", "learned", "none"]),
    (dict(shared_vocab=True), ["shared_vocab", "20", "23"]),
    (dict(pad_id=-1), ["pad_id=-1"]),
    (dict(pad_id=20), ["pad_id=20", "20"]),
    (dict(pad_id=21, src_vocab_size=23, tgt_vocab_size=20), ["pad_id=21", "20"]),
], ids=lambda value: ",".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else "")
def test_bad_settings(changes, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=says(*words)):
        small(**changes)


def test_positions_of_an_unknown_kind(unchecked):
    with pytest.raises(ValueError, match=says("'rotary'", "sinusoidal", "learned", "none")):
        Positions("rotary", 5, 4)
    with pytest.raises(ValueError, match=says("5", "even")):
        sinusoidal_positions(3, 5)


def ids(*shape):
    return torch.full(shape, 5)


def whole(src=None, tgt=None, src_mask=None, **changes):
    return small(**changes)(ids(2, 5) if src is None else src, ids(2, 6) if tgt is None else tgt, src_mask)


def stepped(ids):
    model = small()
    return model.step(ids, model.start(torch.full((2, 5), 5)))


def blocks(**settings):
    return Block(block_config(False, "relu"), **settings)


def loss(logits=(2, 3, 7), targets=(2, 3), mask=(2, 3), smoothing=0.1, mask_type=torch.bool, target_type=torch.long):
    return cross_entropy(torch.zeros(logits), torch.zeros(targets, dtype=target_type), torch.ones(mask, dtype=mask_type), smoothing)


@pytest.mark.parametrize("call,words", [
    # lengths
    (lambda: whole(src=ids(2, 41)), ["41", "max_len=40"]),
    (lambda: whole(tgt=ids(2, 41)), ["41", "max_len=40"]),
    (lambda: whole(src=ids(2, 41), positions="none"), ["41", "max_len=40"]),
    (lambda: small().start(ids(2, 41)), ["41", "max_len=40"]),
    (lambda: small().start(ids(2, 5), max_len=0), ["max_len=0"]),
    (lambda: small().start(ids(2, 5), max_len=-3), ["max_len=-3"]),
    # ids
    (lambda: whole(src=ids(2, 5) + 15), ["src", "20"]),
    (lambda: whole(tgt=ids(2, 6) + 18), ["tgt", "23"]),
    (lambda: whole(src=ids(2, 5) - 6), ["src", "-1", "20"]),
    (lambda: whole(tgt=ids(2, 6) - 6), ["tgt", "-1", "23"]),
    (lambda: stepped(torch.tensor([5, 23])), ["ids", "23"]),
    (lambda: whole(src=ids(2, 5).float()), ["src", "float32"]),
    (lambda: whole(tgt=ids(2, 6).float()), ["tgt", "float32"]),
    (lambda: stepped(torch.tensor([5.0, 5.0])), ["ids", "float32"]),
    # shapes
    (lambda: whole(src=ids(5)), ["src", "(5,)"]),
    (lambda: whole(tgt=ids(6)), ["tgt", "(6,)"]),
    (lambda: whole(src=ids(2, 5, 1)), ["src", "(2, 5, 1)"]),
    (lambda: whole(src=ids(0, 5), tgt=ids(0, 6)), ["src", "(0, 5)"]),
    (lambda: whole(src=ids(2, 0)), ["src", "(2, 0)"]),
    (lambda: whole(tgt=ids(2, 0)), ["tgt", "(2, 0)"]),
    (lambda: whole(tgt=ids(3, 6)), ["tgt", "(3, 6)", "2"]),
    (lambda: whole(tgt=ids(1, 6)), ["tgt", "(1, 6)", "2"]),
    (lambda: small().start(ids(0, 5)), ["src", "(0, 5)"]),
    (lambda: stepped(ids(2, 1)), ["ids", "(2, 1)"]),
    (lambda: stepped(ids(1)), ["ids", "(1,)", "2"]),
    (lambda: stepped(ids(3)), ["ids", "(3,)", "2"]),
    # masks
    (lambda: whole(src_mask=torch.ones(2, 5)), ["mask", "float32", "bool"]),
    (lambda: whole(src_mask=torch.ones(2, 5, dtype=torch.long)), ["mask", "int64", "bool"]),
    (lambda: whole(src_mask=torch.ones(2, 4, dtype=torch.bool)), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: whole(src_mask=torch.ones(5, dtype=torch.bool)), ["mask", "(5,)", "(2, 5)"]),
    (lambda: whole(tgt=ids(2, 5), src_mask=torch.ones(2, 5, 5, dtype=torch.bool)), ["mask", "(2, 5, 5)", "(2, 5)"]),
    (lambda: small().start(ids(2, 5), torch.ones(2, 4, dtype=torch.bool)), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: blocks()(torch.zeros(2, 5, 32), mask=torch.ones(2, 5)), ["mask", "float32", "bool"]),
    (lambda: blocks(cross=True)(torch.zeros(2, 5, 32), memory=torch.zeros(2, 3, 32), memory_mask=torch.ones(2, 3)), ["mask", "float32", "bool"]),
    # blocks
    (lambda: blocks()(torch.zeros(2, 5, 32), memory=torch.zeros(2, 3, 32)), ["memory", "cross=True"]),
    (lambda: blocks(cross=True)(torch.zeros(2, 5, 32)), ["memory"]),
    (lambda: blocks()(torch.zeros(2, 5, 32), memory_mask=torch.ones(2, 3, dtype=torch.bool)), ["memory_mask", "cross=True"]),
    (lambda: (stack := Stack(block_config(False, "relu"), 2, causal=True))(torch.zeros(2, 5, 32), caches=new_caches(stack.layers, 2, 9)[:1]), ["caches", "2", "1"]),
    (lambda: new_caches([blocks(cross=True)], 2, 9), ["memory"]),
    (lambda: new_caches([blocks()], 2, 9, torch.zeros(2, 3, 32)), ["memory", "cross=True"]),
    (lambda: blocks(causal=True)(torch.zeros(2, 5, 32), start=3), ["start=3", "cache"]),
    (lambda: blocks(causal=True)(torch.zeros(2, 5, 32), cache=new_caches([blocks(causal=True)], 2, 4)[0]), ["4", "5", "max_len=5"]),
    (lambda: BlockConfig(d_model=10, n_heads=4, d_ff=8) and Block(BlockConfig(d_model=10, n_heads=4, d_ff=8)), ["d_model=10", "n_heads=4", "d_head"]),
    (lambda: Stack(block_config(False, "relu"), 0), ["n_layers=0"]),
    # the loss
    (lambda: loss(smoothing=-0.1), ["smoothing=-0.1"]),
    (lambda: loss(smoothing=1.1), ["smoothing=1.1"]),
    (lambda: loss(mask_type=torch.float32), ["mask", "float32"]),
    (lambda: loss(mask_type=torch.long), ["mask", "int64"]),
    (lambda: loss(target_type=torch.float32), ["targets", "float32"]),
    (lambda: loss(targets=(2, 4)), ["targets", "(2, 4)", "(2, 3"]),
    (lambda: loss(targets=(2, 1)), ["targets", "(2, 1)", "(2, 3"]),
    (lambda: loss(mask=(2, 1)), ["mask", "(2, 1)", "(2, 3"]),
    (lambda: loss(logits=(6, 7)), ["logits", "(6, 7)"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_calls(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=says(*words)):
        call()


def test_settings_are_fixed_once_made():
    config = TransformerConfig(**SMALL)
    with pytest.raises(AttributeError):
        config.d_model = 64
    assert replace(config, d_model=64).d_model == 64
    with pytest.raises(ValueError, match="d_ff=0"):
        replace(config, d_ff=0)
