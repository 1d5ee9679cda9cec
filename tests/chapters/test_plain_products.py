"""What tools do to `nn.Linear` they do to the book's models: adapters, quantization, pruning, tracing, export, compiling.

Each tool finds every layer, and what it makes gives the outputs that the untouched model says it should.
"""

import copy
from collections import Counter
from typing import NamedTuple

import peft
import pytest
import test_invariants
import torch
import torch.nn.functional as F
from test_invariants import MODELS, Case, inputs, loud, made
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from annotated_nlp.bert import BertConfig, BertForPreTraining
from annotated_nlp.bert import BertForSequenceClassification
from annotated_nlp.parts import fast
from parity import close

unchecked = test_invariants.unchecked  # as a user has the package
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning", "ignore::torch.jit.TracerWarning")


def bert_(head):
    sizes = dict(vocab_size=20, d_model=32, n_heads=4, d_ff=48, max_len=24, dropout=0.0)
    return lambda **changes: loud(head(BertConfig(**sizes | changes)))


class Products(NamedTuple):
    "How many `nn.Linear` a model has, and how many products with other weights: a tied embedding's, a convolution's."

    layers: int
    others: int = 0


# One block: self-attention has 2 layers, cross-attention 3, the feed-forward network 2.
ENCODER, DECODER = 2 + 2, 2 + 3 + 2
HEADS = [Case(f"bert-{head.__name__[7:]}", bert_(head), "text")
         for head in (BertForPreTraining, BertForSequenceClassification)]
# DeBERTa's decoder uses a block again, XLNet keeps its matrices head by head, as its files do, and CANINE has three encoders
OTHERS = "seq2seq-lstm", "seq2seq-gru", "seq2seq-attention", "seq2seq-teller", "seq2seq-teller-attention", "awd-lstm", "deberta-decoder", "xlnet", "canine"
CASES = {case.name: case for case in MODELS + HEADS if case.name not in OTHERS}
PRODUCTS = {
    "transformer": Products(ENCODER + DECODER, 1), "transformer-modern": Products(ENCODER + DECODER, 1),
    "t5": Products(ENCODER + DECODER, 1), "t5-1.1": Products(ENCODER + DECODER + 1),
    "gpt1": Products(ENCODER, 1), "gpt2": Products(ENCODER, 1),
    "bert": Products(ENCODER + 1, 1), "electra-generator": Products(ENCODER + 2, 1), "electra": Products(ENCODER + 3),
    "roberta": Products(ENCODER + 1, 1), "albert": Products(ENCODER + 2, 1),
    "deberta": Products(ENCODER + 2 + 1, 1),  # two for distances
    "captioner": Products(ENCODER + 1 + DECODER, 2),  # one between the two; a patch's and the tied embedding's
    "vit": Products(ENCODER + 1, 1), "deit": Products(ENCODER + 2, 1),
    "bert-PreTraining": Products(ENCODER + 3, 1), "bert-SequenceClassification": Products(ENCODER + 2),
}
# The tables that make a decoder's logits. The others among these products are no decoder's.
TIED = {name: "decoder.embedding" for name in ("transformer", "transformer-modern", "t5", "captioner")}
TIED |= {name: "embedding" for name in ("gpt1", "gpt2")}
over = pytest.mark.parametrize("name", CASES)
BLOCK = {"query_key_value", "query", "key_value", "out", "up", "down"}  # the names of the layers in a block


class Calls(TorchFunctionMode):
    "How often `F.linear` is called."

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is F.linear
        return func(*args, **kwargs or {})


def model_and_inputs(name):
    torch.manual_seed(0)
    model = made(CASES[name], "cpu", n_layers=1)
    return model, inputs(CASES[name], "cpu")


def layers(model, kind=nn.Linear):
    return {name: m for name, m in model.named_modules() if type(m) is kind}


def flat(output):
    "All outputs in one tensor, of models that give a pair too."
    return torch.cat([y.flatten(1) for y in output], 1) if isinstance(output, tuple) else output


def run(model, x):
    return flat(model(**x))


@over
def test_every_product_is_plain(name):
    "`nn.Linear` itself, called once each; `F.linear` on its own only with weights that belong to another module."
    model, x = model_and_inputs(name)
    wanted, called = PRODUCTS[name], Counter()
    for layer in layers(model).values():
        layer.register_forward_hook(lambda layer, *_: called.update([layer]))
    with Calls() as calls:
        run(model, x)
    assert len(layers(model)) == wanted.layers == sum(isinstance(m, nn.Linear) for m in model.modules())
    assert set(called.values()) == {1} and len(called) == wanted.layers
    assert calls.count == sum(wanted)


@over
def test_lora(name):
    "peft finds the layers by name; what it merges is what it computed, which is W + B A alpha / rank."
    model, x = model_and_inputs(name)
    wanted, untouched = run(model, x), copy.deepcopy(model)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=sorted(BLOCK))
    adapted = peft.get_peft_model(model, config).eval()
    targets = [n for n in layers(untouched) if n.rpartition(".")[2] in BLOCK]
    found = {n: m for n, m in adapted.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert sorted(found) == sorted(targets) and len(targets) >= ENCODER
    close(run(adapted, x), wanted)  # B begins with zeros
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets) and all("lora_" in n for n in trained)
    with torch.no_grad():
        for n, m in found.items():
            nn.init.normal_(m.lora_B["default"].weight, std=0.1)
            untouched.get_submodule(n).weight += 2 * m.lora_B["default"].weight @ m.lora_A["default"].weight
    changed = run(adapted, x)
    assert (changed - wanted).abs().max() > 0.01 * wanted.abs().max()
    close(changed, run(untouched, x), 1e-4)
    changed.square().mean().backward()
    assert all((p.grad is not None) == (n in trained) for n, p in adapted.named_parameters())
    merged = adapted.merge_and_unload()
    close(run(merged, x), changed, 1e-4)
    assert len(layers(merged)) == PRODUCTS[name].layers and list(merged.state_dict()) == list(untouched.state_dict())


