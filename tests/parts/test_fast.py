"The product by oneDNN against PyTorch's own, in every use that a model makes of it."

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.testing import assert_close

import test_invariants
from annotated_nlp.parts import fast
from annotated_nlp.parts.fast import _BOTH, _LARGE, Linear, affine
from messages import says
from parity import GPU, Calls, close

unchecked = test_invariants.unchecked  # as a user has the package, which torch.compile needs too
D, E = 512, 1024  # large enough for oneDNN
pytestmark = pytest.mark.skipif(not _BOTH, reason="PyTorch was built without MKL or without oneDNN")


class Special(torch.Tensor):
    "As quantization makes of weights."


def by_onednn(call) -> bool:
    with Calls() as calls:
        call()
    return bool({"annotated_nlp::linear", "mkldnn::_linear_pointwise"} & set(calls.names))


def tensors(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(*shape, D, dtype=dtype)
    return [t.requires_grad_() for t in (x, torch.randn(E, D, dtype=dtype) / D**0.5, torch.randn(E, dtype=dtype))]


LAYOUTS = {
    "one vector": lambda x: x[0, 0], "one row": lambda x: x[:1, 0], "rows": lambda x: x[0], "batch": lambda x: x,
    "a place of each row": lambda x: x[:, 1], "four axes": lambda x: x[:, :, None],
    "transposed": lambda x: x.mT.contiguous().mT, "repeated": lambda x: x[:1].expand(3, -1, -1),
    "every other": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_like_pytorch(layout, bias):
    "Values and all gradients in float32, and no further from the truth than PyTorch's own."
    x, weight, b = tensors(3, 5)
    b = b if bias else None
    inputs = [t for t in (x, weight, b) if t is not None]

    def run(product, *inputs):
        x, weight, b = (*inputs, None)[:3]
        y = product(LAYOUTS[layout](x), weight, b)
        return [y, *torch.autograd.grad(y.square().sum() + y.sum(), inputs)]

    assert by_onednn(lambda: run(affine, *inputs))
    found, theirs = run(affine, *inputs), run(F.linear, *inputs)
    truth = run(F.linear, *(t.double() for t in inputs))
    for ours, other, true in zip(found, theirs, truth):
        assert ours.shape == other.shape
        assert_close(ours, other, rtol=1e-4, atol=1e-5 * true.abs().max().item())
        assert (ours - true).abs().max() <= 3 * (other - true).abs().max() + 1e-6 * true.abs().max()


def test_gradient_of_a_sum_and_of_a_part():
    "Gradients that are one number read many times, and weights or inputs that take none."
    x, weight, b = tensors(2, 5)
    for wanted in ([x], [weight], [b], [x, b]):
        found, theirs = (torch.autograd.grad(f(x, weight, b).sum(), wanted) for f in (affine, F.linear))
        assert_close(found, theirs, rtol=1e-4, atol=1e-4)


def test_gradient_of_a_gradient():
    def twice(product):
        x, weight, b = tensors(4)
        (slope,) = torch.autograd.grad(product(x, weight, b).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, weight, b))

    for ours, theirs in zip(twice(affine), twice(F.linear)):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_compiled(unchecked):
    from annotated_nlp.parts.fast import affine

    def loss(product, x, weight, b):
        return product(x, weight, b).relu().sum()

    inputs = tensors(2, 5)
    found = torch.autograd.grad(torch.compile(lambda *a: loss(affine, *a), fullgraph=True)(*inputs), inputs)
    assert_close(found, torch.autograd.grad(loss(F.linear, *inputs), inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(off, unchecked):
    "oneDNN's operation alone, with the same result; ours where a compiler needs to know it."
    from annotated_nlp.parts.fast import affine

    inputs = [t.detach() for t in tensors(2, 5)]
    wanted = affine(*tensors(2, 5)).detach()
    with off(), Calls() as calls:
        assert torch.equal(affine(*inputs), wanted)
    assert "mkldnn::_linear_pointwise" in calls.names and "annotated_nlp::linear" not in calls.names
    with off():
        assert torch.equal(torch.compile(lambda *a: affine(*a), fullgraph=True)(*inputs), wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape, size", [((D,), E), ((1, D), E), ((1, 1, D), E), ((1, 96), 33), ((1, 3, D), E), ((1, 3, 96), 33)])
def test_compiled_for_a_single_row(shape, size, bias, unchecked):
    "A loop instead of a product, whatever the size of the matrix; two rows and more go the ways that they go otherwise."
    from annotated_nlp.parts.fast import affine

    torch.manual_seed(0)
    x, weight, b = torch.randn(shape), torch.randn(size, shape[-1]), torch.randn(size) if bias else None
    made = {}

    def look(graph, inputs):
        made[torch.is_grad_enabled()] = " ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    for gradients in (False, True):
        torch._dynamo.reset()
        with torch.set_grad_enabled(gradients):
            found = torch.compile(affine, fullgraph=True, backend=look)(x, weight, b)
        assert_close(found, F.linear(x, weight, b), rtol=1e-4, atol=1e-4)
    one = x.numel() == shape[-1]
    assert ("method mv" in made[False]) == one and "method mv" not in made[True]
    assert ("linear" in made[False]) != one  # PyTorch's or ours, which is named like it


@pytest.mark.parametrize("off", [torch.enable_grad, torch.no_grad])
def test_forward_derivative(off):
    x, weight, b = tensors(2, 5)
    direction = torch.randn(2, 5, D)
    with off(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(affine(forward_ad.make_dual(x, direction), weight, b)).tangent
    assert_close(found, F.linear(direction, weight), rtol=1e-4, atol=1e-4)


def test_function_transforms():
    x, weight, b = tensors(4)
    gradient = torch.func.grad(lambda w, x: affine(x, w, b).square().sum())
    wanted = torch.func.grad(lambda w, x: F.linear(x, w, b).square().sum())
    assert_close(gradient(weight, x), wanted(weight, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["small", "float64", "bfloat16", "no rows", "meta", "autocast", "switched off", "a tensor of a special kind"])
def test_left_to_pytorch(name):
    x, weight, b = (t.detach() for t in tensors(3))
    contexts = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16),
                "switched off": lambda: torch.backends.mkldnn.flags(enabled=False)}
    inputs = {
        "small": (x[:, :8], weight[:, :8], b), "float64": (x.double(), weight.double(), b.double()),
        "bfloat16": (x.bfloat16(), weight.bfloat16(), b.bfloat16()), "no rows": (x[:0], weight, b),
        "meta": (x.to("meta"), weight.to("meta"), b.to("meta")),
        "a tensor of a special kind": (x, weight.as_subclass(Special), b),
    }.get(name, (x, weight, b))
    with contexts.get(name, torch.no_grad)():
        assert not by_onednn(lambda: affine(*inputs))
        if name != "meta":
            assert torch.equal(affine(*inputs), F.linear(*inputs))
        assert affine(*inputs).shape == (len(inputs[0]), E)


def test_exports_without_our_operation():
    program = torch.export.export(Linear(D, E), (torch.randn(2, D),))
    assert "annotated_nlp" not in str(program.graph)


@pytest.mark.parametrize("x", [torch.randn(2, D - 1), torch.randn(2, D).double(), torch.randn(D, 2)])
def test_refuses_what_pytorch_refuses(x, unchecked):
    layer = Linear(D, E)
    with pytest.raises(RuntimeError) as ours:
        layer(x)
    with pytest.raises(RuntimeError) as theirs:
        F.linear(x, layer.weight, layer.bias)
    assert str(ours.value) == str(theirs.value)


STRANGE = {
    "bias of float64": (3, (E, D), torch.ones(E).double()), "bias too short": (3, (E, D), torch.ones(E - 1)),
    "bias too long": (3, (E, D), torch.ones(E + 1)), "bias of two axes": (3, (E, D), torch.randn(1, E)),
    "one number": (3, (E, D), torch.tensor(2.0)), "one number in a row": (3, (E, D), torch.tensor([2.0])),
    "weight of one axis": (3, (E * D,), None), "weight of three axes": (3, (2, E, D), None),
    "x of no axis": (None, (E, D), None),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("case", STRANGE)
def test_strange_arguments_are_pytorchs(case, gradients, unchecked):
    "oneDNN takes some of them for others, up to reading beyond their end."
    from annotated_nlp.parts.fast import affine

    rows, shape, bias = STRANGE[case]
    torch.manual_seed(0)
    weight = torch.randn(shape)
    x = torch.tensor(1.0) if rows is None else torch.randn(rows, shape[-1])

    def outcome(product):
        try:
            with torch.set_grad_enabled(gradients):
                return product(x, weight, bias)
        except (RuntimeError, IndexError) as error:
            return str(error)

    ours, theirs = outcome(affine), outcome(F.linear)
    assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("gradients", [True, False])
def test_arguments_that_lie_otherwise_in_memory(gradients):
    torch.manual_seed(0)
    x, wide = torch.randn(3, D), torch.randn(2 * E, D)
    with torch.set_grad_enabled(gradients):
        for weight in (torch.randn(D, E).t(), wide[::2], wide[E:]):
            for bias in (torch.randn(2 * E)[::2], torch.ones(1).expand(E)):
                assert_close(affine(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_is_a_linear_layer():
    "The same weights from the same seed, under the same names; it is copied and saved like PyTorch's."
    assert E * D >= _LARGE
    torch.manual_seed(1)
    ours = Linear(D, E)
    torch.manual_seed(1)
    theirs = nn.Linear(D, E)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.save(ours, buffer := io.BytesIO())
    buffer.seek(0)
    x = torch.randn(3, D)
    for other in copy.deepcopy(ours), torch.load(buffer, weights_only=False):
        assert torch.equal(other(x), ours(x))


@GPU
@pytest.mark.gpu
def test_on_a_gpu_pytorchs_own():
    layer = Linear(D, E).cuda()
    x = torch.randn(3, D, device="cuda")
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_counted():
    "PyTorch's counter of operations sees it as it sees its own."
    from torch.utils.flop_counter import FlopCounterMode

    def count(product):
        x, weight, b = tensors(2, 5)
        with FlopCounterMode(display=False) as counter:
            product(x, weight, b).sum().backward()
        return counter.get_total_flops()

    def count_forward(product):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            product(*tensors(2, 5))
        return counter.get_total_flops()

    assert count(affine) == count(F.linear) == 3 * 2 * 10 * D * E
    assert count_forward(affine) == count_forward(F.linear) == 2 * 10 * D * E


def test_pytorch_without_onednn():
    "As on a Mac: the package can be imported, and all is left to PyTorch."
    code = """
import torch

del torch.ops.mkldnn._linear_pointwise  # PyTorch has looked it up already
space = type(torch.ops.mkldnn)
found = space.__getattr__

def without(self, name):
    if name == "_linear_pointwise":
        raise AttributeError(name)
    return found(self, name)

space.__getattr__ = without
from annotated_nlp.parts.fast import _BOTH, _PRODUCT, affine
x, weight = torch.randn(2, 512), torch.randn(1024, 512)
print(_BOTH, _PRODUCT, torch.equal(affine(x, weight), torch.nn.functional.linear(x, weight)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False None True", done.stderr


def test_defined_twice():
    "As when a reader runs the page's cells again, or runs them after importing the package."
    code = "import runpy; import annotated_nlp.parts.fast; again = runpy.run_module('annotated_nlp.parts.fast'); " \
           "import torch; print(again['affine'](torch.ones(2, 512), torch.ones(1024, 512)).unique().tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[512.0]", done.stderr


# In a model


class Net(nn.Module):
    "Two layers for oneDNN, one of them without a bias and one used twice; one that is too small."

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, E), nn.Linear(E, D, bias=False)
        self.small, self.norm = nn.Linear(D, 8), nn.LayerNorm(D)
        self.again = self.up

    def forward(self, x):
        return self.small(self.norm(x + self.down(self.again(x).relu())))


def test_swapped_and_back():
    "The same values, and on the way back the same objects: nothing but the class has changed."
    torch.manual_seed(0)
    net, x, seen = Net(), torch.randn(3, D), []
    net.up.register_forward_hook(lambda layer, inputs, output: seen.append(type(layer)))
    before = {name: (dict(vars(m)), type(m)) for name, m in net.named_modules()}
    weights, wanted = dict(net.named_parameters()), net(x)
    assert not by_onednn(lambda: net(x))
    report = fast.cpu(net)
    assert report == (("up", "down", "small"), 2 * D * E + 8 * D, {})
    assert repr(report) == "3 changed, with 1,052,672 entries"
    with Calls() as calls:
        assert_close(net(x), wanted, rtol=1e-4, atol=1e-4)
    assert calls.names.count("annotated_nlp::linear") == 2 and seen[-1] is Linear
    assert all(isinstance(m, nn.Linear) for m in (net.up, net.down))
    assert fast.plain(net) == report
    assert {name: (dict(vars(m)), type(m)) for name, m in net.named_modules()} == before
    found = dict(net.named_parameters())
    assert list(found) == list(weights) and all(found[name] is weights[name] for name in weights)
    assert torch.equal(net(x), wanted) and seen[-1] is nn.Linear and not by_onednn(lambda: net(x))


def test_logits_that_are_products_with_the_tokens():
    "Swapped and back: values, gradients and names stay. A table that was quantized is left."
    from annotated_nlp.compressing import quantize
    from annotated_nlp.gpt import GPT, GPTConfig
    from annotated_nlp.parts.embedding import Embedding

    torch.manual_seed(0)
    make = lambda: GPT(GPTConfig(vocab_size=2**13, max_len=8, d_model=64, n_heads=2, n_layers=1)).eval()
    model, ids = make(), torch.randint(2**13, (2, 5))
    wanted, state = model(ids), list(model.state_dict())
    report = fast.cpu(model)
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert report.changed == ("embedding", *layers) and not report.left
    assert report.entries == 2**19 + sum(model.get_submodule(name).weight.numel() for name in layers)
    with Calls() as calls:
        found = model(ids)
    assert calls.names.count("annotated_nlp::linear") == 1
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(y.sum(), model.embedding.tokens.weight)[0] for y in (found, wanted)]
    assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == state
    assert fast.plain(model) == report and type(model.embedding) is Embedding
    assert torch.equal(model(ids), wanted)
    rounded = quantize(make(), 8)
    assert fast.cpu(rounded).left["embedding"] == "annotated_nlp.parts.compact.CompactEmbedding is another class"


def test_swapped_twice_and_undone_twice():
    net = Net()
    fast.cpu(net)
    again = fast.cpu(net)
    assert not again.changed and again.left["up"] == "annotated_nlp.parts.fast.Linear is another class"
    assert fast.plain(net).changed and fast.plain(net) == ((), 0, {})


def test_a_swapped_model_is_copied_saved_and_loaded():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, D)
    names = list(net.state_dict())
    fast.cpu(net)
    assert list(net.state_dict()) == names
    torch.save(net, buffer := io.BytesIO())
    buffer.seek(0)
    for other in copy.deepcopy(net), torch.load(buffer, weights_only=False):
        assert type(other.up) is Linear and other.again is other.up and torch.equal(other(x), net(x))
        assert fast.plain(other).changed == ("up", "down", "small")
    fresh = Net()
    fresh.load_state_dict(net.state_dict())
    assert_close(fresh(x), net(x), rtol=1e-4, atol=1e-4)


def test_an_optimizer_goes_on():
    "Made before the swap, it moves the weights as it would have, and with it undone too."

    def trained(swap):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(8, D)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for step in range(6):
            if swap and step in (2, 4):
                (fast.cpu if step == 2 else fast.plain)(net)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        return net(x)

    assert_close(trained(True), trained(False), rtol=1e-3, atol=1e-4)


def quantized(layer):
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(layer))[0]


def with_lora(layer):
    import peft

    return peft.get_peft_model(nn.Sequential(layer), peft.LoraConfig(target_modules=["0"])).base_model.model[0]


def replaced(layer):
    layer.forward = lambda x: x
    return layer


class Own(nn.Linear):
    pass


PLAIN = "its weight or bias isn't a plain parameter"
KEPT = {
    "a subclass": (lambda layer: Own(D, E), "test_fast.Own is another class"),
    "pruned": (lambda layer: prune.random_unstructured(layer, "weight", 0.5), PLAIN),
    "with a pruned bias": (lambda layer: prune.random_unstructured(layer, "bias", 0.5), PLAIN),
    "a weight of a special kind": (lambda layer: layer.register_parameter("weight", nn.Parameter(layer.weight.detach().as_subclass(Special))) or layer, PLAIN),
    "parametrized": (nn.utils.parametrizations.weight_norm, "torch.nn.utils.parametrize.ParametrizedLinear is another class"),
    "quantized": (quantized, "torch.ao.nn.quantized.dynamic.modules.linear.Linear is another class"),
    "LoRA": (with_lora, "peft.tuners.lora.layer.Linear is another class"),
    "its own forward": (replaced, "its forward was replaced"),
    "float64": (nn.Module.double, "torch.float64 on cpu"),
    "meta": (lambda layer: layer.to("meta"), "torch.float32 on meta"),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_left_alone_and_reported(kind):
    change, why = KEPT[kind]
    net = nn.Sequential(change(nn.Linear(D, E)))
    before = [(type(m), dict(vars(m))) for m in net.modules()]
    assert (report := fast.cpu(net)) == ((), 0, {"0": why})
    assert repr(report) == f"0 changed, with 0 entries\n1 left: {why}"
    assert [(type(m), dict(vars(m))) for m in net.modules()] == before


def test_parametrized_after_the_swap():
    "It can't be undone before the parametrization is removed, and `plain` says so."
    layer = nn.utils.parametrizations.weight_norm(Linear(D, E))
    net = nn.Sequential(layer)
    assert fast.plain(net) == ((), 0, {"0": "it was parametrized since"})
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert fast.plain(net).changed == ("0",) and type(net[0]) is nn.Linear


def test_lora_upon_the_swap():
    "peft takes a swapped layer for the `nn.Linear` that it is, and merges into its weight."
    import peft

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(D, E), nn.ReLU(), nn.Linear(E, D)), torch.randn(3, D)
    report = fast.cpu(net)
    adapted = peft.get_peft_model(net, peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False))
    with torch.no_grad():
        wanted = adapted(x)
        merged = adapted.merge_and_unload()
        close(merged(x), wanted)
    assert fast.plain(merged).changed == report.changed


def test_a_compiled_model_follows(unchecked):
    "Swapped behind the compiler's back: it notices the class."
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(D, E)), torch.randn(3, D)
    graphs = []

    def look(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=look)
    wanted = compiled(x)
    fast.cpu(compiled)
    assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
    assert ["annotated_nlp" in graph for graph in graphs] == [False, True]


def test_traced_without_our_operation():
    "What is traced runs where this package isn't."
    layer, x = Linear(D, E), torch.randn(2, D)
    traced = torch.jit.trace(layer, (x,))
    assert not {"annotated_nlp::linear", "mkldnn::_linear_pointwise"} & {node.kind() for node in traced.inlined_graph.nodes()}
    assert "aten::linear" in {node.kind() for node in traced.inlined_graph.nodes()}
    assert_close(traced(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", [fast.cpu, fast.plain])
def test_refuses_what_is_no_model(call, unchecked):
    with pytest.raises(TypeError, match=says("model", "list")):
        call([])
