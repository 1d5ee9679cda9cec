"""A second device for machines that have only one: its values lie in the CPU's memory, its rules are CUDA's.

`import second_device` gives PyTorch the device "card", on its PrivateUse1 key. The card's tensors are plain
`torch.Tensor`s whose memory is the CPU's under another device's name, and one fallback computes every operation on
them with the CPU's kernel. What PyTorch does above its kernels it does for the card as for CUDA: autograd, operations
that are made of others, promotion of types, TensorIterator's check of devices.

Mixing. An operation that is given tensors of both devices raises RuntimeError where CUDA's would. PyTorch's own table
of operations says which of CUDA's kernels accept nothing from elsewhere; the others take a tensor without axes from
the CPU. Copies may cross. An index may be the CPU's; it is copied first, so the program waits. A generator may not.

Waiting. Within `waiting()` each operation is counted for which a program would have to wait for a CUDA card, with the
line of the package that asked for it: those whose result or its shape Python must know (PyTorch marks them),
`multinomial`, an assignment under a boolean mask, and a blocking copy between the devices, in either direction.

Random numbers come from the CPU's global generator, so after the same seed both devices draw the same.

What the card is not: it has no streams and no memory of its own, its kernels are the CPU's (attention is never fused,
there is no cuDNN), it has no autocast and no generators, and `copy.deepcopy` of its tensors ends the process. Where
PyTorch sees a CUDA device, the card isn't made: CUDA is asked itself.
"""

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from numbers import Number
from pathlib import Path
from types import SimpleNamespace

import torch
import torchgen
from torch import Generator, Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp import decompositions
from torch.utils import dlpack
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

import annotated_nlp

PACKAGE = str(Path(annotated_nlp.__file__).parent)
ON_CPU, ON_CARD = 1, 12  # DLPack's numbers for the CPU's memory and for that of an extension

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _renamed(x: Tensor, device: int) -> Tensor:
    "The same memory as a tensor of another device: DLPack carries it over, its field for the device changed."
    capsule = dlpack.to_dlpack(x)
    after_data = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(after_data).value = device
    return dlpack.from_dlpack(capsule)


# Rules


def _tolerant() -> set[str]:
    "Operations whose CUDA kernels look at the devices themselves, by what CUDA's code is generated from."
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = re.split("^- func: ", table.read_text(), flags=re.M)[1:]
    return {"aten::" + entry[: entry.index("(")] for entry in entries if "device_check: NoCheck" in entry}


TOLERANT, COPY, READ, ASSIGN = _tolerant(), "aten::_copy_from", "aten::index.Tensor_out", "aten::_index_put_impl_"
KNOWN_TO_PYTHON = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _check_devices(name: str, args: tuple, leaves: list) -> None:
    index = args[1] if name in (READ, ASSIGN) else ()
    away = [x for x in leaves if isinstance(x, Tensor) and x.device.type != "card" and not any(x is i for i in index)]
    if any(x.ndim or name not in TOLERANT for x in away) and name != COPY:
        devices = sorted({str(x.device) for x in leaves if isinstance(x, Tensor)})
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {' and '.join(devices)}")
    if any(isinstance(x, Generator) for x in leaves):
        raise RuntimeError(f"Expected a 'card' device type for generator but {name} got the CPU's")


def _waits(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> bool:
    name = op.name()
    if name == COPY:  # from, to, non_blocking
        return args[0].device != args[1].device and not (args[2:] or (False,))[0]
    if name == ASSIGN:
        return any(i is not None and (i.dtype in (torch.bool, torch.uint8) or i.device.type == "cpu") for i in args[1])
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return name == "aten::multinomial" or bool(KNOWN_TO_PYTHON & set(op.tags))


def _line() -> str:
    "The innermost line of the package that is running, or where else the program is."
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_count = Counter()


@contextmanager
def waiting() -> Iterator[Counter]:
    "Counts what a program would wait for while the block runs: (operation, line of the package) to times."
    global _count
    before, _count = _count, Counter()
    try:
        yield _count
    finally:
        _count = before


# The device


def _compute(op: torch._ops.OpOverload, *args, **kwargs):
    "Any operation on tensors of the card, or that makes one."
    leaves = tree_leaves((args, kwargs))
    _check_devices(op.name(), args, leaves)
    if _waits(op, args, kwargs):
        _count[op.name(), _line()] += 1
    if op.is_view:  # the CPU's kernel for a view makes another tensor on the same storage and never looks into it
        return op.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
    theirs = {}

    def lower(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor) or x.device.type == "cpu":
            return x
        # What is empty may be an output that grows, which borrowed memory can't.
        here = _renamed(x, ON_CPU) if x.numel() else torch.empty(x.shape, dtype=x.dtype)
        theirs[id(here)] = here, x
        return here

    def lift(y):
        if not isinstance(y, Tensor):
            return y
        return theirs[id(y)][1] if id(y) in theirs else _renamed(y, ON_CARD)

    args, kwargs = tree_map(lower, (args, kwargs))
    # A number among tensors arrives here as Python's; the operation still wants it as a tensor.
    wanted = (str(argument.type) for argument in op._schema.arguments)
    args = [
        torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None) if kind == "Tensor" and isinstance(x, Number) else x
        for kind, x in zip(wanted, args)
    ]
    if op.name() == COPY:
        return lift(args[1].copy_(args[0]))
    result = op(*args, **kwargs)
    for here, x in theirs.values():
        if here.shape != x.shape:
            x.data = _renamed(here, ON_CARD)
    return tree_map(lift, result)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return False  # or PyTorch would choose the card where nobody named it


# Autograd looks for streams on one kind of device, and beside CUDA's it would find the card's.
if not torch.cuda.is_available():
    _setup_privateuseone_for_python_backend(
        "card",
        backend_module=SimpleNamespace(
            is_available=lambda: False,
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            device=nullcontext,
            _is_in_bad_fork=lambda: False,
            get_amp_supported_dtype=lambda: [],
            manual_seed_all=lambda seed: None,
            get_rng_state=lambda device=0: torch.get_rng_state(),
            set_rng_state=lambda state, device=0: torch.set_rng_state(state),
        ),
        hook=_Hook(),
    )
    _library = torch.library.Library("_", "IMPL")  # registrations live as long as it does
    _library.fallback(_compute, "PrivateUse1")
    _particular = torch.library.Library("aten", "IMPL")
    _particular.impl("_copy_from", lambda *args: _compute(torch.ops.aten._copy_from.default, *args), "CPU")
    _particular.impl("convolution_overrideable", lambda *args: _compute(torch.ops.aten.convolution.default, *args), "PrivateUse1")
    _particular.impl(
        "convolution_backward_overrideable",
        lambda gradient, x, weight, *args: _compute(
            torch.ops.aten.convolution_backward.default, gradient, x, weight, gradient.shape[1:2], *args
        ),
        "PrivateUse1",
    )
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # else PyTorch looks for a fused cell, which CPUs haven't
        _particular.impl("lstm.input", decompositions.lstm_impl, key)
        _particular.impl("gru.input", decompositions.gru_impl, key)
