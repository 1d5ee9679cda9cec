"Training: one loop against plain PyTorch, runs that are killed, processes that share the work, and the arithmetic of cost."

import hashlib
import inspect
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from annotated_nlp import training
from annotated_nlp.data import batches
from annotated_nlp.tasks import resuming
from annotated_nlp.tasks.costs import Shape, emissions, energy, mfu, peak_rate
from annotated_nlp.tasks.costs import training_flops
from annotated_nlp.tasks.resuming import CheckpointError, History, load_checkpoint
from annotated_nlp.tasks.resuming import save_checkpoint
from annotated_nlp.training import constant, cosine, decay_groups, fit, inverse_sqrt
from annotated_nlp.training import linear, transformer_peak
from annotated_nlp.transformer import BlockConfig, Stack
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import test_invariants

unchecked = test_invariants.unchecked

# The run that most tests share: a small network with dropout on padded sequences. It is a script too, because other
# processes must make the very same run: `python run.py FOLDER HOW`, killed in the middle where HOW says so.
RUN = '''
import json, os, signal, sys
import torch
from torch import nn
from torch.nn import functional as F
from annotated_nlp import training
from annotated_nlp.tasks import resuming
from annotated_nlp.tasks.costs import Shape, emissions, energy, mfu, peak_rate, training_flops
from annotated_nlp.data import batches

class Tagger(nn.Module):
    "Says for each token whether an even number of twos stood up to it."
    def __init__(self, dropout=0.2, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.rnn = nn.Embedding(8, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True)
        self.norm, self.dropout, self.head = nn.LayerNorm(16), nn.Dropout(dropout), nn.Linear(16, 2)
    def forward(self, ids):
        return self.head(self.dropout(self.norm(self.rnn(self.embedding(ids))[0])))

def token_loss(model, batch):
    labels = (batch.src == 2).cumsum(1) % 2
    losses = F.cross_entropy(model(batch.src).flatten(0, 1), labels.flatten(), reduction="none")
    mask = batch.src_mask.flatten()
    return (losses * mask).sum() / mask.sum(), mask.sum()

class Corners(Tagger):
    "With a part that nobody calls, one whose output the loss ignores, and one that few batches use."
    def __init__(self, seed=0):
        super().__init__(seed=seed)
        self.pooler, self.ignored, self.rare = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 2)
    def forward(self, ids):
        x = self.norm(self.rnn(self.embedding(ids))[0])
        return (self.head if ids.shape[1] != 11 else self.rare)(self.dropout(x)), self.ignored(x)

def corner_loss(model, batch):
    return token_loss(lambda ids: model(ids)[0], batch)

def sequences(n=48):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (n,), generator=g).tolist()
    return [(torch.randint(1, 8, (m,), generator=g).tolist(), [1]) for m in lengths]

def run(folder=None, model=None, data=None, loss=token_loss, **settings):
    model = model or Tagger()
    history = training.fit(model, data or batches(sequences(), 4), loss, folder=folder,
                           **dict(steps=30, lr=0.01, warmup=3, save_every=5) | settings)
    return model, history

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, how = sys.argv[1:]
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if how == "mid-step":
        seen = []
        def deadly(model, batch):
            seen.append(None)
            if len(seen) == 27:  # in the second of update 14's two batches
                die()
            return token_loss(model, batch)
        run(folder, loss=deadly, accumulate=2)
    if how == "mid-write":
        whole, written = resuming.save_file, []
        def half(tensors, path, **kwargs):
            whole(tensors, path, **kwargs)
            written.append(path)
            if len(written) == 6:  # the optimizer's file of the third checkpoint
                os.truncate(path, os.path.getsize(path) // 2)
                die()
        resuming.save_file = half
        run(folder, accumulate=2)
    if how == "until killed":
        import time
        newest = lambda: max((int(kept.name[5:]) for kept in resuming._steps(folder)), default=0)
        last = newest() + 14
        def slow(model, batch):
            time.sleep(0.004 if newest() < last else 600)  # however slow the other process: it never comes too late
            return token_loss(model, batch)
        run(folder, loss=slow, accumulate=2, save_every=1)
    if "corners" in how:
        model, history = run(model=Corners(seed=int(os.environ["RANK"])), loss=corner_loss)
        if os.environ["RANK"] == "0":
            from safetensors.torch import save_file
            save_file(dict(model.state_dict()), folder + "/corners.safetensors")
    if "shared" in how:
        model, history = run(accumulate=1)
        assert os.environ["WORLD_SIZE"] == "2" and torch.distributed.get_backend() == "gloo"
        if os.environ["RANK"] == "0":
            from safetensors.torch import save_file
            save_file(dict(model.state_dict()), folder + "/model.safetensors")
            history.save(folder + "/history.json")
        private = folder + "/" + os.environ["RANK"]  # as on two machines without a common disk: only one has checkpoints
        run(private, steps=5)
        try:
            run(private, steps=5)
        except resuming.CheckpointError as error:
            assert "checkpoints of updates [5, 0]" in str(error)
        else:
            raise AssertionError("the processes began at different updates")
'''
exec(compile(RUN, "run.py", "exec"), names := {"__name__": "run"})
Tagger, Corners, token_loss, corner_loss, sequences, run = (
    names[name] for name in ("Tagger", "Corners", "token_loss", "corner_loss", "sequences", "run"))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    "Sums of floats depend on how many threads share them, and the other processes have one."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(RUN)
    return path


