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
from transformers.models.t5.modeling_t5 import T5Attention

import messages
import test_invariants
from parity import DEVICES, GPU, close
from twins import ROWS, exact_norm
from twins import translation as batch
from annotated_nlp.attention import attention_maps
from annotated_nlp.decoding import beam_search
from annotated_nlp.t5 import T5, RelativeBias, T5Config, relative_buckets
from annotated_nlp.tasks.tuning import larger_steps

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = ROWS["t5-1.0"].small
VERSIONS, EVERY = pytest.mark.parametrize("version", ["1.0", "1.1"]), pytest.mark.parametrize("odd", ROWS["t5-1.0"].odd)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def theirs_(version, odd=None, std=0.3):
    return ROWS[f"t5-{version}"].model_of_theirs(odd, std)


def twin(theirs, folder):
    return ROWS["t5-1.0"].twin(theirs, folder)


def small(version="1.0", loud=0.3, **changes):
    return ROWS[f"t5-{version}"].alone(loud, **changes)


# Values, losses, gradients


def test_rounding(tmp_path, monkeypatch):
    "Against float64 the gradients of version 1.1 in float32 are as far off as theirs are, not farther; the two share the truth."
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
                    exact_norm(patch)
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


def test_their_start_of_a_new_version(tmp_path):
    "Their 1.1 begins with a head that is the embedding, without scaling, and their file holds one for both."
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=29, decoder_start_token_id=0, **ROWS["t5-1.1"].odd["plain"])).eval()
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


def test_sizes_take_changes():
    assert T5Config.small(n_layers=3).n_decoder_layers == 3 and T5Config.xl("1.1", dropout=0.0).d_ff == 5120
    assert T5Config.small() == T5Config() and replace(T5Config.base(), n_heads=3).n_heads == 3


def test_families():
    "mT5 and ByT5 take changes as the other sizes do, and know no other size."
    assert T5Config.mt5() == T5Config.small("1.1", vocab_size=250_112) and T5Config.mt5("xl", dropout=0.0).n_heads == 32
    assert T5Config.byt5("base").n_decoder_layers == 6 and T5Config.byt5(n_layers=2, n_decoder_layers=1).n_layers == 2
    for make in (T5Config.mt5, T5Config.byt5):
        with pytest.raises(ValueError, match="size='huge'"):
            make("huge")


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


def writer(version, odd=None):
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


test_bad_settings = messages.refused([
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
], lambda changes: T5(T5Config(**SMALL | changes)), or_else="keep", errors=ValueError)


test_bad_calls = messages.refused([
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
    (lambda: written(generator=torch.Generator()), ["generator", "temperature=0"]),
    (lambda: written(beam=2, generator=torch.Generator()), ["generator", "temperature=0"]),
    (lambda: written(temperature=0.5, generator=0), ["generator is int", "Generator"]),
    (lambda: written(beam=0), ["beam"]),
    (lambda: written(temperature=-1.0), ["temperature", "-1"]),
    (lambda: written(stop_id=29), ["stop_id=29", "29"]),
    (lambda: written(stop_id=-2), ["stop_id=-2"]),
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
], or_else="keep")


def test_contradiction_in_a_file(tmp_path, unchecked):
    "A head of its own whose states are scaled is neither version."
    theirs_("1.0").save_pretrained(tmp_path)
    rewrite(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        T5.from_pretrained(tmp_path)


@pytest.mark.gpu
@GPU
@VERSIONS
def test_text_on_a_gpu(version, tmp_path):
    "The CPU's tokens."
    ours = twin(theirs_(version), tmp_path)
    src, mask, *_ = batch(ours.config)
    text = ours.generate(src, 20, mask=mask)
    assert torch.equal(ours.cuda().generate(src.cuda(), 20, mask=mask.cuda()).cpu(), text)


def test_mt5_there_and_back(tmp_path):
    "mT5 is version 1.1 under a model type of its own, which a saved model keeps."
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    theirs = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = T5.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    assert type(again) is transformers.MT5ForConditionalGeneration
    src, tgt = torch.randint(2, 50, (2, 9)), torch.randint(2, 50, (2, 6))
    with torch.no_grad():
        wanted = theirs(input_ids=src, decoder_input_ids=tgt).logits
        close(ours(src, tgt), wanted)
        assert torch.equal(again(input_ids=src, decoder_input_ids=tgt).logits, wanted)
