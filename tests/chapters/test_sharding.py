"Fully sharded training: what PyTorch's `fully_shard` makes of every model, two processes against one."

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_invariants import MODELS

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def compared():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HERE / "sharded.py"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [case.name for case in MODELS])
def test_two_processes_with_half_the_weights_equal_one(name, compared):
    "Each holds half of every weight and reads half of the batch; loss and gradients are those of the whole model."
    assert compared[name]["apart"] < 1e-5
    assert 0.49 < compared[name]["held"] < 0.52
