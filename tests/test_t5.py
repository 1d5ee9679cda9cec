"T5 against `transformers` with the same weights, both versions; corruption against the paper's table, restored on any text; noise by its statistics."

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm

import messages
import test_invariants
from parity import DEVICES, GPU, close, lengths
from annotated_nlp.attention import attention_maps
from annotated_nlp.decoding import beam_search
from annotated_nlp.t5 import (
    T5,
    RelativeBias,
    T5Config,
    larger_steps,
    relative_buckets,
)

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = dict(vocab_size=29, d_model=32, n_heads=4, d_head=8, d_ff=48, n_layers=2, dropout=0.0)
NEW = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
OURS = {"1.0": {}, "1.1": dict(activation="gelu_tanh", gated=True, tied=False)}
ODD = {  # their configurations, each strange in its own way
    "plain": dict(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48),
    "wide heads, one layer": dict(d_model=20, d_kv=9, num_heads=3, num_layers=1, d_ff=90, layer_norm_epsilon=1e-3, relative_attention_num_buckets=7, relative_attention_max_distance=9),
    "narrow heads, a short decoder": dict(d_model=18, d_kv=2, num_heads=5, num_layers=4, num_decoder_layers=1, d_ff=7, relative_attention_num_buckets=4, relative_attention_max_distance=50, pad_token_id=3, eos_token_id=5, decoder_start_token_id=3),
    "heads of one, a long decoder": dict(d_model=6, d_kv=1, num_heads=6, num_layers=1, num_decoder_layers=3, d_ff=24, vocab_size=101, relative_attention_num_buckets=64, relative_attention_max_distance=40),
}
VERSIONS, EVERY = pytest.mark.parametrize("version", OURS), pytest.mark.parametrize("odd", ODD)
LARGE = pytest.mark.parametrize("std", [None, 0.3], ids=["their start", "large weights"])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
PRECISIONS = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def theirs_(version, odd="plain", std=0.3, **changes):
    "A model of `transformers`; no norm stays at one, and a head of its own is one (theirs starts as the embedding)."
    new = NEW if version == "1.1" else {}
    own = dict(vocab_size=29, dropout_rate=0.0, decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**own | ODD[odd] | new | changes)).eval()
    if version == "1.1":
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif std is not None:
                p.copy_(std * torch.randn_like(p))
    return theirs


def twin(theirs, folder, **changes):
    "Ours with the same weights, by way of a folder."
    theirs.save_pretrained(folder)
    return T5.from_pretrained(folder, **changes)