def environment():
    return os.environ | {"PYTHONPATH": str(Path(training.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def largest(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# Schedules


def rates_of(get, steps, **settings):
    "The factors of a schedule of transformers, from its own scheduler, for updates 0, 1, ..."
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = get(optimizer, **settings), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("steps, warmup", [(50, 10), (50, 0), (50, 50), (1, 0), (7, 1)])
def test_schedules_are_those_of_transformers(steps, warmup):
    "Their loops begin at 0, an update without effect when there is a warm-up, ours at 1."
    theirs = {constant: (transformers.get_constant_schedule_with_warmup, {}),
              linear: (transformers.get_linear_schedule_with_warmup, dict(num_training_steps=steps + 1)),
              cosine: (transformers.get_cosine_schedule_with_warmup, dict(num_training_steps=steps + 1))}
    if warmup:
        theirs[inverse_sqrt] = (transformers.get_inverse_sqrt_schedule, {})
    for ours, (get, more) in theirs.items():
        expected = rates_of(get, steps + 1, num_warmup_steps=max(1, warmup), **more)[1:]
        assert [ours(t, steps, warmup) for t in range(1, steps + 1)] == pytest.approx(expected, abs=1e-12)
        assert min(expected) > 0 and max(expected) == 1


def test_paper_schedule():
    "Vaswani et al. 2017, equation 3, as printed."
    for t in (1, 100, 4000, 4001, 100_000):
        assert transformer_peak(512, 4000) * inverse_sqrt(t, 100_000, 4000) == pytest.approx(
            512**-0.5 * min(t**-0.5, t * 4000**-1.5), rel=1e-12)


# The loop


def test_equals_plain_pytorch():
    "The same losses, rates, norms and weights as a loop of PyTorch's own pieces."
    data = list(batches(sequences(), 4))
    model = Tagger(dropout=0.0)
    names = {False: [n for n, p in model.named_parameters() if p.ndim < 2], True: [n for n, p in model.named_parameters() if p.ndim > 1]}
    share = rates_of(transformers.get_cosine_schedule_with_warmup, 31, num_warmup_steps=5, num_training_steps=31)[1:]
    optimizer = torch.optim.AdamW([{"params": [model.get_parameter(n) for n in group], "weight_decay": 0.1 * decays}
                                   for decays, group in names.items()], lr=0.01, fused=False)
    losses, norms = [], []
    for t in range(30):
        optimizer.zero_grad()
        value = token_loss(model, data[t % len(data)])[0]
        value.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * share[t]
        optimizer.step()
        losses.append(value.item())
    ours, history = run(model=Tagger(dropout=0.0), data=data, warmup=5, schedule=cosine, clip=0.5, weight_decay=0.1)
    assert history.loss == pytest.approx(losses, abs=2e-6) and history.norm == pytest.approx(norms, rel=1e-4)
    assert largest(ours, model) < 1e-5 and min(norms) < 0.5 < max(norms)
    assert not ours.training and all(p.grad is None for p in ours.parameters()) and "forward" not in vars(ours)


def test_learns():
    _, history = run(steps=200, lr=0.02)
    assert sum(history.loss[-10:]) < 0.8 * sum(history.loss[:10])


@pytest.mark.parametrize("accumulate, size", [(2, 8), (4, 4), (8, 2)])
def test_accumulation_equals_the_large_batch(accumulate, size):
    "Batches with different numbers of tokens: all tokens weigh the same."
    pairs = sequences(32)
    one, one_history = run(model=Tagger(dropout=0.0).double(), data=batches(pairs, 16, shuffle=False, key=None), steps=6)
    many, history = run(model=Tagger(dropout=0.0).double(), data=batches(pairs, size, shuffle=False, key=None),
                        steps=6, accumulate=16 // size)
    assert largest(one, many) < 1e-7 and history.tokens == one_history.tokens
    assert history.loss == pytest.approx(one_history.loss, rel=1e-6) and history.norm == pytest.approx(one_history.norm, rel=1e-9)
    unweighted, _ = run(model=Tagger(dropout=0.0).double(), data=batches(pairs, size, shuffle=False, key=None),
                        steps=6, accumulate=16 // size, loss=lambda *a: token_loss(*a)[0])
    assert largest(one, unweighted) > 1e-4  # the mean of means is another loss


def test_norms_and_biases_do_not_decay():
    model = Tagger()
    decayed, spared = decay_groups(model, 0.1)
    named = {id(p): n for n, p in model.named_parameters()}
    assert {named[id(p)] for p in decayed["params"]} == {"embedding.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"}
    assert spared["weight_decay"] == 0 and len(decayed["params"]) + len(spared["params"]) == len(named)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="unfreeze"):
        decay_groups(model, 0.1)


def test_frozen_parameters_stay():
    model = Tagger()
    model.embedding.requires_grad_(False)
    before = model.embedding.weight.clone()
    run(model=model, steps=3)
    assert torch.equal(model.embedding.weight, before) and not same(model, Tagger())


GROUPS = {"embedding": 0.1, "rnn": (0.5, 0.3), "rnn.weight_hh_l0": 3, "head": (2.0, 0.0)}


def test_groups_are_adamw_by_hand():
    "Rates and decays of their own, written out: m and v, decoupled decay, one clipping for all, a schedule, a frozen vector."
    data, steps, lr, clip = list(batches(sequences(), 4)), 12, 0.01, 0.2
    expected = {"embedding.weight": (0.1, 0.05), "rnn.weight_ih_l0": (0.5, 0.3), "rnn.weight_hh_l0": (3.0, 0.05),
                "rnn.bias_ih_l0": (0.5, 0.0), "rnn.bias_hh_l0": (0.5, 0.0), "norm.weight": (1.0, 0.0),
                "head.weight": (2.0, 0.0), "head.bias": (2.0, 0.0)}
    ours, twin = (Tagger(dropout=0.0).double() for _ in range(2))
    for model in (ours, twin):
        model.norm.bias.requires_grad_(False)
    share = rates_of(transformers.get_linear_schedule_with_warmup, steps + 1, num_warmup_steps=4, num_training_steps=steps + 1)[1:]
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in twin.named_parameters()}
    norms = []
    for t in range(1, steps + 1):
        trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        assert trained.keys() == expected.keys()
        gradients = torch.autograd.grad(token_loss(twin, data[(t - 1) % len(data)])[0], list(trained.values()))
        norms.append(math.sqrt(sum((g**2).sum().item() for g in gradients)))
        with torch.no_grad():
            for (name, p), g in zip(trained.items(), gradients):
                factor, decay = expected[name]
                g = g * min(1, clip / (norms[-1] + 1e-6))
                m, v = moments[name] = (0.9 * moments[name][0] + 0.1 * g, 0.999 * moments[name][1] + 0.001 * g**2)
                rate = lr * share[t - 1] * factor
                p *= 1 - rate * decay
                p -= rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    settings = dict(data=data, steps=steps, lr=lr, warmup=4, clip=clip, weight_decay=0.05)
    _, history = run(model=ours, groups=GROUPS, **settings)
    assert largest(ours, twin) < 1e-6 and history.norm == pytest.approx(norms, rel=1e-6) and max(norms) > clip
    assert history.lr == pytest.approx([lr * s for s in share])  # the rate of those that are in no group
    others, _ = run(model=Tagger(dropout=0.0).double(), **settings)
    assert largest(others, twin) > 1e-3


def test_groups_and_checkpoints(tmp_path):
    "A killed run with groups goes on as it would have; one with other groups is another run, and the error names the parameter."
    whole, history = run(groups=GROUPS)
    stopped(tmp_path, at=18, groups=GROUPS)
    with pytest.raises(CheckpointError, match=r"another run: rate and decay of head.weight is \[1.0, 0.01\] here and \[2.0, 0.0\] there"):
        run(tmp_path, groups={name: value for name, value in GROUPS.items() if name != "head"})
    frozen = Tagger()
    frozen.norm.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"rate and decay of norm.weight is absent here and \[1.0, 0.0\] there"):
        run(tmp_path, model=frozen, groups=GROUPS)
    resumed, again = run(tmp_path, model=Tagger(seed=9), groups=GROUPS)
    assert same(whole, resumed) and again.loss == history.loss


def test_a_group_of_factor_zero_stays():
    model = Tagger()
    run(model=model, steps=3, groups={"embedding": 0, "head.bias": 0.0})
    assert torch.equal(model.embedding.weight, Tagger().embedding.weight) and torch.equal(model.head.bias, Tagger().head.bias)
    assert not torch.equal(model.head.weight, Tagger().head.weight)


class Deep(nn.Module):
    "Two blocks that can compute their insides again in the backward pass."

    class Block(nn.Module):
        def __init__(self, checkpoint):
            super().__init__()
            self.linear, self.checkpoint, self.seen = nn.Linear(4, 4), checkpoint, []

        def forward(self, x):
            self.seen.append(self.checkpoint)
            f = lambda x: torch.tanh(self.linear(x))
            return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False) if self.checkpoint else f(x)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = self.Block(False), self.Block(True)

    def forward(self, x):
        return self.second(self.first(x))


def test_activation_checkpointing():
    "Every switch is on while the run lasts, also one that fails, and then as it was; the run is the same."
    data, loss = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))], lambda model, x: model(x).square().mean()
    recomputed, plain = Deep(), Deep()
    assert fit(recomputed, data, loss, steps=5, checkpoint=True).loss == fit(plain, data, loss, steps=5).loss
    assert same(recomputed, plain) and recomputed.first.seen == [True] * 5 and plain.first.seen == [False] * 5
    for model in (recomputed, plain):
        assert (model.first.checkpoint, model.second.checkpoint) == (False, True)
    with pytest.raises(FloatingPointError):
        fit(recomputed, data, lambda model, x: loss(model, x) * math.nan, steps=5, checkpoint=True)
    assert recomputed.first.seen[-1] and not recomputed.first.checkpoint


