"Adapting: peft with the same weights (outputs, losses, gradients, files), closed forms, printed sizes; and what must not matter."

import copy
import json

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn

import test_invariants
from messages import refused, says
from parity import Calls, close, lengths, loud
from annotated_nlp import adapting
from annotated_nlp.adapting import LoRA, adapters, bitfit, detach, freeze, lora, loras
from annotated_nlp.adapting import matrices, merge, prefixes, prompts, side_by_side
from annotated_nlp.adapting import trainable
from annotated_nlp.attention import SelfAttention, attention_maps
from annotated_nlp.bert import Bert, BertConfig, BertForSequenceClassification
from annotated_nlp.bert_family import Albert, AlbertConfig
from annotated_nlp.compressing import quantize
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.hub.adapters import ADAPTER, ADAPTER_CONFIG, load_adapter
from annotated_nlp.hub.adapters import save_adapter
from annotated_nlp.t5 import T5, T5Config

unchecked = test_invariants.unchecked
V, D, H, LAYERS, N = 40, 24, 3, 2, 7
SIZES = dict(vocab_size=V, d_model=D, n_heads=H, n_layers=LAYERS, max_len=32, dropout=0.0)
REAL = lengths(7, 4, 6)
BASE = "base_model.model."


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def bert(**changes):
    return loud(BertForSequenceClassification(BertConfig(**SIZES | dict(d_ff=48, n_classes=3) | changes)))


def gpt(**changes):
    return loud(GPT(GPTConfig(**SIZES | changes)))


def t5():
    return loud(T5(T5Config(vocab_size=V, d_model=D, n_heads=H, d_head=8, d_ff=48, n_layers=LAYERS, dropout=0.0)))


def ids(rows=3, n=N):
    return torch.randint(5, V, (rows, n))


def shake(model):
    "What was added begins at zero in part: give it values that matter."
    for p in trainable(model).values():
        nn.init.normal_(p, std=0.2)
    return model


def theirs_of(model, folder, kind):
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, attn_implementation="sdpa").eval()


def wrapped_by_peft(model, **settings):
    "peft's own model around a copy of `model`, its LoRA at values that matter."
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(lora_dropout=0.0, **settings)).eval()
    for name, p in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.2)
    return theirs


def same_with_gradients(ours, theirs, outputs, pairs, labels):
    "Loss and gradients; `pairs` are (our parameter or a part of it, theirs, a function of our gradient)."
    losses = [F.cross_entropy(output.flatten(0, -2), labels.flatten()) for output in outputs]
    close(*outputs)
    close(*losses)
    for loss in losses:
        loss.backward()
    for name, mine, other in pairs:
        assert other.abs().max() > 1e-6, name
        close(mine, other, 1e-4, name)


# LoRA


@pytest.mark.parametrize("make", [bert, gpt])
def test_lora_of_the_whole_is_pefts(make, tmp_path):
    "peft wraps the book's own model; our function reads what it saved."
    model = make()
    targets = ["query_key_value", "down"]
    theirs = wrapped_by_peft(model, r=4, lora_alpha=6, target_modules=targets)
    theirs.save_pretrained(tmp_path)
    ours = load_adapter(model, tmp_path)
    assert set(loras(ours)) == set(matrices(ours, targets)) and len(loras(ours)) == 2 * LAYERS
    x, there = ids(), dict(theirs.named_parameters())
    outputs = ours(x), theirs(x)
    labels = torch.randint(3, outputs[0].shape[:-1])
    same_with_gradients(ours, theirs, outputs, (), labels)
    for name, own in loras(ours).items():
        for factor in "AB":
            other = there[f"{BASE}{name}.lora_{factor}.default.weight"].grad
            close(getattr(own, f"lora_{factor}").grad[0], other, 1e-4, name)