def small(version="1.0", loud=0.3, **changes):
    "Ours alone."
    model = T5(T5Config(**SMALL | OURS[version] | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(loud * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model


def batch(c, m=37, n=23):
    "A source with its mask, labels with -100 behind the text, and what the decoder reads for them."
    mask, tokens = lengths(m, m // 2, 1, m - 2), lengths(n, 4, n - 1, 9)
    labels = torch.randint(c.vocab_size, tokens.shape).masked_fill(~tokens, -100)
    start = c.decoder_start_token_id if hasattr(c, "decoder_start_token_id") else c.pad_id
    tgt = F.pad(labels, (1, -1), value=start)
    return torch.randint(c.vocab_size, mask.shape), mask, tgt.masked_fill(tgt == -100, start), labels, tokens


def same_gradients(ours, theirs, loss, their_loss, tolerance):
    "Of every parameter, by the names of the layout's table; none of theirs is left over."
    gradients = [dict(zip(dict(model.named_parameters()), torch.autograd.grad(100 * x, list(model.parameters())))) for model, x in ((ours, loss), (theirs, their_loss))]
    layout, used, worst = ours._writable()[0], set(), 0.0
    for name, gradient in gradients[0].items():
        parts = layout.place(name).names
        used |= set(parts)
        wanted = torch.cat([gradients[1][part] for part in parts])
        assert wanted.abs().max() > 0, f"{name} has no part in the loss"
        scale = max(1.0, wanted.abs().max().item())
        worst = max(worst, (gradient - wanted).abs().max().item() / scale)
        assert_close(gradient, wanted, atol=tolerance * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert set(gradients[1]) == used
    return worst


# Values, losses, gradients


@PRECISIONS
@LARGE
@EVERY
@VERSIONS
def test_logits_losses_and_gradients(version, odd, std, dtype, tmp_path, record_property, monkeypatch):
    "With padding at both ends, texts longer than the last bucket's beginning, and a row of one token."
    if dtype == torch.float64:  # their norm takes its mean square in float32, whatever it is given
        monkeypatch.setattr(T5LayerNorm, "forward", lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())
    theirs = theirs_(version, odd, std)
    ours = twin(theirs, tmp_path).to(dtype)
    theirs = theirs.to(dtype)
    src, mask, tgt, labels, tokens = batch(theirs.config)
    found, answer = ours(src, tgt, mask), theirs(src, attention_mask=mask.long(), labels=labels)
    close(found[tokens], answer.logits[tokens], TOLERANCE[dtype])
    loss = F.cross_entropy(found.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert_close(loss, answer.loss, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    worst = same_gradients(ours, theirs, loss, answer.loss, 3 * TOLERANCE[dtype])
    record_property("logits", ((found - answer.logits)[tokens].abs().max() / answer.logits.abs().max()).item())
    record_property("loss", (loss - answer.loss).abs().item())
    record_property("gradients", worst)


def test_rounding(tmp_path, monkeypatch):
    "Against float64 the gradients of version 1.1 in float32 are as far off as theirs are, not farther; the two share the truth."
    exact = lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    off = []
    for trial in range(4):
        torch.manual_seed(trial)
        theirs = theirs_("1.1")
        pair = {"ours": twin(theirs, tmp_path / str(trial)), "theirs": theirs}
        src, mask, tgt, labels, _ = batch(theirs.config)
        found = {}
        for dtype in (torch.float32, torch.float64):
            with monkeypatch.context() as patch:
                if dtype == torch.float64:
                    patch.setattr(T5LayerNorm, "forward", exact)
                for who, model in pair.items():
                    model = model.to(dtype)
                    logits = model(src, tgt, mask) if who == "ours" else model(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits
                    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
                    embedding = model.decoder.embedding.tokens if who == "ours" else model.shared
                    found[who, dtype] = torch.autograd.grad(loss, embedding.weight)[0].double()
        close(found["ours", torch.float64], found["theirs", torch.float64], 1e-12)
        truth = found["theirs", torch.float64]
        off.append([(found[who, torch.float32] - truth).abs().max() / truth.abs().max() for who in pair])
    ours, theirs = torch.tensor(off).mean(0).tolist()
    assert ours < 2 * theirs < 1e-3


@pytest.mark.parametrize("n", [1, 2, 130, 300])
@VERSIONS
def test_long_and_short_texts(version, n, tmp_path):
    "No longest text; beyond the greatest distance all share a bucket."
    theirs = theirs_(version)
    ours = twin(theirs, tmp_path)
    src, mask, tgt, _, _ = batch(theirs.config, n + 2, n + 9)
    close(ours(src, tgt, mask), theirs(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits)


@EVERY
@VERSIONS
def test_there_and_back(version, odd, tmp_path):
    "What is saved here has the same bits in `transformers`, and what they save of it has them here."
    theirs = theirs_(version, odd)
    ours = twin(theirs, tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    again, info = type(theirs).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    for first, second in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert first[0] == second[0] and torch.equal(first[1], second[1])
    for option in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate",
                   "layer_norm_epsilon", "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "pad_token_id", "eos_token_id", "decoder_start_token_id", "is_encoder_decoder", "model_type"):
        assert getattr(again.config, option, None) == getattr(theirs.config, option, None), option
    assert (again.lm_head.weight is again.shared.weight) == (version == "1.0")
    src, mask, tgt, _, _ = batch(theirs.config)
    assert torch.equal(again.eval()(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits, theirs(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits)
    back = twin(again, tmp_path / "c")
    assert back.config == ours.config
    for first, second in zip(back.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_made_here(gated, tied, tmp_path):
    "A model that was never theirs, of either version or between them: in shards, from training mode."
    model = small(dropout=0.1, gated=gated, activation="gelu_tanh" if gated else "relu", tied=tied).train()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    src, mask, tgt, _, _ = batch(model.config)
    close(model.eval()(src, tgt, mask), theirs(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits)
    assert T5.from_pretrained(tmp_path).config == model.config


def test_their_start_of_a_new_version(tmp_path):
    "Their 1.1 begins with a head that is the embedding, without scaling, and their file holds one for both."
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=29, decoder_start_token_id=0, **ODD["plain"], **NEW)).eval()
    ours = twin(theirs, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors") and not ours.config.tied
    assert torch.equal(ours.decoder.head.weight, ours.decoder.embedding.tokens.weight) and ours.decoder.head.weight is not ours.decoder.embedding.tokens.weight
    src, mask, tgt, _, _ = batch(theirs.config)
    close(ours(src, tgt, mask), theirs(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits)


def rewrite(folder, tensors=None, drop=(), **options):
    "Their file with other options and tensors."
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in (config | options).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


@VERSIONS
def test_old_files(version, tmp_path):
    "As the hub's first T5s are: the embedding under all its names, a bias that cross-attention never used, few options."
    theirs = theirs_(version)
    ours = twin(theirs, tmp_path)
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(["lm_head.weight"] if version == "1.0" else [])]
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.randn(32, 4)}
    rewrite(tmp_path, lambda x: x | {name: x["shared.weight"].clone() for name in names} | unused,
            drop=("scale_decoder_outputs", "is_gated_act", "dense_act_fn", "num_decoder_layers"), tie_word_embeddings=version == "1.0")
    again = T5.from_pretrained(tmp_path)
    assert again.config == ours.config and all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))
    rewrite(tmp_path, lambda x: {name: value for name, value in x.items() if name != "shared.weight"})
    again = T5.from_pretrained(tmp_path)
    assert torch.equal(again.decoder.embedding.tokens.weight, ours.decoder.embedding.tokens.weight)
    rewrite(tmp_path, lambda x: x | {"decoder.embed_tokens.weight": x["decoder.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="encoder.embed_tokens.weight|decoder.embed_tokens.weight"):
        T5.from_pretrained(tmp_path)


@VERSIONS
def test_bfloat16(version, tmp_path, record_property):
    "To its rounding, of one in 256 a few times over, around their logits in float64."
    theirs = theirs_(version, std=0.1)
    ours = twin(theirs, tmp_path).bfloat16()
    theirs.bfloat16()
    src, mask, tgt, _, tokens = batch(theirs.config)
    found, wanted = ours(src, tgt, mask), theirs.double()(src, attention_mask=mask.long(), decoder_input_ids=tgt).logits
    assert found.dtype == torch.bfloat16
    close(found[tokens].double(), wanted[tokens], 16 / 256)
    record_property("bfloat16", ((found[tokens].double() - wanted[tokens]).abs().max() / wanted.abs().max()).item())
    assert (found.double() - wanted).abs().max() > 0


@VERSIONS
def test_what_is_not_given(version):
    "No mask: `pad_id` is padding. Any integers do."
    model = small(version, pad_id=4)
    src, mask, tgt, _, _ = batch(model.config)
    src = torch.where(src == 4, 5, src).masked_fill(~mask, 4)
    close(model(src, tgt), model(src, tgt, mask).detach(), 1e-6)
    close(model(src.int(), tgt.int()), model(src, tgt).detach(), 1e-6)


# Relative positions


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_buckets,max_distance", [(32, 128), (32, 64), (4, 9), (7, 9), (5, 3), (64, 40), (16, 1000), (33, 128)])
def test_buckets_as_theirs(n_buckets, max_distance, causal):
    offsets = torch.arange(-3000, 3001)
    wanted = T5Attention._relative_position_bucket(offsets, not causal, n_buckets, max_distance)
    for found in (relative_buckets(offsets, n_buckets, max_distance, causal=causal), relative_buckets(offsets.int(), n_buckets, max_distance, causal=causal)):
        assert torch.equal(found.long(), wanted)
    assert wanted.min() >= 0 and wanted.max() < n_buckets


def test_buckets_by_hand():
    "The paper's: 32 buckets to distance 128. One a distance for 7 (15) places, then steps that grow by a factor."
    buckets = relative_buckets(torch.arange(-200, 201))
    assert buckets[200] == 0 and buckets[193:200].tolist() == [7, 6, 5, 4, 3, 2, 1] and buckets[201:208].tolist() == list(range(17, 24))
    edges = [d for d in range(1, 200) if buckets[200 - d] != buckets[201 - d]]
    assert edges == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]  # 8 · 2^(i/2), rounded up
    assert edges[8:] == [math.ceil(8 * 2 ** (i / 2) - 1e-9) for i in range(1, 8)]
    one_sided = relative_buckets(torch.arange(-200, 201), causal=True)
    assert (one_sided[200:] == 0).all() and one_sided[184:200].tolist() == list(range(16, 0, -1)) and one_sided[:73].eq(31).all() and one_sided.unique().numel() == 32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 40, 150])
def test_bias_by_hand(causal, n):
    "One look-up an offset gives what a look-up a pair does; a query further on sees a row of the same."
    bias = RelativeBias(T5Config(**SMALL), causal=causal)
    found = bias.bias(n)
    for i, j in [(i, j) for i in range(0, n, 7) for j in range(0, n, 5)] + [(0, n - 1), (n - 1, 0)]:
        wanted = bias.table.weight[relative_buckets(torch.tensor(j - i), causal=causal)]
        assert torch.equal(found[0, :, i, j], wanted)
    close(bias.line(1 - n, 0)[..., None, :], found[:, :, -1:].detach(), 0)
    assert torch.equal(bias.bias(1, n - 1), found[:, :, -1:])
    for start in {0, n // 2, n - 1}:
        assert torch.equal(bias.bias(n - start, start, bias.prepare(n + 5)), found[:, :, start:])


def test_bias_as_theirs(tmp_path):
    theirs = theirs_("1.0")
    ours = twin(theirs, tmp_path)
    for side, bias in (("encoder", ours.encoder_bias), ("decoder", ours.decoder.relative)):
        wanted = getattr(theirs, side).block[0].layer[0].SelfAttention.compute_bias(60, 60)
        hidden = torch.ones(60, 60, dtype=torch.bool).triu(1) if side == "decoder" else torch.zeros(60, 60, dtype=torch.bool)
        assert torch.equal(bias.bias(60).masked_fill(hidden, -math.inf), wanted.masked_fill(hidden, -math.inf))


def test_weights_as_theirs(tmp_path):
    "Every layer's, by the path that returns them; padding and the future get exactly none."
    theirs = theirs_("1.1")
    ours = twin(theirs, tmp_path)
    src, mask, tgt, _, tokens = batch(theirs.config)
    theirs.set_attn_implementation("eager")
    answer = theirs(src, attention_mask=mask.long(), decoder_input_ids=tgt, output_attentions=True)
    with attention_maps(ours) as maps:
        logits = ours(src, tgt, mask)
    close(logits, ours(src, tgt, mask).detach())
    for layer in range(2):
        for name, wanted in (("encoder.blocks.{}.attention.layer", answer.encoder_attentions), ("decoder.stack.blocks.{}.attention.layer", answer.decoder_attentions), ("decoder.stack.blocks.{}.cross.layer", answer.cross_attentions)):
            found, wanted = maps[name.format(layer)], wanted[layer].detach()
            rows = mask if name.startswith("enc") else tokens
            close(found.movedim(1, 2)[rows], wanted.movedim(1, 2)[rows])
        assert not maps[f"encoder.blocks.{layer}.attention.layer"].movedim(3, 1)[~mask].any() and not maps[f"decoder.stack.blocks.{layer}.attention.layer"].triu(1).any()


def test_bias_is_built_once(monkeypatch):
    "For all layers of a side; a step builds none."
    calls, line = Counter(), RelativeBias.line

    def counted(self, *offsets):
        calls[self.causal] += 1
        return line(self, *offsets)

    monkeypatch.setattr(RelativeBias, "line", counted)
    model = small(n_layers=5)
    src, mask, tgt, _, _ = batch(model.config)
    model(src, tgt, mask)
    assert calls == {False: 1, True: 1}
    model.generate(src, 20)
    assert calls == {False: 2, True: 2}


# Sizes and start

COUNTS = {  # as the papers have them, in millions; 1.1's are of its release
    ("1.0", "small"): 60, ("1.0", "base"): 220, ("1.0", "large"): 770, ("1.0", "xl"): 3000, ("1.0", "xxl"): 11_000,
    ("1.1", "small"): 77, ("1.1", "base"): 250, ("1.1", "large"): 780, ("1.1", "xl"): 3000, ("1.1", "xxl"): 11_000,
}
EXACT = {"small": 60_506_624, "base": 222_903_552, "large": 737_668_096, "xl": 2_851_598_336, "xxl": 11_307_321_344}


@pytest.mark.parametrize("version,size", COUNTS)
def test_sizes(version, size):
    config = getattr(T5Config, size)(version)
    with torch.device("meta"):
        ours = T5(config)
        theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**ours._writable()[1]))
    count = sum(p.numel() for p in ours.parameters())
    own = 0 if version == "1.0" else config.vocab_size * config.d_model  # theirs begins with one matrix for both
    assert count == sum(p.numel() for p in theirs.parameters()) + own
    assert abs(count / 1e6 / COUNTS[version, size] - 1) < 0.06
    assert version == "1.1" or count == EXACT[size]


def test_sizes_take_changes():
    assert T5Config.small(n_layers=3).n_decoder_layers == 3 and T5Config.xl("1.1", dropout=0.0).d_ff == 5120
    assert T5Config.small() == T5Config() and replace(T5Config.base(), n_heads=3).n_heads == 3


@VERSIONS
def test_initialisation_as_theirs(version):
    "The spread of every matrix is that of `transformers`' own start, a head of its own included."
    sizes = dict(d_model=96, d_ff=200, vocab_size=2000)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_heads=5, d_kv=24, num_layers=3, relative_attention_num_buckets=512, relative_attention_max_distance=900, **NEW if version == "1.1" else {}))
    ours = T5(T5Config(**sizes, n_heads=5, d_head=24, n_layers=3, n_buckets=512, max_distance=900, **OURS[version]))
    layout, wanted = ours._writable()[0], dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        parts = ["shared.weight"] if name == "decoder.head.weight" else layout.place(name).names
        for chunk, part in zip(p.chunk(len(parts)), parts, strict=True):
            other = wanted[part]
            assert abs(chunk.std(correction=0) - other.std(correction=0)) <= 0.05 * other.std(correction=0) and abs(chunk.mean() - other.mean()) < 0.04 * max(other.std(correction=0), 1e-9), part


def test_parts_start_anew(tmp_path):
    theirs = theirs_("1.1")
    theirs.save_pretrained(tmp_path)
    ours = T5.from_pretrained(tmp_path, fresh=["decoder.head", "decoder.relative"])
    assert 0.9 < ours.decoder.head.weight.std() < 1.1 and 0.1 < ours.decoder.relative.table.weight.std() < 0.25
    assert torch.equal(ours.decoder.embedding.tokens.weight, theirs.shared.weight)


@VERSIONS
@pytest.mark.parametrize("factor", [8.0, 0.5])
def test_larger_steps(version, factor, tmp_path):
    "Adam's first step is the rate: times the factor for three tensors; gradients by the chain rule; afterwards nothing is left of it, also after an error."
    model = small(version)
    src, mask, tgt, _, _ = batch(model.config)
    loss = lambda: model(src, tgt, mask).square().mean()
    start, wanted = {name: p.detach().clone() for name, p in model.named_parameters()}, loss()
    gradients = dict(zip(start, torch.autograd.grad(loss(), list(model.parameters()))))
    touched = {"decoder.embedding.tokens", "encoder_bias.table", "decoder.relative.table"}
    with larger_steps(model, factor):
        assert_close(loss(), wanted, atol=0, rtol=1e-5)
        names = {name.replace(".parametrizations.weight.original", ".weight") for name, _ in model.named_parameters()}
        assert names == set(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-30)
        loss().backward()
        for part in touched:
            found = model.get_submodule(part).parametrizations.weight.original.grad
            close(found, factor * gradients[f"{part}.weight"], 1e-4)
        optimizer.step()
    assert {name for name, _ in model.named_parameters()} == set(start) and type(model.decoder.embedding.tokens) is torch.nn.Embedding
    for name, p in model.named_parameters():
        moved = (p.detach() - start[name])[gradients[name] != 0].abs()
        step = 1e-4 * (factor if name.removesuffix(".weight") in touched else 1.0)
        assert_close(moved, torch.full_like(moved, step), atol=0.02 * step, rtol=0)
    model.save_pretrained(tmp_path)
    with pytest.raises(KeyError), larger_steps(model):
        raise KeyError
    assert {name for name, _ in model.named_parameters()} == set(start)


# Generation


def writer(version, odd="plain"):
    "A model of theirs that writes more than one token: of 1.0, whose head is the embedding, with small tokens."
    theirs = theirs_(version, odd, 0.3 if version == "1.1" else 0.7)
    with torch.no_grad():
        theirs.shared.weight.mul_(1.0 if version == "1.1" else 0.2)
    return theirs


def generated(theirs, src, new, mask=None, **options):
    mask = torch.ones_like(src) if mask is None else mask.long()
    slow = dict(use_cache=False) if theirs.config.num_decoder_layers != theirs.config.num_layers else {}  # their cache counts the encoder's layers
    return theirs.generate(src, attention_mask=mask, max_new_tokens=new, **dict(do_sample=False) | slow | options)[:, 1:]


def again(model, src, new, mask=None):
    "Greedily, everything read anew for each token."
    tgt = torch.full_like(src[:, :1], model.config.pad_id)
    for _ in range(new):
        tgt = torch.cat([tgt, model(src, tgt, mask)[:, -1:].argmax(-1)], 1)
    return tgt[:, 1:]


@EVERY
@VERSIONS
def test_greedy_as_theirs(version, odd, tmp_path):
    "Token for token, with padding; rows end at different places."
    theirs = writer(version, odd)
    ours, ends = twin(theirs, tmp_path), set()
    src, mask, *_ = batch(theirs.config)
    free = again(ours, src, 20, mask)
    for stop in sorted({*free[:, ::3].flatten().tolist()} - {theirs.config.pad_token_id})[:3]:
        found = ours.generate(src, 20, stop_id=stop, mask=mask)
        wanted = generated(theirs, src, 20, mask, eos_token_id=stop)
        assert torch.equal(found, wanted[:, : found.shape[1]]) and wanted.shape == found.shape
        for row, whole in zip(found.tolist(), free.tolist()):
            end = whole.index(stop) + 1 if stop in whole else 20
            ends.add(end)
            assert row[:end] == whole[: min(end, len(row))] and set(row[end:]) <= {theirs.config.pad_token_id}
    assert torch.equal(ours.generate(src, 20, mask=mask), generated(theirs, src, 20, mask))
    assert len(ends) > 1 and len(set(map(tuple, free.tolist()))) > 2


@VERSIONS
@pytest.mark.parametrize("beam,alpha", [(2, 0.0), (4, 0.0), (4, 1.0)])
def test_beam_search_as_theirs(version, beam, alpha, tmp_path):
    "All hypotheses, and `generate`'s best; theirs fills with the stop token."
    theirs = writer(version)
    ours = twin(theirs, tmp_path)
    src, mask, *_ = batch(theirs.config)
    texts, sizes, first = set(), set(), torch.zeros(4, dtype=torch.long)
    for stop in sorted({*ours.generate(src, 9, mask=mask)[:, 1::2].flatten().tolist()} - {0})[:3]:
        found = beam_search(ours.step, ours.start(src, mask), first, beam=beam, max_new_tokens=12, stop_id=stop, pad_id=stop, length_penalty=alpha)
        options = dict(eos_token_id=stop, pad_token_id=stop, length_penalty=alpha, early_stopping="never", num_beams=beam)
        wanted = generated(theirs, src, 12, mask, num_return_sequences=beam, **options)
        assert torch.equal(found.ids, wanted.unflatten(0, (4, beam)))
        best = ours.generate(src, 12, stop_id=stop, mask=mask, beam=beam, length_penalty=alpha)
        wanted = found.ids[:, 0, : best.shape[1]]
        assert torch.equal(best, torch.where(torch.arange(best.shape[1]) < found.lengths[:, :1], wanted, 0)) and found.lengths[:, 0].max() == best.shape[1]
        texts, sizes = texts | set(map(tuple, found.ids.flatten(0, 1).tolist())), sizes | set(found.lengths.flatten().tolist())
    assert len(texts) > 2 * beam and len(sizes) > 1  # none of it was trivial


@DEVICES
@VERSIONS
def test_steps_are_the_forward_pass(version, device):
    "Logits of every step, over more places than have a bucket of their own."
    model = small(version).to(device).double()
    src, mask, tgt, _, _ = (x.to(device) for x in batch(model.config, 9, 150))
    wanted, state = model(src, tgt, mask), model.start(src, mask, 150)
    for t in range(150):
        logits, state = model.step(tgt[:, t], state)
        close(logits, wanted[:, t].detach(), 1e-10)
    with pytest.raises(ValueError, match="room for 150"):
        model.step(tgt[:, 0], state)


def test_chance():
    "A generator repeats it; the drawing is `decoding.sample`'s; the mode of each part is as before, also after an error."
    model = small().train()
    model.decoder.eval()
    src, mask, *_ = batch(model.config)
    draw = lambda seed, **rule: model.generate(src, 15, 1.0, **rule, mask=mask, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1)[:, :5], draw(2)[:, :5])
    assert torch.equal(draw(1, top_k=1), model.generate(src, 15, mask=mask))
    with pytest.raises(ValueError):
        draw(1, top_k=0)
    assert model.training and not model.decoder.training and model.encoder.training


def test_dropout_acts_where_the_paper_says():
    "At the input and output of each stack, in sublayers and on weights: nothing without it is the same with it."
    model = small(dropout=0.5)
    src, mask, tgt, _, _ = batch(model.config)
    calm = model(src, tgt, mask)
    assert torch.equal(calm, model(src, tgt, mask)) and not torch.equal(calm, model.train()(src, tgt, mask))
    seen = []
    for dropout in (model.decoder.embedding.dropout, model.dropout, model.decoder.dropout):
        dropout.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    model(src, tgt, mask)
    assert [tuple(shape) for shape in seen] == [(4, 37, 32), (4, 37, 32), (4, 23, 32), (4, 23, 32)]


# What a hostile user tries

says = partial(messages.says, or_else="keep")
FLAG = torch.ones(2, 5, dtype=torch.bool)


def ids_(*shape):
    return torch.full(shape, 5)


def whole(src=None, tgt=None, mask=None):
    return small()(ids_(2, 5) if src is None else src, ids_(2, 3) if tgt is None else tgt, mask)


def written(src=None, new=3, **options):
    return small().generate(ids_(2, 5) if src is None else src, new, **options)


def twice_larger():
    model = small()
    with larger_steps(model):
        larger_steps(model).__enter__()


@pytest.mark.parametrize("changes,words", [
    *((dict([(name, 0)]), [f"{name}=0"]) for name in ("vocab_size", "d_model", "d_ff", "n_heads", "d_head", "n_layers", "n_decoder_layers", "n_buckets")),
    (dict(n_buckets=3), ["n_buckets=3", "4"]),
    (dict(max_distance=16), ["max_distance=16", "16"]),
    (dict(pad_id=29), ["pad_id=29", "29"]),
    (dict(eos_id=-1), ["eos_id=-1"]),
    (dict(eos_id=1.5), ["eos_id=1.5"]),
    (dict(max_distance=math.nan), ["max_distance=nan"]),
    (dict(tied="yes"), ["tied='yes'"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(activation="gelu_new"), ["activation='gelu_new'", "gelu_tanh"]),
], ids=lambda value: ",".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else "")
def test_bad_settings(changes, words, unchecked):
    with pytest.raises(ValueError, match=says(*words)):
        T5(T5Config(**SMALL | changes))


@pytest.mark.parametrize("call,words", [
    (lambda: larger_steps(small(), 0.0).__enter__(), ["factor=0.0"]),
    (lambda: larger_steps(small(), math.nan).__enter__(), ["factor=nan"]),
    (lambda: T5Config.small("1.2"), ["version='1.2'", "1.0", "1.1"]),
    # ids and masks
    (lambda: whole(ids_(2, 5) + 24), ["src", "29"]),
    (lambda: whole(ids_(2, 5) - 6), ["src", "-1", "29"]),
    (lambda: whole(ids_(2, 5).float()), ["src", "float32"]),
    (lambda: whole(ids_(5)), ["src", "(5,)"]),
    (lambda: whole(ids_(0, 5)), ["src", "(0, 5)"]),
    (lambda: whole(ids_(2, 0)), ["src", "(2, 0)"]),
    (lambda: whole(tgt=ids_(2, 3) + 24), ["tgt", "29"]),
    (lambda: whole(tgt=ids_(3, 3)), ["tgt", "(3, 3)", "2"]),
    (lambda: whole(tgt=ids_(2, 0)), ["tgt", "(2, 0)"]),
    (lambda: whole(mask=FLAG.long()), ["src_mask", "int64", "bool"]),
    (lambda: whole(mask=FLAG[:, :4]), ["src_mask", "(2, 4)", "(2, 5)"]),
    (lambda: whole(mask=FLAG[:1]), ["src_mask", "(1, 5)"]),
    # writing
    (lambda: written(ids_(2, 5) + 24), ["src", "29"]),
    (lambda: written(new=0), ["max_new_tokens=0"]),
    (lambda: written(new=2.5), ["max_new_tokens=2.5"]),
    (lambda: written(beam=2, temperature=0.5), ["beam=2", "temperature=0.5"]),
    (lambda: written(beam=0), ["beam"]),
    (lambda: written(temperature=-1.0), ["temperature", "-1"]),
    (lambda: written(stop_id=29), ["stop_id=29", "29"]),
    (lambda: written(stop_id=-1), ["stop_id=-1"]),
    (lambda: written(stop_id=1.5), ["stop_id=1.5"]),
    (lambda: written(mask=FLAG.long()), ["src_mask", "int64"]),
    (lambda: small().start(ids_(2, 5), max_len=0), ["max_len=0"]),
    (lambda: small().step(ids_(3), small().start(ids_(2, 5))), ["ids", "(3,)", "2"]),
    (lambda: small().step(ids_(2) + 24, small().start(ids_(2, 5))), ["ids", "29"]),
    # distances
    (lambda: relative_buckets(torch.arange(3), 2), ["n_buckets=2", "4"]),
    (lambda: relative_buckets(torch.arange(3), 1, causal=True), ["n_buckets=1", "2"]),
    (lambda: relative_buckets(torch.arange(3), 32, 8), ["max_distance=8", "8"]),
    (lambda: twice_larger(), ["larger steps already"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_calls(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=says(*words)):
        call()


@pytest.mark.parametrize("changes,word", [
    (dict(norm="layer"), "norm='layer'"), (dict(bias=True, norm="layer"), "bias=True"), (dict(scale=0.5), "scale=0.5"), (dict(norm_first=False), "norm_first=False"), (dict(activation="gelu"), "activation='gelu'"), (dict(activation="gelu_tanh"), "activation='gelu_tanh'"), (dict(gated=True), "gated=True"),
], ids=str)
def test_what_their_files_cannot_say(changes, word, tmp_path, unchecked):
    "It is named, and nothing is written."
    with pytest.raises(ValueError, match=says(word)):
        small(**changes).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option,value", [("feed_forward_proj", "gated-silu"), ("feed_forward_proj", "gelu"), ("is_encoder_decoder", False), ("decoder_start_token_id", 7), ("num_layers", "two")])
@VERSIONS
def test_what_our_model_cannot_do(version, option, value, tmp_path, unchecked):
    "Their file asks for what ours can't compute: option and value are named."
    theirs_(version).save_pretrained(tmp_path)
    rewrite(tmp_path, **{option: value})
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        T5.from_pretrained(tmp_path)


def test_contradiction_in_a_file(tmp_path, unchecked):
    "A head of its own whose states are scaled is neither version."
    theirs_("1.0").save_pretrained(tmp_path)
    rewrite(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        T5.from_pretrained(tmp_path)


@pytest.mark.gpu
@GPU
@VERSIONS
def test_on_a_gpu(version, tmp_path):
    "The CPU's logits to float32's rounding, bfloat16 to its own; the same tokens."
    ours = twin(theirs_(version), tmp_path)
    src, mask, tgt, _, tokens = batch(ours.config)
    wanted, text = ours(src, tgt, mask)[tokens].detach(), ours.generate(src, 20, mask=mask)
    assert torch.equal(ours.cuda().generate(src.cuda(), 20, mask=mask.cuda()).cpu(), text)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 16 / 256)):
        found = ours.to("cuda", dtype)(src.cuda(), tgt.cuda(), mask.cuda())
        close(found.float().cpu()[tokens], wanted, tolerance)