def test_activation_checkpointing_of_a_stack():
    "The Transformer's blocks, dropout included: the same run bit for bit, with less than a third of the peak memory at eight blocks."
    from torch.distributed._tools.mem_tracker import MemTracker

    data = [torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))]
    def measured(checkpoint):
        torch.manual_seed(0)
        model, memory = Stack(BlockConfig(d_model=16, n_heads=2, d_ff=64, dropout=0.1), 8), MemTracker()
        memory.track_external(model)
        with memory:
            history = fit(model, data, lambda model, x: model(x).square().mean(), steps=1, checkpoint=checkpoint)
        return model, history.loss, memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    (plain, losses, much), (recomputed, again, little) = measured(False), measured(True)
    assert losses == again and same(plain, recomputed) and not recomputed.checkpoint
    assert little < much / 3, (little, much)


def test_precision():
    "bf16 computes in bf16 and keeps float32 weights; the model's own forward comes back."
    seen = set()
    def loss(model, batch):
        handle = inner.head.register_forward_hook(lambda m, i, o: seen.add(o.dtype))
        result = token_loss(model, batch)
        handle.remove()
        return result
    inner = Tagger(dropout=0.0)
    _, half = run(model=inner, loss=loss, precision="bf16")
    assert seen == {torch.bfloat16} and inner.head.weight.dtype == torch.float32 and "forward" not in vars(inner)
    _, full = run(model=Tagger(dropout=0.0), precision="fp32")
    assert half.loss == pytest.approx(full.loss, abs=0.05) and half.loss != full.loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled(precision, monkeypatch, tmp_path):
    "A compiled run follows the plain one, and its checkpoints have the plain names. (Without code generation: seconds, not minutes.)"
    graphs, compiler = [], torch.compile
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, "compile", lambda model: compiler(model, backend=backend))
    def train(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        return model, fit(model, [torch.ones(2, 4), torch.randn(3, 4)], lambda m, x: m(x).float().square().mean(), steps=6, precision=precision, **more)
    compiled, history = train(compile=True, folder=tmp_path)
    plain, expected = train()
    assert graphs and history.loss == pytest.approx(expected.loss, abs=1e-5 if precision == "fp32" else 0.01)
    load_checkpoint(tmp_path, plain)
    assert same(compiled, plain) and "forward" not in vars(compiled)


def test_evaluation():
    modes = []
    def evaluate(model):
        modes.append((model.training, torch.is_grad_enabled()))
        torch.rand(3)  # random numbers used here change nothing
        return {"score": float(len(modes)), "nothing": math.nan}
    model, history = run(evaluate=evaluate, evaluate_every=8)
    assert history.metrics == [{"step": t, "score": i, "nothing": None} for i, t in enumerate((8, 16, 24, 30), 1)]
    assert set(modes) == {(False, False)} and same(model, run()[0])


def test_history(tmp_path):
    _, history = run(steps=5, evaluate=lambda model: {"score": 1.0})
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history and "5 updates" in repr(history)
    assert all(len(column) == 5 for column in (history.lr, history.norm, history.tokens, history.seconds))
    assert history.tokens_per_second == pytest.approx(sum(history.tokens) / sum(history.seconds))
    ax = history.plot()
    assert list(ax.lines[0].get_ydata()) == history.loss and len(ax.lines) == 3
    history.metrics = [{"step": 5, "score": None}]
    assert len(history.plot(ax=ax.figure.add_subplot()).lines) == 2


def test_departures():
    "The chapter's table: defaults, what decays, where schedules begin and end, how clipping rounds, no scaled loss."
    defaults = {name: p.default for name, p in inspect.signature(fit).parameters.items()}
    assert (defaults["betas"], defaults["eps"], defaults["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.01)
    assert {p.ndim for p in decay_groups(Tagger(), 0.01)[1]["params"]} == {1}
    for steps, warmup in ((1, 0), (7, 3), (100, 20)):
        assert 0 < linear(1, steps, warmup) <= 1 and linear(steps, steps, warmup) == 1 / (steps + 1 - max(1, warmup))
    p = nn.Parameter(torch.zeros(3, dtype=torch.double))
    p.grad = torch.full((3,), 2.0, dtype=torch.double)
    training.clip_grads_with_norm_([p], 0.5, training.get_total_norm([p.grad]))
    assert 0 < 0.5 - p.grad.norm() < 1e-6
    assert all(resuming.accelerator_for(precision)[0].scaler is None for precision in ("bf16", "fp32"))


def test_optimizer_of_the_transformer_paper():
    "Vaswani et al. 2017, section 5.3: with its settings `fit` is torch.optim.Adam."
    data, model = list(batches(sequences(), 4)), Tagger(dropout=0.0).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for batch in data[:10]:
        optimizer.zero_grad()
        token_loss(model, batch)[0].backward()
        optimizer.step()
    settings = dict(steps=10, warmup=0, schedule=constant, clip=None, weight_decay=0.0)
    ours, _ = run(model=Tagger(dropout=0.0).double(), data=data, betas=(0.9, 0.98), eps=1e-9, **settings)
    others, _ = run(model=Tagger(dropout=0.0).double(), data=data, **settings)
    assert largest(ours, model) < 1e-7 < 1e-4 < largest(others, model)


# Runs that stop and go on


class Stop(Exception):
    pass


def stopped(folder, at, **settings):
    "A run whose loss function gives up at its call number `at`."
    calls = []
    def loss(model, batch):
        calls.append(None)
        if len(calls) == at:
            raise Stop
        return token_loss(model, batch)
    with pytest.raises(Stop):
        run(folder, loss=loss, **settings)


def loader(generator=None, shuffle=True):
    from torch.utils.data import DataLoader
    return lambda: DataLoader(sequences(20), batch_size=3, shuffle=shuffle, collate_fn=lambda rows: next(iter(batches(rows, 3, shuffle=False))),
                              generator=torch.Generator().manual_seed(1) if generator else None)


def noisy():
    "Batches that use the global random numbers as they are made, as dynamic masking does."
    class Noisy:
        def __iter__(self):
            for batch in batches(sequences(), 4, shuffle=False):
                yield batch._replace(src=torch.where(torch.rand(batch.src.shape) < 0.2, 1, batch.src))
    return Noisy()


SOURCES = {"batches": lambda: batches(sequences(), 4), "list": lambda: list(batches(sequences(), 4)), "loader": loader(),
           "loader with a generator": loader(generator=True), "random while drawn": noisy,
           "iterator": lambda: (batch for _ in range(9) for batch in batches(sequences(), 4))}


@pytest.mark.parametrize("source", SOURCES)
def test_resumes_with_the_same_data(source, tmp_path):
    whole, history = run(data=SOURCES[source]())
    stopped(tmp_path, at=18, data=SOURCES[source]())
    assert [p.name for p in resuming._steps(tmp_path)] == ["step-00000010", "step-00000015"]
    resumed, again = run(tmp_path, model=Tagger(seed=9), data=SOURCES[source]())
    assert same(whole, resumed) and again.loss == history.loss and again.norm == history.norm


class Halves:
    "A schedule that is an object, as a user may write one: its repr has an address that differs from process to process."
    def __call__(self, t, steps, warmup):
        return 0.5


def test_schedule_without_a_name(tmp_path):
    whole, _ = run(schedule=Halves())
    stopped(tmp_path, at=18, schedule=Halves())
    assert same(whole, run(tmp_path, model=Tagger(seed=9), schedule=Halves())[0])
    assert json.loads((resuming._steps(tmp_path)[-1] / "state.json").read_text())["plan"]["schedule"] == "Halves"


def test_numpy_settings(tmp_path):
    "Numbers of NumPy, which JSON doesn't know, fail neither at the first checkpoint nor at the resume."
    numpy = pytest.importorskip("numpy")
    stopped(tmp_path, at=8, lr=numpy.float32(0.0625), clip=numpy.float32(1))
    assert same(run(tmp_path, model=Tagger(seed=9), lr=0.0625, clip=1)[0], run(lr=0.0625)[0])


def test_a_copy_of_a_checkpoint_is_the_users(tmp_path):
    "It is neither resumed from nor thrown away."
    import shutil
    stopped(tmp_path, at=8)
    shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-best")
    shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000005-mine")
    resumed, _ = run(tmp_path, model=Tagger(seed=9))
    assert same(resumed, run()[0])
    assert {p.name for p in tmp_path.iterdir()} == {"step-best", "step-00000005-mine", "step-00000025", "step-00000030"}


def test_finished_run_is_read_and_not_repeated(tmp_path):
    whole, history = run(tmp_path)
    def never(model, batch):
        raise Stop
    again, read = run(tmp_path, model=Tagger(seed=9), loss=never)
    assert same(whole, again) and read == history


@pytest.mark.parametrize("how", ["mid-step", "mid-write"])
def test_killed_run_ends_like_the_other(how, script, tmp_path):
    "SIGKILL, which nothing can catch: bit for bit the same weights, losses and norms."
    whole, history = run(accumulate=2)
    done = subprocess.run([sys.executable, script, tmp_path / "run", how], env=environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"step-00000005", "step-00000010"} | ({".step-00000015.part"} if how == "mid-write" else set())
    resumed, again = run(tmp_path / "run", model=Tagger(seed=9), accumulate=2)
    assert same(whole, resumed) and again.loss == history.loss and again.norm == history.norm
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"step-00000025", "step-00000030"}


def test_killed_again_and_again(script, tmp_path):
    "At moments that nobody chose, with a checkpoint after every update."
    folder, rng = tmp_path / "run", random.Random(time.time_ns())
    folder.mkdir()
    for _ in range(2):
        before = resuming._steps(folder)
        process = subprocess.Popen([sys.executable, script, folder, "until killed"], env=environment(), stderr=subprocess.DEVNULL)
        while process.poll() is None and resuming._steps(folder) == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        assert process.wait() == -signal.SIGKILL and resuming._steps(folder) != before
    resumed, history = run(folder, model=Tagger(seed=9), accumulate=2, save_every=1)
    whole, expected = run(accumulate=2)
    assert same(whole, resumed) and history.loss == expected.loss


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    "The folder of a run by two processes, by the launcher of a name: of all runs that are asked of two, since a start takes seconds."
    @cache
    def launched(launcher):
        folder = tmp_path_factory.mktemp("two")
        (folder / "run.py").write_text(RUN)
        command = [sys.executable, "-m", *launcher.split(), folder / "run.py", folder, "shared corners"]
        done = subprocess.run(command, env=environment() | {"ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return launched


LAUNCHERS = "accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0", "torch.distributed.run --standalone --nproc-per-node 2"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_equal_one(launcher, two_processes):
    "One process with twice the accumulation has the same global batch: the same losses, dropout included."
    alone, history = run(accumulate=2)
    folder = two_processes(launcher)
    shared = History.load(folder / "history.json")
    assert shared.tokens == history.tokens and shared.loss == pytest.approx(history.loss, abs=1e-5)
    from safetensors.torch import load_file
    weights = load_file(folder / "model.safetensors")
    assert max((weights[n] - w).abs().max().item() for n, w in alone.state_dict().items()) < 1e-4


def test_two_processes_train_what_one_trains(two_processes):
    "Parameters without a gradient, in all updates or in some, on one side or both; weights that began differently."
    alone, _ = run(model=Corners(), loss=corner_loss, accumulate=2)
    from safetensors.torch import load_file
    weights, before = load_file(two_processes(LAUNCHERS[1]) / "corners.safetensors"), Corners().state_dict()
    assert max((weights[n] - w).abs().max().item() for n, w in alone.state_dict().items()) < 1e-4
    moved = {n.partition(".")[0] for n in weights if not torch.equal(weights[n], before[n])}
    assert moved == {"embedding", "rnn", "norm", "head", "rare"}


def test_biases_of_two_axes_do_not_decay():
    "By PyTorch's own AdamW, in which the same parameters decay: named by hand, by what they are and not by their axes."

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.filters = nn.LayerNorm((3, 4)), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
            self.content_bias, self.table, self.scale = (nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5, 4), (4,)))

        def forward(self, x):
            return (self.filters(self.norm(x)) + self.content_bias + self.table[:3]) * self.scale

    data, loss = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))], lambda model, x: model(x).square().mean()
    ours, twin = Heads(), Heads()
    decayed = {"filters.parametrizations.weight.original", "table"}
    groups = [{"params": [p for name, p in twin.named_parameters() if (name in decayed) == decays], "weight_decay": 0.5 * decays} for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss(twin, data[0]).backward()
        optimizer.step()
    fit(ours, data, loss, steps=5, lr=0.01, schedule=constant, clip=None, weight_decay=0.5)
    assert max((a - b).abs().max() for a, b in zip(ours.parameters(), twin.parameters())) < 1e-6


def test_epochs():
    "12 batches to a pass: the same run as with that many updates."
    for epochs, accumulate, steps in ((2, 1, 24), (0.5, 1, 6), (1, 5, 3)):
        model, history = run(steps=None, epochs=epochs, accumulate=accumulate)
        assert len(history) == steps and same(model, run(steps=steps, accumulate=accumulate)[0])


def test_schedules_by_name():
    for name, schedule in dict(constant=constant, linear=linear, cosine=cosine, inverse_sqrt=inverse_sqrt).items():
        assert run(schedule=name, steps=7)[1].lr == run(schedule=schedule, steps=7)[1].lr


def test_the_progress_bar_can_be_switched_off(capfd):
    run(steps=3)
    assert "0/3 [" in capfd.readouterr().err
    run(steps=3, progress=False)
    assert capfd.readouterr().err == ""


@pytest.fixture
def fresh_accelerate():
    "As in a process that has made no Accelerator yet."
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("theirs", ["no", "bf16"])
def test_an_accelerator_of_ones_own(theirs, fresh_accelerate):
    "It decides the precision, handed over or not, and knows its own afterwards."
    expected, _ = run(steps=5, precision={"no": "fp32"}.get(theirs, theirs))
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)
    mine = Accelerator(cpu=True, mixed_precision=theirs)
    for more in (dict(accelerator=mine), {}):
        assert same(run(steps=5, **more)[0], expected)
        assert (mine.mixed_precision, mine.state.mixed_precision, mine.num_processes) == (theirs, theirs, 1)
        wrapped = mine.prepare_model(nn.Linear(2, 2))
        assert wrapped(torch.ones(1, 2)).dtype == torch.float32
    if theirs == "bf16":
        for more in (dict(accelerator=mine), {}):
            with pytest.raises(ValueError, match="precision='fp32' and this process's Accelerator has mixed_precision='bf16': drop one"):
                run(steps=5, precision="fp32", **more)
    else:
        assert same(run(steps=5, precision="bf16", accelerator=mine)[0], run(steps=5, precision="bf16")[0])