@pytest.mark.parametrize("kind", ["query and value", "all in transformers"])
def test_lora_of_parts_is_pefts_of_separate_matrices(kind, tmp_path):
    "Query and value of a fused projection, against peft on transformers' BERT, which has them apart; and ours on that BERT."
    model = bert()
    theirs = theirs_of(model, tmp_path / "bert", transformers.BertForSequenceClassification)
    theirs = wrapped_by_peft(theirs, r=2, lora_alpha=5, target_modules=["query", "value"])
    x, there = ids(), dict(theirs.named_parameters())
    factor = lambda layer, part, what: there[f"{BASE}bert.encoder.layer.{layer}.attention.self.{part}.lora_{what}.default.weight"]
    if kind == "query and value":
        ours = lora(model, 2, alpha=5)
        for name, own in loras(ours).items():
            layer = name.split(".")[3]
            for what in "AB":
                both = torch.stack([factor(layer, part, what) for part in ("query", "value")])
                getattr(own, f"lora_{what}").data.copy_(both.detach())
        out = ours(x, mask=REAL)
    else:
        theirs.save_pretrained(tmp_path / "adapter")
        bare = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "bert", attn_implementation="sdpa").eval()
        ours = load_adapter(bare, tmp_path / "adapter")
        out = ours(x, attention_mask=REAL.long()).logits
    outputs = out, theirs(x, attention_mask=REAL.long()).logits
    same_with_gradients(ours, theirs, outputs, (), torch.tensor([0, 2, 1]))
    for name, own in loras(ours).items():
        layer = name.split(".")[3]
        for what in "AB":
            grad = getattr(own, f"lora_{what}").grad
            for i, part in enumerate(["query", "value"] if len(grad) == 2 else [name.rpartition(".")[2]]):
                close(grad[i], factor(layer, part, what).grad, 1e-4, name)


@pytest.mark.parametrize("targets", [("query", "value"), ("key", "up"), ("query_key_value", "out"), ("classifier", "attention.layer.out")])
def test_merged_is_unmerged(targets):
    model, x = bert(), ids()
    before = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    shake(lora(model, 3, alpha=2, targets=targets))
    wanted = model(x, mask=REAL)
    assert not torch.allclose(wanted, before(x, mask=REAL), atol=1e-2)
    merged = merge(copy.deepcopy(model))
    close(merged(x, mask=REAL), wanted)
    assert type(merged.classifier) is nn.Linear and names == [name for name, _ in merged.named_parameters()]
    for name, p in before.named_parameters():
        rank = torch.linalg.matrix_rank((merged.get_parameter(name) - p).double(), rtol=1e-5) if p.ndim == 2 else 0
        changed = not torch.equal(merged.get_parameter(name), p)
        assert changed == (name.removesuffix(".weight") in loras(model)) and rank in (0, 3, 6), name


def test_key_stays_as_it_was():
    model = bert()
    before = copy.deepcopy(model.state_dict())
    merge(shake(lora(model, 2)))
    for name in matrices(model, ["query"]):
        was, now = before[f"{name}.weight"], model.state_dict()[f"{name}.weight"]
        assert torch.equal(was[D : 2 * D], now[D : 2 * D])
        assert not torch.isclose(was[:D], now[:D]).all() and not torch.isclose(was[2 * D :], now[2 * D :]).all()


def test_detached_leaves_the_trunk():
    model, x = bert(), ids()
    before, names = model(x), [name for name, _ in model.named_parameters()]
    shake(lora(model, 2))
    task = detach(model)
    assert torch.equal(model(x), before) and names == [name for name, _ in model.named_parameters()]
    assert all(isinstance(one, LoRA) for one in task.values())


@pytest.mark.parametrize("make", [bert, gpt])
def test_side_by_side_is_one_after_the_other(make):
    "Three tasks in one batch: every row as from the model with its own LoRA merged; gradients reach each task alone."
    model, x = make(), ids(5)
    rows = torch.tensor([2, 0, 1, 0, 2])
    tasks, wanted = [], []
    for _ in range(3):
        shake(lora(model, 2, alpha=3, targets=("query", "value", "up")))
        wanted.append(merge(copy.deepcopy(model))(x))
        tasks.append(detach(model))
    with side_by_side(model, tasks, rows):
        found = model(x)
    for i, task in enumerate(rows):
        close(found[i], wanted[task][i])
    found[1].sum().backward()
    given = [sum(p.grad.abs().sum() for one in task.values() for p in one.parameters()) for task in tasks]
    assert given[0] > 0 and given[1] == given[2] == 0
    assert torch.equal(model(x), make_again(model)(x)), "the hooks are gone"