@over
def test_lora_on_all_linear_layers(name):
    model, x = model_and_inputs(name)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(layers(model))))
    count = sum(isinstance(m, peft.tuners.lora.Linear) for m in adapted.modules())
    assert count == PRODUCTS[name].layers


@over
def test_quantized(name):
    "Every layer by 8 bits: close to what it was, and as far as if each weight had been rounded."
    model, x = model_and_inputs(name)
    wanted = run(model, x)
    quantized = quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert len(layers(quantized, kind)) == PRODUCTS[name].layers and not layers(quantized)
    assert len(layers(model)) == PRODUCTS[name].layers and torch.equal(run(model, x), wanted), "the model is not touched"
    with torch.no_grad():
        for n, m in layers(quantized, kind).items():
            weight = model.get_submodule(n).weight
            step = (weight.max().clamp(min=0) - weight.min().clamp(max=0)) / 255
            assert (m.weight().dequantize() - weight).abs().max() < 1.01 * step, n
        found = run(quantized, x)
    assert found.isfinite().all() and not torch.equal(found, wanted)
    assert F.cosine_similarity(found.flatten(), wanted.flatten(), 0) > 0.99


@over
def test_pruned(name):
    "Masks on every layer, at once and for good: as if the weights had been set to zero by hand."
    model, x = model_and_inputs(name)
    by_hand, before = copy.deepcopy(model), run(model, x)
    prune.global_unstructured([(m, "weight") for m in layers(model).values()], prune.L1Unstructured, amount=0.5)
    assert sum(hasattr(m, "weight_mask") for m in model.modules()) == PRODUCTS[name].layers
    weights = torch.cat([m.weight.detach().flatten() for m in layers(by_hand).values()])
    threshold = weights.abs().median()
    with torch.no_grad():
        for m in layers(by_hand).values():
            m.weight[m.weight.abs() <= threshold] = 0
    wanted = run(by_hand, x)
    assert torch.equal(run(model, x), wanted) and not torch.equal(wanted, before)
    for m in layers(model).values():
        prune.remove(m, "weight")
    assert torch.equal(run(model, x), wanted)


class Flat(nn.Module):
    "A model whose arguments have an order, and whose output is one tensor."

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        return run(self.model, dict(zip(self.names, values)))


def flat_and_inputs(name):
    "With a second batch, of other values and another mask."
    model, x = model_and_inputs(name)
    other = inputs(CASES[name], "cpu", [3, 7, 5, 1])
    return Flat(model, tuple(x)).eval(), tuple(x.values()), tuple(other.values())


@over
def test_traced(name, unchecked):
    "No layer is lost on the way, and no value was taken for a constant: another batch of that size works too."
    model, x, other = flat_and_inputs(name)
    traced = torch.jit.trace(model, x)
    kinds = Counter(node.kind() for node in traced.inlined_graph.nodes())
    assert kinds["aten::linear"] == sum(PRODUCTS[name])
    for batch in (x, other):
        close(traced(*batch), model(*batch))


@over
def test_exported(name, unchecked):
    "With a batch of any size; no layer is lost on the way."
    model, x, other = flat_and_inputs(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, x, dynamic_shapes=(tuple({0: batch} for _ in x),))
    linear = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert len(linear) == sum(PRODUCTS[name])
    for rows in (x, other, tuple(value[:3] for value in other)):
        close(program.module()(*rows), model(*rows))


@over
def test_compiled_in_one_piece(name, unchecked):
    "One graph with every product in it; the same outputs and gradients."
    model, x, other = flat_and_inputs(name)
    graphs = []

    def look(graph, inputs):
        graphs.append(Counter(node.target for node in graph.graph.nodes)[F.linear])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=look)
    for batch in (x, other):
        found, wanted = compiled(*batch), model(*batch)
        close(found, wanted)
        parameters = list(model.parameters())
        gradients = (torch.autograd.grad(y.square().mean(), parameters, allow_unused=True) for y in (found, wanted))
        for one, another in zip(*gradients):
            assert (one is None) == (another is None)
            if one is not None:
                close(one, another, 1e-4)
    assert graphs == [sum(PRODUCTS[name])]
    torch._dynamo.reset()


@over
def test_swapped_and_back(name, monkeypatch):
    "`fast.cpu` finds every layer, whatever its size here; the values stay, and `fast.plain` gives back what was."
    monkeypatch.setattr(fast, "_LARGE", 0)
    model, x = model_and_inputs(name)
    wanted, parameters, found = run(model, x), dict(model.named_parameters()), layers(model)
    logits = {path: model.get_submodule(path).tokens for path in [TIED.get(name)] if path}
    report = fast.cpu(model)
    assert sorted(report.changed) == sorted([*found, *logits]) and not report.left
    assert report.entries == sum(m.weight.numel() for m in (found | logits).values())
    with Calls() as calls:
        close(run(model, x), wanted, 1e-4)
    assert calls.count == PRODUCTS[name].others - len(logits)
    fast.plain(model)
    assert layers(model) == found and all(p is parameters[n] for n, p in model.named_parameters())
    assert torch.equal(run(model, x), wanted)