def test_accelerators_that_are_refused(fresh_accelerate, unchecked):
    from accelerate import Accelerator

    with pytest.raises(TypeError, match="accelerator is str, give Accelerator"):
        run(accelerator="cpu")
    with pytest.raises(ValueError, match="schedule=0.5 must be a function or a schedule's name"):
        run(schedule=0.5)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4: give accumulate=4 instead"):
        run(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4))


# Errors lose nothing


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad, tmp_path):
    model = Tagger()
    calls = []
    def loss(model, batch):
        calls.append(None)
        mean, n = token_loss(model, batch)
        return (mean * bad if len(calls) == 8 else mean), n
    with pytest.raises(FloatingPointError, match=r"update 8: the loss is (nan|inf).*largest gradients: .*weight.*those after update 7"):
        run(tmp_path, model=model, loss=loss)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    reference = Tagger()
    stopped(None, at=8, model=reference)
    assert same(model, reference) and load_checkpoint(tmp_path, Tagger()).loss


def test_gradient_that_is_not_finite():
    "A finite loss can have an infinite slope; the error names the parameter."
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.bias.zero_()
    with pytest.raises(FloatingPointError, match="update 1: the loss is .*largest gradients: bias (inf|nan)"):
        fit(model, [torch.ones(1, 2)], lambda m, x: m(x).mean() + m.bias.abs().sqrt().sum(), steps=2)
    assert torch.equal(model.bias, torch.zeros(1))