def make_again(model):
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    return again


# Files


@pytest.mark.parametrize("targets", [("query", "value"), ("query_key_value", "up")])
def test_peft_reads_our_file(targets, tmp_path):
    model, x = bert(), ids()
    trunk = copy.deepcopy(model)
    shake(lora(model, 2, alpha=3, targets=targets, keep=["classifier"]))
    wanted = model(x, mask=REAL)
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(trunk), tmp_path).eval()
    close(theirs(x, mask=REAL), wanted)
    ours = load_adapter(copy.deepcopy(trunk), tmp_path)
    assert torch.equal(ours(x, mask=REAL), wanted)
    found = {name: p.shape for name, p in trainable(ours).items()}
    assert found == {name: p.shape for name, p in trainable(model).items()}
    kept = load_file(tmp_path / ADAPTER)
    assert {f"{BASE}classifier.weight", f"{BASE}classifier.bias"} <= set(kept)


def test_the_file_is_small(tmp_path):
    "The book's BERT: LoRA of rank 2 in a few kB."
    model = Bert.from_pretrained("annotated-nlp/reviews-bert", pooler=False)
    save_adapter(lora(model, 2), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000 < sum(4 * p.numel() for p in model.parameters()) / 100


def test_another_trunk_is_refused(tmp_path, unchecked):
    save_adapter(lora(bert(), 2, keep=["classifier"]), tmp_path)
    name = "trunk.stack.blocks.0.attention.layer.query_key_value"
    cases = {
        name: bert(),  # of the same shape, with other weights
        "(96, 32) here and was (72, 24)": bert(d_model=32, n_heads=4),
        "blocks.1.attention.layer.query_key_value is no linear layer": bert(n_layers=1),
        "GPT": gpt(),
        "classifier.bias is (5,) here and was (3,)": bert(n_classes=5),
    }
    for words, model in cases.items():
        before = [name for name, _ in model.named_parameters()]
        with pytest.raises(ValueError, match=says(words, "made for another model", or_else="Give")):
            load_adapter(model, tmp_path)
        assert before == [name for name, _ in model.named_parameters()], "left as it was"


def test_the_trunk_is_known_in_half_precision(tmp_path):
    model = bert()
    half = copy.deepcopy(model).bfloat16()
    save_adapter(shake(lora(model, 2)), tmp_path)
    x = ids()
    close(load_adapter(half, tmp_path)(x).float(), model(x), 0.05)


def changed(folder, **options):
    save_adapter(lora(bert(), 2), folder)
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return load_adapter(bert(), folder)


@pytest.mark.parametrize("options", [dict(peft_type="IA3"), dict(use_dora=True), dict(init_lora_weights="pissa"), dict(init_lora_weights="olora"), dict(layer_replication=[[0, 1]]), dict(bias="all")])
def test_other_kinds_are_refused(options, tmp_path, unchecked):
    with pytest.raises(ValueError, match=says(*options)):
        changed(tmp_path, **options)


def test_not_an_adapter(tmp_path):
    with pytest.raises(FileNotFoundError, match=ADAPTER_CONFIG):
        load_adapter(bert(), tmp_path)


# Prompts and prefixes


@pytest.mark.parametrize("mask", [None, REAL])
def test_prompt_is_pefts_on_bert(mask, tmp_path):
    model, n, x = bert(), 5, ids()
    theirs = theirs_of(model, tmp_path, transformers.BertForSequenceClassification)
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=n, num_layers=LAYERS, token_dim=D, num_attention_heads=H)
    theirs = peft.get_peft_model(theirs, config).eval()
    ours = shake(prompts(model, n))
    own = theirs.prompt_encoder["default"].embedding.weight
    own.data.copy_(ours.prompt.vectors.detach())
    given = {} if mask is None else dict(attention_mask=mask.long())
    segments = torch.randint(2, x.shape)
    outputs = ours(x, segments, mask=mask), theirs(input_ids=x, token_type_ids=segments, **given).logits
    same_with_gradients(ours, theirs, outputs, (), torch.tensor([0, 2, 1]))
    close(ours.prompt.vectors.grad, own.grad, 1e-4)
    assert list(trainable(ours)) == ["prompt.vectors"]


