"Attention runs in PyTorch's fused kernels, in every model: forward and backward, in float32 and bfloat16, on the CPU and on CUDA."

import pytest
import test_invariants
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from annotated_nlp.attention import Attention, scaled_dot_product

unchecked = test_invariants.unchecked
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
ATTENDING = [case for case in test_invariants.MODELS if not case.name.startswith(("seq2seq", "awd"))]
# The CPU's kernel has no gradient for a bias that is learned: there PyTorch falls back to its sum of simple operations.
NO_BACKWARD = {("cpu", name) for name in ("t5", "t5-1.1", "deberta", "deberta-decoder", "xlnet")}
# ALBERT's one block is both layers; DeBERTa's last block is its decoder, twice; XLNet's blocks see both sides, then in two streams
USED = {"albert": 2, "deberta-decoder": 2, "xlnet": 3}


class Kernels(TorchDispatchMode):
    "Counts calls of the fused kernels, by name; the unfused form is not one operation, so it never appears."

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            (self.backward if "backward" in name else self.forward).append(name)
        return function(*args, **kwargs or {})


def kernels(model, x, train):
    "The fused kernels that one pass calls, while every other way of attending is forbidden."
    with sdpa_kernel(FUSED), Kernels() as called, torch.set_grad_enabled(train):
        output = test_invariants.run(model, x)
        if train:
            output.float().square().mean().backward()
    assert output.isfinite().all()
    return called


def prepared(case, device, dtype):
    torch.manual_seed(0)
    x = test_invariants.inputs(case, device)
    x = {key: value.to(dtype) if value.is_floating_point() else value for key, value in x.items()}
    return test_invariants.made(case, device).to(dtype), x


@pytest.mark.parametrize("device", test_invariants.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("case", ATTENDING, ids=lambda case: case.name)
def test_every_attention_is_fused(case, train, dtype, device, unchecked):
    "As many calls of a fused kernel as the model has attentions, and as many again backwards."
    model, x = prepared(case, device, dtype)
    attentions = sum(isinstance(part, Attention) for part in model.modules()) * USED.get(case.name, 1)
    assert attentions >= 2
    if train and (device, case.name) in NO_BACKWARD:
        with pytest.raises(RuntimeError, match="No available kernel"):
            kernels(model, x, train)
        return
    called = kernels(model, x, train)
    assert len(called.forward) == attentions, called.forward
    assert len(called.backward) == attentions * train, called.backward


@pytest.mark.parametrize("case", [case for case in ATTENDING if case.start], ids=lambda case: case.name)
@pytest.mark.parametrize("device", test_invariants.DEVICES)
def test_a_step_with_a_cache_is_fused(case, device, unchecked):
    "One query against the keys of all that came before."
    model, x = prepared(case, device, torch.float32)
    ids = x[test_invariants.target(x)]
    with torch.no_grad():
        state = case.start(model, x)
        for t in range(2):
            with sdpa_kernel(FUSED), Kernels() as called:
                _, state = model.step(ids[:, t], state)
            assert called.forward and not called.backward


def test_it_notices(monkeypatch, unchecked):
    "The chapter's own three lines in the kernel's place: right, and seen to be no kernel."
    from annotated_nlp import attention

    case = next(case for case in ATTENDING if case.name == "bert")
    model, x = prepared(case, "cpu", torch.float32)
    assert kernels(model, x, False).forward
    monkeypatch.setattr(attention, "fused_attention", lambda q, k, v, mask, bias, scale, *others: scaled_dot_product(q, k, v, mask, bias, scale)[0])
    assert not kernels(model, x, False).forward