@pytest.mark.parametrize("settings, message", [
    (dict(steps=0), "steps=0 must be an integer of at least 1"), (dict(accumulate=0), "accumulate=0"), (dict(save_every=0), "save_every=0"),
    (dict(evaluate_every=0), "evaluate_every=0"), (dict(warmup=31), r"warmup=31 must be .*\[0, 30\]"),
    (dict(clip=0.0), "clip=0.0"), (dict(clip=math.nan), "clip=nan"), (dict(lr=math.inf), r"lr=inf must be a number in \[0, inf\)"),
    (dict(lr=-1), "lr=-1 must be"), (dict(precision="fp16"), "precision='fp16' must be"), (dict(data=iter([])), "ran out after 0"),
    (dict(data=[torch.zeros(0, 3)]), "batch 0 is empty"), (dict(data=[()]), "batch 0 is empty"),
    (dict(loss=lambda m, b: (token_loss(m, b)[0], 0)), "counted 0 tokens in batches 0 to 0"),
    (dict(weight_decay=math.nan), "weight_decay=nan must be"), (dict(weight_decay=-0.1), "weight_decay=-0.1 must be"),
    (dict(eps=math.inf), "eps=inf must be"), (dict(betas=(0.9, 1.0)), r"betas\[1\]=1.0 must be"),
    (dict(schedule=lambda t, steps, warmup: 1 - t / 9), r"schedule\(10, 30, 3\)=-0.1.* must be"),
    (dict(schedule=lambda t, steps, warmup: math.nan), r"schedule\(1, 30, 3\)=nan must be"),
    (dict(groups={"heads": 2.0}), "no parameter's name begins with 'heads'.*'embedding', 'rnn', 'norm', 'head'"),
    (dict(groups={"hea": 2.0}), "no parameter's name begins with 'hea'; choose"),
    (dict(groups={"head": -1.0}), "groups: the factor of head=-1.0 must be"),
    (dict(groups={"head": (1.0, math.nan)}), "the weight decay of head=nan must be"),
    (dict(schedule="cosin"), "schedule='cosin' must be one of 'constant', 'linear', 'cosine', 'inverse_sqrt'"),
    (dict(epochs=2), "steps=30 and epochs=2: give one"),
    (dict(steps=None), "steps=None and epochs=None: give one"), (dict(steps=None, epochs=0), r"epochs=0 must be a number in \(0, inf\)"),
    (dict(steps=None, epochs=1, data=iter([1])), "epochs=1 needs batches with a length.*give steps"),
    (dict(checkpoint=True), "checkpoint=True needs a module with a switch .checkpoint.*drop it")])