def test_prompt_is_pefts_on_gpt(tmp_path):
    model, n, x = gpt(), 4, ids()
    theirs = theirs_of(model, tmp_path, transformers.GPT2LMHeadModel)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=n)
    theirs = peft.get_peft_model(theirs, config).eval()
    ours = shake(prompts(model, n))
    own = theirs.prompt_encoder["default"].embedding.weight
    own.data.copy_(ours.prompt.vectors.detach())
    outputs = ours(x), theirs(input_ids=x).logits
    assert outputs[0].shape == (3, n + N, V)
    same_with_gradients(ours, theirs, outputs, (), torch.randint(V, (3, n + N)))
    close(ours.prompt.vectors.grad, own.grad, 1e-4)


def test_prompt_on_another_library(tmp_path):
    "The same function on transformers' BERT gives what it gives on ours."
    model, x = bert(), ids()
    theirs = theirs_of(model, tmp_path, transformers.BertForSequenceClassification)
    ours, theirs = prompts(model, 3), prompts(theirs, 3)
    theirs.prompt.vectors.data.copy_(ours.prompt.vectors)
    close(ours(x, mask=REAL), theirs(x, attention_mask=REAL.long()).logits)
    for module in (ours, copy.deepcopy(ours)):
        assert module.prompt.looked_up is None
    twin = copy.deepcopy(ours)
    nn.init.zeros_(twin.prompt.vectors)
    assert not torch.allclose(twin(x), ours(x)), "a copy reads its own prompt"


def test_prompt_of_tokens_is_those_tokens():
    "Vectors of known pieces: as if they were written in front. A T5's prompt stands before its source alone."
    model, x = gpt(), ids()
    wanted = model(torch.cat([torch.tensor([[7, 9]] * 3), x], 1))
    prompts(model, 2).prompt.vectors.data.copy_(model.embedding.tokens.weight[[7, 9]])
    close(model(x), wanted)
    model, tgt = t5(), ids(n=N)
    wide = torch.cat([torch.tensor([[7, 9]] * 3), x], 1)
    wanted = model(wide, tgt, src_mask=F.pad(REAL, (2, 0), value=True))
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    prompts(model, 2).prompt.vectors.data.copy_(embedding.weight[[7, 9]])
    close(model(x, tgt, src_mask=REAL), wanted)


def into_prefix(model, rows):
    "Our prefixes as peft has them: n (l 2 h k), keys before values."
    found = [m for m in model.modules() if isinstance(m, adapting.Prefix)]
    pick = (lambda p: p.grad) if rows == "grad" else (lambda p: p.detach())
    return torch.cat([pick(x).transpose(0, 1).flatten(1) for one in found for x in (one.keys, one.values)], 1)


def shifted(table, n):
    "transformers lets a text begin at position n behind a prefix, ours doesn't: move its table."
    table.data = torch.cat([torch.zeros_like(table[:n]), table[:-n]])


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_prefix_is_pefts(kind, tmp_path):
    n, x = 4, ids()
    model = bert() if kind == "bert" else gpt()
    auto = transformers.BertForSequenceClassification if kind == "bert" else transformers.GPT2LMHeadModel
    theirs = theirs_of(model, tmp_path, auto)
    table = theirs.bert.embeddings.position_embeddings if kind == "bert" else theirs.transformer.wpe
    shifted(table.weight, n)
    task = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    config = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=n, num_layers=LAYERS, token_dim=D, num_attention_heads=H)
    theirs = peft.get_peft_model(theirs, config).eval()
    ours = shake(prefixes(model, n))
    own = theirs.prompt_encoder["default"].embedding.weight
    own.data.copy_(into_prefix(ours, "data"))
    mask = dict(mask=REAL) if kind == "bert" else {}
    there = dict(attention_mask=REAL.long()) if kind == "bert" else {}
    outputs = ours(x, **mask), theirs(input_ids=x, **there).logits
    same_with_gradients(ours, theirs, outputs, (), torch.randint(3, outputs[0].shape[:-1]))
    close(into_prefix(ours, "grad"), own.grad, 1e-4)


