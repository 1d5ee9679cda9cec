"""What PyTorch's transformations ask of a model: no look at values, no length as a constant, nothing that can't be moved.

Tracing, exporting and compiling once, with every layer counted, are in `test_plain_products.py`.

`functional_call` gets a copy: in PyTorch up to 2.13 it leaves a module that has two names with the wrong weights (issue
164759).
"""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import test_invariants
import torch
from annotated_nlp.parts.model import reset_buffers
from test_invariants import LENGTHS, MODELS, inputs, made, near
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

unchecked = test_invariants.unchecked  # as a user has the package
fused = lambda case: case.name.startswith(("seq2seq", "awd"))  # PyTorch's recurrent layers have no rule for these


def over(*, but=lambda case: False):
    return pytest.mark.parametrize("case", [case for case in MODELS if not but(case)], ids=lambda case: case.name)


def model_and_inputs(case, lengths=LENGTHS):
    torch.manual_seed(0)
    return made(case, "cpu", n_layers=1), inputs(case, "cpu", lengths)


@over(but=fused)
def test_each_row_by_itself(case, unchecked):
    "vmap over the rows gives what the batch gives."
    model, x = model_and_inputs(case)
    alone = lambda row: model(**{name: value[None] for name, value in row.items()})[0]
    with torch.no_grad():  # the CPU's kernel has no gradient for T5's bias where vmap calls it
        near(vmap(alone)(x), model(**x))


@over(but=fused)
def test_a_gradient_for_each_row(case, unchecked):
    "vmap of grad, as for private training: the gradients of the rows sum up to that of the batch."
    model, x = model_and_inputs(case)
    weights, shell = {name: p.detach() for name, p in model.named_parameters()}, copy.deepcopy(model)

    def loss(weights, row):
        return functional_call(shell, weights, kwargs={name: value[None] for name, value in row.items()}).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    wanted = torch.autograd.grad(model(**x).square().sum(), list(model.parameters()))
    for one, other in zip(found.values(), wanted):
        near(one.sum(0), other, 1e-4)


@over()
def test_shapes_without_values(case, unchecked):
    "FakeTensorMode: what a model's output will be, at no cost."
    model, x = model_and_inputs(case)
    wanted = model(**x)
    with FakeTensorMode() as mode:
        fake = case.build(n_layers=1).eval()(**{name: mode.from_tensor(value) for name, value in x.items()})
    assert (fake.shape, fake.dtype, fake.device) == (wanted.shape, wanted.dtype, wanted.device)


@over(but=fused)
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_taken_down_as_a_graph(case, mode, unchecked):
    "make_fx sees all operations, and no value became a constant."
    model, x = model_and_inputs(case)
    named, shell = [*model.named_parameters(), *model.named_buffers()], copy.deepcopy(model)
    weights = {name: tensor.detach() for name, tensor in named}
    graph = make_fx(lambda weights, x: functional_call(shell, weights, kwargs=x), tracing_mode=mode)(weights, x)
    for rows in (x, inputs(case, "cpu", [3, 7, 5, 1])):
        near(graph(weights, rows), model(**rows))


# texts for CANINE are filled up to whole groups, so their lengths are not all of one kind
@over(but=lambda case: not case.compiles or case.name == "canine")
def test_compiled_for_every_length(case, unchecked):
    "In one piece at a second length too, and after that for all others."
    torch._dynamo.reset()
    model, counter = made(case, "cpu", n_layers=1), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for size in (7, 6, 5, 3):
        x = inputs(case, "cpu", [size, 2, 3])
        if "tgt" in x:
            x["tgt"] = x["tgt"][:, : size + 1].contiguous()
        elif case.takes == "prefix":
            x["ids"] = x["ids"][:, :size].contiguous()
        near(compiled(**x), model(**x))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_pickled_for_another_process(tmp_path):
    "As a spawned process is given them: there the models say the same."
    torch.manual_seed(0)
    kept = []
    for case in MODELS:
        model, x = model_and_inputs(case)
        kept.append((case.name, pickle.dumps((model, x, model(**x).detach()))))
    file = tmp_path / "models"
    file.write_bytes(pickle.dumps(kept))
    program = (
        "import pickle, sys, torch\n"
        "for name, pickled in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    model, x, wanted = pickle.loads(pickled)\n"
        "    torch.testing.assert_close(model(**x), wanted, msg=name)\n"
        "print('the same')"
    )
    ran = subprocess.run([sys.executable, "-c", program, file], cwd=Path(__file__).parent,
                         env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True, text=True)
    assert ran.stdout == "the same\n", ran.stderr[-2000:]


@over()
def test_begun_on_meta(case):
    "Built without memory, given memory, filled by load_state_dict: nothing is left without values."
    model, x = model_and_inputs(case)
    with torch.device("meta"):
        empty = case.build(n_layers=1)
    empty.to_empty(device="cpu")
    for tensor in [*empty.parameters(), *empty.buffers()]:
        tensor.data.fill_(torch.nan)  # as memory may be
    empty.load_state_dict(model.state_dict())
    reset_buffers(empty)
    near(empty.eval()(**x), model(**x))