def test_bad_settings(settings, message):
    model = Tagger()
    with pytest.raises(ValueError, match=message):
        run(model=model, **settings)
    assert same(model, Tagger())


@pytest.mark.parametrize("result", [3.0, torch.ones(2, requires_grad=True), torch.tensor(1.0)])
def test_bad_loss(result):
    with pytest.raises(TypeError, match="must give a scalar tensor"):
        run(loss=lambda model, batch: result)


def test_loss_of_another_model():
    "A closure over the wrong model would train nothing, without a word."
    other = Tagger()
    with pytest.raises(TypeError, match="must use its model"):
        run(loss=lambda model, batch: token_loss(other, batch))


def test_refused_run_leaves_the_model_as_it_was(tmp_path):
    "In bf16 the forward pass is wrapped while a run lasts, and only then."
    run(tmp_path, steps=5)
    model = Tagger()
    with pytest.raises(CheckpointError, match="precision is bf16 here and no there"):
        run(tmp_path, model=model, steps=5, precision="bf16")
    assert "forward" not in vars(model) and model(batches(sequences(), 4).__iter__().__next__().src).dtype == torch.float32


def test_data_that_run_out_can_be_followed_by_more(tmp_path):
    some = list(batches(sequences(), 4))
    with pytest.raises(ValueError, match="ran out after 12"):
        run(tmp_path, data=iter(some))
    resumed, _ = run(tmp_path, model=Tagger(seed=9), data=some)
    assert same(resumed, run(data=some)[0])


