"How the cost of ours grows with the work, and the power of it that fits."

import math
import statistics

import torch
import torch.nn.functional as F

from annotated_nlp.gpt import GPT, GPTConfig

from .measure import growth_of, interleave, size_of

# What each sweep varies; everything else stays at `base`.
WRITING = ("tokens made", "beam")  # the others are training steps
SWEEPS = {
    "cpu": dict(
        model=dict(vocab_size=4096, d_model=256, n_heads=4, n_layers=4, max_len=4096),
        base=dict(length=128, rows=4, depth=4), rounds=5, prompt=16, new=64,
        values={"length": [128, 256, 512, 1024, 2048], "rows": [1, 2, 4, 8, 16], "depth": [2, 4, 8, 16],
                "tokens made": [64, 128, 256, 512], "beam": [2, 4, 8, 16]},
    ),
    "cuda": dict(
        model=dict(vocab_size=50_257, d_model=768, n_heads=12, n_layers=12, max_len=16_384),
        base=dict(length=512, rows=8, depth=12), rounds=10, prompt=64, new=128,
        values={"length": [512, 1024, 2048, 4096, 8192], "rows": [1, 2, 4, 8, 16, 32], "depth": [3, 6, 12, 24],
                "tokens made": [128, 256, 512, 1024, 2048], "beam": [2, 4, 8, 16, 32]},
    ),
    "tiny": dict(
        model=dict(vocab_size=99, d_model=32, n_heads=2, n_layers=2, max_len=128),
        base=dict(length=8, rows=2, depth=2), rounds=2, prompt=3, new=4,
        values={"length": [8, 16, 32], "rows": [1, 2, 4], "depth": [1, 2], "tokens made": [4, 8], "beam": [2, 4]},
    ),
}


def exponent(x: list[float], y: list[float]) -> float:
    "p of the power law y = c x^p that fits best: the slope between the logarithms."
    return statistics.linear_regression([math.log(a) for a in x], [math.log(b) for b in y]).slope


def sweep(name: str, kind: str, device: str, seed: int = 0) -> dict:
    """Seconds and bytes of a training step (of a whole generation for "tokens made" and "beam") for each value.

    The sizes are run in turn, round by round, so that all meet the machine in the same state.
    """
    torch.manual_seed(seed)
    plan = SWEEPS[kind]
    calls, models, optimizers = {}, {}, {}
    for value in plan["values"][name]:
        at = plan["base"] | {name: value}
        model = GPT(GPTConfig(dropout=0.0, **plan["model"] | dict(n_layers=at["depth"]))).to(device).eval()
        models[value] = model
        if name in WRITING:
            prompt = torch.randint(4, 99, (1, plan["prompt"]), device=device)
            rules = dict(max_new_tokens=plan["new"], beam=value) if name == "beam" else dict(max_new_tokens=value)
            calls[name, value] = lambda model=model, prompt=prompt, rules=rules: model.generate(prompt, **rules)
            continue
        ids = torch.randint(4, 99, (at["rows"], at["length"] + 1), device=device)
        optimizer = optimizers[value] = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step(model=model, ids=ids, optimizer=optimizer):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        calls[name, value] = step
    times = interleave(calls, plan["rounds"], device, kind == "tiny")
    seconds = [statistics.median(times[key]) for key in calls]
    row = dict(what="generation" if name in WRITING else "a training step", against=name,
               values=plan["values"][name], seconds=seconds)
    fits = {"time": exponent(row["values"], seconds)}
    if optimizers:
        row["bytes"] = [size_of(models[v], optimizers[v]) + growth_of(calls[name, v], device) for v in models]
        fits["memory"] = exponent(row["values"], row["bytes"])
    return row | dict(exponents=fits)