def test_prefix_acts_in_every_path(unchecked):
    "Maps of the weights by hand, a cache, and T5's bias: all read the prefix."
    model, x = shake(prefixes(gpt(), 3)), ids()
    with attention_maps(model) as maps:
        by_hand = model(x)
    close(by_hand, model(x))
    assert {weights.shape[-1] for weights in maps.values()} == {3 + N}
    text = x
    for _ in range(4):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(x, 4), text[:, N:])
    model, tgt = t5(), ids(n=5)
    before = model(x, tgt, src_mask=REAL)
    shake(prefixes(model, 3))
    after = model(x, tgt, src_mask=REAL)
    assert after.shape == before.shape and not torch.allclose(after, before, atol=1e-3)
    padded = x.masked_fill(~REAL, 1)
    close(model(padded, tgt, src_mask=REAL), after)


def test_prefix_by_the_closed_form():
    "Keys of zero have the score 0 for every query: with values of zero, all is scaled by Z / (Z + n)."
    attention, x, n = SelfAttention(D, H).eval(), torch.randn(2, N, D), 5
    attention.out = nn.Identity()
    before = attention(x)
    q, k, _ = attention.split(attention.query_key_value(x))
    z = torch.einsum("b h n k, b h m k -> b h n m", q, k).div(8**0.5).exp().sum(-1)
    attention.out = nn.Linear(D, D)
    prefixes(attention, n)
    attention.out = nn.Identity()
    for p in attention.prefix.parameters():
        nn.init.zeros_(p)
    share = (z / (z + n)).transpose(1, 2).repeat_interleave(8, dim=-1)
    close(attention(x), before * share)


# Adapters and biases