def test_missing_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            load_checkpoint(folder, Tagger())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "absent", "other bytes"])
def test_damaged_checkpoint(file, damage, tmp_path):
    run(tmp_path, steps=10)
    newest = resuming._steps(tmp_path)[-1]
    if damage == "truncated":
        os.truncate(newest / file, (newest / file).stat().st_size // 2)
    elif damage == "absent":
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(b"cos\nsystem\n(S'echo'\ntR.")  # a pickle that would run a command
    model = Tagger(seed=9)
    with pytest.raises(CheckpointError, match="step-00000010 is damaged .*the checkpoint before it"):
        run(tmp_path, model=model, steps=10)
    assert same(model, Tagger(seed=9)) and len(resuming._steps(tmp_path)) == 2
    newest.rename(tmp_path / "away")
    assert same(run(tmp_path, model=model, steps=10)[0], run(steps=10)[0])  # from the one before


def signed(told):
    "A checkpoint's record with the digest that belongs to it."
    rest = {name: value for name, value in told.items() if name != "digest"}
    return json.dumps({"digest": hashlib.sha256(json.dumps(rest).encode()).hexdigest()} | rest)


def rewritten(path, change, honest=False):
    "Change a checkpoint's optimizer file; `honest` as if it had been written so."
    from safetensors.torch import load_file, save_file
    file, state = path / "optimizer.safetensors", path / "state.json"
    memory = load_file(file)
    change(memory)
    save_file(memory, file)
    if honest:
        told = json.loads(state.read_text())
        told["digests"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        state.write_text(signed(told))


@pytest.mark.parametrize("damage", ["emptied", "shortened", "one number", "moved", "honestly emptied", "without a digest"])
def test_damaged_record(damage, tmp_path):
    "What is recorded of a run is held against its digest and its folder's number; the checkpoint before it serves."
    run(tmp_path, steps=10, evaluate=lambda model: {"score": 1.0})
    newest = resuming._steps(tmp_path)[-1]
    told = json.loads((newest / "state.json").read_text())
    history = told["history"]
    if "emptied" in damage:
        told["history"] = {name: [] for name in history}
    if damage == "shortened":
        told["history"] = {name: column[:5] for name, column in history.items()}
    if damage == "one number":
        history["loss"][3] += 1e-9
    if damage == "without a digest":
        del told["digest"]
    (newest / "state.json").write_text(signed(told) if "honestly" in damage else json.dumps(told))
    if damage == "moved":
        newest = newest.rename(tmp_path / "step-00000020")
    model = Tagger(seed=9)
    with pytest.raises(CheckpointError, match=f"{newest.name} is damaged .*the checkpoint before it"):
        run(tmp_path, model=model, steps=10, evaluate=lambda model: {"score": 1.0})
    assert same(model, Tagger(seed=9))
    newest.rename(tmp_path / "away")
    again, whole = run(tmp_path, model=model, steps=10), run(steps=10)
    assert same(again[0], whole[0]) and again[1].loss == whole[1].loss


CHANGES = {"five numbers": lambda memory: memory.update({"head.weight.exp_avg": torch.zeros(5)}),
           "another type": lambda memory: memory.update({"head.weight.exp_avg": memory["head.weight.exp_avg"].double()}),
           "of nobody": lambda memory: memory.update({"tail.weight.exp_avg": torch.zeros(2, 16)}),
           "missing": lambda memory: memory.pop("head.weight.exp_avg"), "empty": lambda memory: memory.clear()}


@pytest.mark.parametrize("change, honest", [(change, False) for change in CHANGES] + [(change, True) for change in list(CHANGES)[:3]])
def test_damaged_optimizer(change, honest, tmp_path):
    "The fused kernel reads past the end of a tensor that is too short. A state that isn't whole resumes another run."
    run(tmp_path, steps=10)
    rewritten(resuming._steps(tmp_path)[-1], CHANGES[change], honest)
    model = Tagger(seed=9)
    with pytest.raises(CheckpointError, match="another optimizer, AdamW" if honest else "optimizer.safetensors isn't what was written"):
        run(tmp_path, model=model, steps=10)
    assert same(model, Tagger(seed=9))


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_flipped_bit(name, tmp_path):
    run(tmp_path, steps=10)
    file = resuming._steps(tmp_path)[-1] / f"{name}.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    model = Tagger(seed=9)
    with pytest.raises(CheckpointError, match=f"damaged .{name}.safetensors isn't what was written"):
        load_checkpoint(tmp_path, model)
    assert same(model, Tagger(seed=9))


def test_another_optimizer(tmp_path):
    "Its memory would be none to this one. One whose tensors have other shapes than its parameters is refused when it saves."
    run(tmp_path, steps=5)
    model = Tagger(seed=9)
    with pytest.raises(CheckpointError, match="of another optimizer, AdamW"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert same(model, Tagger(seed=9))
    factored = torch.optim.Adafactor(model.parameters())
    token_loss(model, next(iter(batches(sequences(), 4))))[0].backward()
    factored.step()
    with pytest.raises(ValueError, match="Adafactor keeps .*_var, which isn't like its parameter: take another"):
        save_checkpoint(tmp_path / "new", model, factored, History(loss=[1.0]))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("fails", ["save_file", "write_text"])
def test_full_disk(fails, tmp_path, monkeypatch):
    "What is unfinished goes, what was whole stays, and the run can be taken up."
    whole, written = resuming.save_file, []
    def full(*args, **more):
        if fails == "save_file":
            whole(*args, **more)
            os.truncate(args[1], 100)
        written.append(None)
        raise OSError(28, "No space left on device")
    stopped(tmp_path, at=8)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(resuming, "save_file", full) if fails == "save_file" else patch.setattr(Path, "write_text", full)
        run(tmp_path, model=Tagger(seed=9))
    assert written and {p.name for p in tmp_path.iterdir()} == {"step-00000005"}
    assert same(run(tmp_path, model=Tagger(seed=9))[0], run()[0])


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_update(tmp_path):
    (tmp_path / "file").write_text("")
    def never(model, batch):
        raise Stop
    for folder in (tmp_path / "file", tmp_path / "file" / "under", "/proc/annotated_nlp"):
        with pytest.raises(OSError, match="folder=.* can't be written.*; give another"):
            run(folder, loss=never)
    with pytest.raises(Stop):
        run(tmp_path / "new" / "deep", loss=never)
    assert not list((tmp_path / "new" / "deep").iterdir())


@pytest.mark.parametrize("every", [None, 10])
def test_evaluation_that_fails_costs_nothing(every, tmp_path):
    "The last checkpoint is there. The same call with a mended evaluation makes up for the one that is missing."
    calls = []
    def evaluate(model):
        calls.append(model.training)
        if len(calls) == 1 + (every is not None):
            raise Stop
        return {"score": model.head.weight.sum().item()}
    whole, history = run(evaluate=lambda model: {"score": model.head.weight.sum().item()}, evaluate_every=every)
    with pytest.raises(Stop):
        run(tmp_path, evaluate=evaluate, evaluate_every=every)
    assert resuming._steps(tmp_path)[-1].name == ("step-00000030" if every is None else "step-00000020")
    resumed, again = run(tmp_path, model=Tagger(seed=9), evaluate=evaluate, evaluate_every=every)
    assert same(resumed, whole) and again.metrics == history.metrics and not any(calls) and not resumed.training
    stored = json.loads((resuming._steps(tmp_path)[-1] / "state.json").read_text())["history"]
    assert stored["metrics"] == history.metrics and {p.name for p in resuming._steps(tmp_path)[-1].iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "state.json"}
    before = len(calls)
    assert run(tmp_path, evaluate=evaluate, evaluate_every=every)[1].metrics == history.metrics and len(calls) == before


def test_foreign_checkpoint(tmp_path):
    run(tmp_path, steps=10)
    with pytest.raises(CheckpointError, match="of another run: lr is 0.5 here and 0.01 there"):
        run(tmp_path, steps=10, lr=0.5)
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="of another model: .*head.weight is absent here"):
        load_checkpoint(tmp_path, model)
    wide = Tagger()
    wide.head = nn.Linear(16, 3)
    before = wide.head.weight.clone()
    with pytest.raises(CheckpointError, match=r"another model: .*head.weight is \(3, 16\) torch.float32 here and \(2, 16\)"):
        run(tmp_path, steps=10, model=wide)
    assert torch.equal(wide.head.weight, before) and len(resuming._steps(tmp_path)) == 2


def test_tied_weights_and_buffers(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("count", torch.tensor([3]))
            self.register_buffer("mask", torch.ones(3), persistent=False)
    model, other = Tied(), Tied()
    other.count += 1
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(tmp_path, model, optimizer, History(loss=[1.0]))
    load_checkpoint(tmp_path, other)
    assert same(model, other) and other.head.weight is other.embedding.weight and other.count == 3
    assert (tmp_path / "step-00000001" / "model.safetensors").stat().st_size < 400


def test_checkpoints_overwrite_nothing(tmp_path):
    "And other optimizers' tensors are kept too; what isn't a tensor isn't theirs to keep."
    model, other = Tagger(), Tagger(seed=1)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    token_loss(model, next(iter(batches(sequences(), 4))))[0].backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, History(loss=[1.0]))
    with pytest.raises(FileExistsError, match="step-00000001 exists"):
        save_checkpoint(tmp_path, model, optimizer, History(loss=[2.0]))
    with pytest.raises(ValueError, match="keep=0"):
        save_checkpoint(tmp_path, model, optimizer, History(loss=[1.0, 2.0]), keep=0)
    assert load_checkpoint(tmp_path, other, fresh).loss == [1.0] and same(model, other)
    assert torch.equal(fresh.state[other.head.weight]["momentum_buffer"], optimizer.state[model.head.weight]["momentum_buffer"])
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    save_checkpoint(tmp_path, model, plain, History(loss=[1.0, 2.0]))


def test_checkpoints_are_no_pickles(tmp_path):
    run(tmp_path, steps=5)
    (folder,) = resuming._steps(tmp_path)
    assert {p.name for p in folder.iterdir()} == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert json.loads((folder / "state.json").read_text())["plan"]["lr"] == 0.01
    for name in ("model", "optimizer"):  # eight bytes of length, then JSON
        start = (folder / f"{name}.safetensors").read_bytes()
        assert json.loads(start[8 : 8 + int.from_bytes(start[:8], "little")])


# The cost


def gpt2(layers=3, d=32, ff=96, vocabulary=50):
    c = transformers.GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=d, n_layer=layers, n_head=4, n_inner=ff, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(c), Shape(vocabulary, d, ff, layers)


def bert(layers=2, d=32, ff=128, vocabulary=60):
    c = transformers.BertConfig(vocab_size=vocabulary, hidden_size=d, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=ff,
                                attn_implementation="eager")
    return transformers.BertForMaskedLM(c), Shape(vocabulary, d, ff, layers, extra=d * d)


def t5(layers=2, encoder_layers=3, d=32, ff=64, vocabulary=60):
    c = transformers.T5Config(vocab_size=vocabulary, d_model=d, d_kv=16, num_heads=4, d_ff=ff, num_layers=encoder_layers, num_decoder_layers=layers,
                              attn_implementation="eager", decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(c), Shape(vocabulary, d, ff, layers, encoder_layers, d_attention=64)


@pytest.mark.parametrize("make", [gpt2, bert, t5])
@pytest.mark.parametrize("n", [8, 33])
def test_flops_are_those_that_pytorch_counts(make, n):
    "To the last operation, but for the first layer's inputs, whose gradient goes into embeddings."
    with torch.device("meta"):
        model, shape = make()
        ids = torch.zeros(1, n, dtype=torch.long)
        inputs = dict(input_ids=ids, labels=ids)
        source = 0
        if shape.encoder_layers:
            source, inputs["input_ids"] = n + 5, torch.zeros(1, n + 5, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(**inputs).loss.backward()
    assert counter.get_total_flops() == pytest.approx(training_flops(shape, n, source), rel=1e-3)


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_matrices_are_those_of_transformers(make):
    with torch.device("meta"):
        model, shape = make()
    beside = ("wpe", "position_embeddings", "token_type", "relative_attention_bias")
    assert shape.matrices == sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and not any(b in name for b in beside))


def test_published_sizes():
    assert Shape(50257, 12288, 4 * 12288, 96).matrices == pytest.approx(175e9, rel=0.01)  # Brown et al. 2020
    assert Shape(32128, 1024, 65536, 24, 24, d_attention=128 * 128).matrices == pytest.approx(11e9, rel=0.04)  # Raffel et al. 2020
    assert Shape(37000, 512, 2048, 6, 6).matrices == pytest.approx(65e6, rel=0.04)  # Vaswani et al. 2017


def test_bad_lengths():
    for target, source, shape in ((0, 0, Shape(9, 8, 8, 1)), (3, 2, Shape(9, 8, 8, 1)), (3, 0, Shape(9, 8, 8, 1, 1))):
        with pytest.raises(ValueError, match="target="):
            training_flops(shape, target, source)


def test_peak_rates():
    assert peak_rate("NVIDIA H100 80GB HBM3") == 989e12 and peak_rate("NVIDIA H100 PCIe") == 756e12
    assert peak_rate("NVIDIA L40S") == 362e12 and peak_rate("NVIDIA L4") == 121e12 and peak_rate("Tesla T4") == 65e12
    assert peak_rate("Tesla V100-PCIE-16GB") == 112e12 and peak_rate("Tesla V100-SXM2-32GB") == 125e12
    assert peak_rate("Tesla P100-PCIE-16GB") == 18.7e12 and peak_rate("TPU v3") == 123e12
    assert peak_rate("NVIDIA A100-SXM4-80GB") == 312e12 and peak_rate("NVIDIA GeForce RTX 4090") == 165e12
    for unknown in ("Abacus", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""):  # a slice of a card has a part of its peak
        with pytest.raises(ValueError, match=f"no peak rate known for '{unknown}'"):
            peak_rate(unknown)


def test_mfu_of_palm():
    "Chowdhery et al. 2022, table 3: 46.2% for PaLM at 238.3K tokens/s on 6,144 TPU v4 chips (48 heads of 256, 118 layers, 2,048 tokens)."
    per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert mfu(per_token, 238.3e3, 6144 * peak_rate("TPU v4")) == pytest.approx(0.462, abs=0.001)


@pytest.mark.parametrize("watts, hours, kwh, pounds", [
    (1415.78, 12, 27, 26), (1515.43, 84, 201, 192), (517.66, 336, 275, 262), (1515.43, 274_120, 656_347, 626_155)])
def test_table_of_strubell(watts, hours, kwh, pounds):
    "Strubell et al. 2019, table 3, as printed."
    assert round(energy(watts, hours)) == kwh and emissions(energy(watts, hours)) == pytest.approx(pounds, abs=0.5)
