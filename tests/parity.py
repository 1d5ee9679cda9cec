"What the tests share that hold a model against another implementation."

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])


class Calls(TorchDispatchMode):
    "Names of the operations that were called."

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


def lengths(*sizes, width=None):
    "A mask whose rows begin with that many real tokens."
    return torch.arange(width or max(sizes)) < torch.tensor(sizes)[:, None]


def loud(model):
    "Weights so large that a change of one layer is seen in the output."
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def close(found, wanted, tolerance=1e-5, name=""):
    "To `tolerance` of the largest entry."
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, atol=tolerance * wanted.detach().abs().max().item(), rtol=0, msg=lambda text: f"{name}: {text}")


def rounds_like(found, theirs, wanted):
    """Off `wanted` in root mean square, over all of a batch's outputs, by at most half as much again as theirs are.

    So no number has to be chosen for a model or a machine: on some, products of bfloat16 are summed less exactly.
    """
    off = lambda outputs: sum((x.float().cpu() - y).square().sum() for x, y in zip(outputs, wanted, strict=True)).sqrt().item()
    assert 0 < off(found) <= 1.5 * off(theirs), (off(found), off(theirs))