def test_adapters_begin_at_nothing_and_are_houlsbys():
    model, x, width = bert(), ids(), 5
    before = model(x, mask=REAL)
    adapters(model, width)
    close(model(x, mask=REAL), before)
    count = 2 * width * D + D + width  # section 2.1: 2md + d + m
    norms = sum(p.numel() for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    assert sum(p.numel() for p in trainable(model).values()) == 2 * LAYERS * count + norms
    shake(model)
    block = model.trunk.stack.blocks[0].feed_forward
    h = torch.randn(1, 2, D)
    y = block.layer.up(h)
    y = F.linear(block.layer.activation(y), block.layer.down.weight, block.layer.down.bias)
    own = block.layer.down.adapter
    by_hand = y + F.linear(F.gelu(F.linear(y, own.down.weight, own.down.bias)), own.up.weight, own.up.bias)
    close(block.layer(h), by_hand)
    close(copy.deepcopy(model)(x), model(x))


def test_adapters_of_bert_large_have_the_printed_share():
    "Houlsby et al. 2019, table 1: adapters of 64 train 2.1 % of BERT-large."
    with torch.device("meta"):
        model = Bert(BertConfig.large())
        whole = sum(p.numel() for p in model.parameters())
        trained = trainable(adapters(model, 64))
    assert sum(p.numel() for p in trained.values()) / whole == pytest.approx(0.021, abs=0.002)


@pytest.mark.parametrize("size,share", [("base", 0.0009), ("large", 0.0008)])
def test_biases_of_bert_have_the_printed_share(size, share):
    "Ben Zaken et al. 2022, section 1 and table 1: 0.09 % of BERT-base, 0.08 % of BERT-large."
    with torch.device("meta"):
        model = Bert(getattr(BertConfig, size)())
    trained = trainable(bitfit(model))
    assert all(name.endswith("bias") for name in trained)
    found = sum(p.numel() for p in trained.values()) / sum(p.numel() for p in model.parameters())
    assert found == pytest.approx(share, abs=0.00005)


def test_lora_of_gpt3_has_the_printed_size():
    "Hu et al. 2022, section 4.2 and table 4: GPT-3 with r = 4 in query and value has 18.9 M; 4.7 M with r = 1."
    with torch.device("meta"):
        config = GPTConfig.gpt3("175B", n_layers=2)
        for rank, millions in ((1, 4.7), (4, 18.9)):
            count = sum(p.numel() for p in trainable(lora(GPT(config), rank)).values())
            assert count * 96 / 2 / 1e6 == pytest.approx(millions, abs=0.05)


# What all have in common

METHODS = {
    "lora": lambda model, **more: lora(model, 2, **more),
    "adapters": lambda model, **more: adapters(model, 3, **more),
    "bitfit": bitfit,
    "prompts": lambda model, **more: prompts(model, 2, **more),
    "prefixes": lambda model, **more: prefixes(model, 2, **more),
    "freeze": freeze,
}
NAMES = {"lora": "lora_", "adapters": ("adapter.", "norm."), "bitfit": "bias", "prompts": "prompt.", "prefixes": "prefix."}


@pytest.mark.parametrize("name", METHODS)
def test_only_the_named_learn(name):
    "Gradients stand at what the method names and at the head, everywhere else there are none, and an update leaves the trunk."
    model, x = bert(), ids()
    before = copy.deepcopy(dict(model.named_parameters()))
    assert METHODS[name](model, keep=["classifier"]) is model
    chosen = trainable(model)
    words = NAMES.get(name, "none of them")
    words = (words,) if isinstance(words, str) else words
    assert all(any(word in key for word in (*words, "classifier.")) for key in chosen)
    for p in chosen.values():  # B and `up` begin at zero and would hide the others' gradients
        p.data.add_(0.05 * torch.randn_like(p))
    F.cross_entropy(model(x, mask=REAL), torch.tensor([0, 2, 1])).backward()
    for key, p in model.named_parameters():
        assert (p.grad is not None) == (key in chosen), key
        if key in chosen and not key.endswith("query_key_value.bias"):
            assert p.grad.abs().max() > 0, key
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for key, p in model.named_parameters():
        if key in before and key not in chosen:
            assert torch.equal(p, before[key]), key


@pytest.mark.parametrize("name", METHODS)
def test_padding_does_not_matter(name):
    model, x = bert(), ids()
    METHODS[name](model)
    shake(model)
    other = x.masked_fill(~REAL, 3)
    close(model(x, mask=REAL), model(other, mask=REAL))
    close(model(x[1:2, :4]), model(x, mask=REAL)[1:2])


@pytest.mark.parametrize("name", METHODS)
def test_a_call_makes_no_tensor_of_numbers(name):
    "On a GPU each tensor that is made of Python's numbers is copied there, and the copy makes the program wait."
    model, x = bert(), ids()
    with Calls() as plain:
        model(x, mask=REAL)
    METHODS[name](model)
    with Calls() as changed:
        model(x, mask=REAL)
    assert changed.names.count("aten::lift_fresh") == plain.names.count("aten::lift_fresh")


def test_a_shared_block_is_changed_once():
    model = Albert(AlbertConfig(**SIZES | dict(d_ff=48, d_embedding=8))).eval()
    assert len(loras(shake(lora(model, 2)))) == 1
    x = ids()
    close(merge(copy.deepcopy(model))(x), model(x))


refused_calls = refused(
    [
        (lambda: lora(bert(), 0), ["rank=0"]),
        (lambda: lora(bert(), 99), ["rank=99", "24 x 24"]),
        (lambda: lora(bert(), 2, alpha=-1), ["alpha=-1"]),
        (lambda: lora(bert(), 2, alpha=0), ["alpha=0"]),
        (lambda: lora(bert(), 2, targets=["nothing"]), ["'nothing'", "query_key_value"]),
        (lambda: lora(bert(), 2, targets=["norm"]), ["LayerNorm", "nn.Linear"]),
        (lambda: lora(bert(), 2, keep=["head"]), ["'head'", "classifier"]),
        (lambda: lora(lora(bert(), 2), 2), ["LoRA already", "take it off"]),
        (lambda: merge(bert()), ["no LoRA", "lora(model"]),
        (lambda: adapters(bert(), 0), ["width=0"]),
        (lambda: adapters(adapters(bert(), 2), 2), ["Adapter already"]),
        (lambda: bitfit(nn.Linear(2, 2, bias=False)), ["no biases"]),
        (lambda: prefixes(nn.Linear(2, 2), 2), ["no SelfAttention", "peft"]),
        (lambda: prefixes(prefixes(bert(), 2), 2), ["Prefix already"]),
        (lambda: prompts(nn.Linear(2, 2), 2), ["no nn.Embedding"]),
        (lambda: prompts(prompts(bert(), 2), 2), ["Prompt already"]),
        (lambda: prompts(bert(), 999), ["n=999", "different tokens"]),
        (lambda: prompts(gpt(), 2).generate(ids(), 2), ["generate", "prefixes"]),
        (lambda: prompts(gpt(), 30)(ids()), ["37", "32"]),
        (lambda: served([1, 2], [0, 1, 0]), ["tasks differ", "rank"]),
        (lambda: served([2, 2], [0, 2, 0]), ["task 2 of 2"]),
        (lambda: served([2, 2], [0, 1]), ["2 entries", "3", "rows"]),
    ],
    or_else="call|build|take|use|stands|longer|at most",
)


@pytest.mark.parametrize("call", [
    lambda model: lora(model, 99), lambda model: lora(model, 2, keep=["head"]), lambda model: adapters(model, 0),
    lambda model: adapters(model, 2, targets=["norm"]), lambda model: prompts(model, 999), lambda model: prefixes(model, 0),
])
def test_a_refused_call_leaves_the_model_alone(call, unchecked):
    model = bert()
    before, names = {*trainable(model)}, [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError):
        call(model)
    assert {*trainable(model)} == before and [name for name, _ in model.named_modules()] == names
    assert not any(module._forward_hooks for module in model.modules())


def served(ranks, rows):
    model = bert()
    tasks = [detach(lora(model, rank)) for rank in ranks]
    with side_by_side(model, tasks, torch.tensor(rows)):
        model(ids())


test_refused_calls = refused_calls


@pytest.mark.parametrize("bits", [2, 4])
def test_lora_on_a_compressed_model(bits, tmp_path):
    "Outputs and gradients are those of LoRA on an ordinary model whose weights are the rounded ones (QLoRA: Dettmers et al. 2023)."
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=37, d_model=32, n_heads=4, n_layers=2, max_len=16, dropout=0.0)
    packed = quantize(loud(GPT(config)), bits, leave=["embedding"])
    plain = GPT(config).eval()
    dense = {name: layer.matrix.dense() for name, layer in packed.named_modules() if hasattr(layer, "matrix")}
    rest = {name: x for name, x in packed.state_dict().items() if ".matrix." not in name}
    plain.load_state_dict(rest | {f"{name}.weight": x for name, x in dense.items()})
    both = []
    for model in (packed, plain):
        torch.manual_seed(1)
        lora(model, 2, targets=["query", "value", "up"])
        for change in loras(model).values():
            nn.init.normal_(change.lora_B)
        ids = torch.arange(22).remainder(37).view(2, 11)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        both.append((loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (loss, grads), (wanted, their_grads) = both
    close(loss, wanted)
    assert grads.keys() == their_grads.keys() and len(grads) == 8
    for name, gradient in grads.items():
        close(gradient, their_grads[name], 1e-4, name)
    with pytest.raises(ValueError, match=says("query_key_value", "compressed", "merge before")):
        merge(packed)
    assert len(loras(packed)) == 4  # it is as it was
    expected = packed(ids)
    save_adapter(packed, tmp_path)
    detach(packed)
    close(load_adapter(packed, tmp_path)(ids), expected)
