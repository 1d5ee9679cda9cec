"""What each process of `test_sharding` runs: every model of the invariants, whole and sharded over all processes.

Prints, as JSON, by model how far losses and gradients are apart, and the share of the weights that this process held.
"""

import json
import sys

import torch
import torch.distributed as dist
from test_invariants import MODELS, inputs, loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from annotated_nlp.transformer import Block


# These use parts of a block outside its forward pass, where its weights aren't there: they are sharded as one whole.
AS_ONE = {"deberta-decoder", "xlnet"}


def shard(model, mesh, blocks=True):
    "Each block apart, as its weights are fetched and let go together; then what is left."
    for block in (module for module in model.modules() if blocks and isinstance(module, Block)):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compared(case, mesh):
    torch.manual_seed(0)
    whole, x = case.build().eval(), inputs(case, "cpu", lengths=(7, 5, 6, 4))
    torch.manual_seed(0)
    parts = shard(case.build().eval(), mesh, blocks=case.name not in AS_ONE)
    expected = loss(whole(**x))
    expected.backward()
    found = loss(parts(**{name: value[mesh.get_rank() :: mesh.size()] for name, value in x.items()}))
    found.backward()
    dist.all_reduce(found := found.detach())
    names, grads = dict(whole.named_parameters()), dict(parts.named_parameters())
    assert names.keys() == grads.keys()
    scale = max(p.grad.abs().max().item() for p in names.values() if p.grad is not None)
    apart = [abs(found.item() / mesh.size() - expected.item())]
    for name, p in names.items():
        other = grads[name].grad
        assert (other is None) == (p.grad is None), name
        if other is not None:
            apart.append((other.full_tensor() - p.grad).abs().max().item() / scale)
    held = sum(p.to_local().numel() for p in grads.values()) / sum(p.numel() for p in names.values())
    return dict(apart=max(apart), held=held)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = sys.argv[1:]
    result = {case.name: compared(case, mesh) for case in MODELS if not wanted or case.name in wanted}
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()
