"The benchmarks compare before they time, say what they measured, and can be cut off."

import json
import math
from pathlib import Path

import numpy as np
import pytest
import test_invariants
import torch
from annotated_nlp import lab
from annotated_nlp.parts import fast
from annotated_nlp.parts.fast import affine
from benchmarks import __main__ as bench
from benchmarks import growth, measure, peers, switches
from test_lab import KEYS
from torch import nn

unchecked = test_invariants.unchecked  # as a user has the package, which torch.compile needs
STORED = Path(lab._folder())
TINY = dict(device="cpu", tiny=True, compile=False, rounds=2)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    "Nothing is written but here."
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    monkeypatch.setattr(lab, "_folder", lambda: pytest.fail("a quick run stores nothing beside the package"))
    monkeypatch.setattr(lab, "_commit", lambda: "0" * 40)
    return tmp_path


def stored(folder):
    (file,) = folder.iterdir()
    return json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


# A quick run


def test_every_model_in_every_measure(runs, capsys):
    assert bench.main(["--quick", "--no-compile"]) == 0
    record = stored(runs)
    assert set(record) == KEYS and "transformers" in record["versions"] and record["wall_s"] > 0
    rows = record["numbers"]["rows"]
    writers = {c.name for c in peers.CONTESTS if c.generates}
    wanted = {(c.name, c.peer, m) for c in peers.CONTESTS for m in measure.MEASURES if "-" not in m or c.name in writers}
    assert {(row["model"], row["peer"], row["measure"]) for row in rows} == wanted and len(rows) == len(wanted)
    for row in rows:
        assert row["difference"] <= measure.TOLERANCE[torch.float32] and not row["notes"]
        ours, theirs = (row[side][row["best"][side]] for side in measure.SIDES)
        rounds = {"memory": 1, "forward": record["settings"]["forward_rounds"]}.get(row["measure"], 2)
        assert len(ours) == len(theirs) == rounds and min(ours + theirs) > 0
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["ratio"] == pytest.approx(np.median(np.divide(theirs, ours)))
        for side in measure.SIDES:
            assert np.median(row[side][row["best"][side]]) == min(map(np.median, row[side].values()))
        assert row["measure"] == "memory" or 0 < row["products"] < 1
        if "-" in row["measure"]:
            assert set(row["theirs"]) == {"dynamic", "static"} and set(row["ours"]) == {"eager"} and row["new"] >= 1
    printed = capsys.readouterr().out
    assert all(row["model"] in printed for row in rows) and "Stored in" in printed


def test_interrupted_run_goes_on(runs, monkeypatch, capsys):
    measured, whole = [], measure.Bout.measure

    def counted(self, name):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return whole(self, name)

    args = ["--quick", "--no-compile", "--models", "BERT-base", "--measures", "forward", "training", "memory"]
    monkeypatch.setattr(measure.Bout, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(args)
    monkeypatch.setattr(measure.Bout, "measure", lambda self, name: measured.append(name) or whole(self, name))
    bench.main(args)
    assert measured == ["forward", "training", "memory"]
    monkeypatch.setattr(lab, "_commit", lambda: "1" * 40)  # other source: what was measured no longer counts
    bench.main([*args[:-2]])
    assert measured[3:] == ["forward"]
    assert "Not stored" in capsys.readouterr().out


def test_fast_side(runs, capsys, monkeypatch):
    "Only ours is swapped, all of its layers; its outputs are still compared, and it has a file of its own."
    calls, whole = [], fast.cpu
    monkeypatch.setattr(fast, "_LARGE", 0)
    monkeypatch.setattr(fast, "cpu", lambda model: calls.append(model) or whole(model))
    args = ["--quick", "--no-compile", "--models", "BERT-base", "--measures", "forward", "greedy-1", "training"]
    monkeypatch.setattr(peers, "CONTESTS", peers.CONTESTS[:1])
    monkeypatch.setattr(bench, "CONTESTS", peers.CONTESTS)
    monkeypatch.setattr(bench, "MEASURES", tuple(args[-3:]))
    bench.main(args)
    assert not calls and all("swapped" not in row for row in stored(runs)["numbers"]["rows"])
    bench.main([*args, "--fast"])
    (ours,) = calls
    count = sum(type(m) is fast.Linear for m in ours.modules())
    assert type(ours).__module__ == "annotated_nlp.bert" and count == sum(isinstance(m, nn.Linear) for m in ours.modules())
    fast_side, plain = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(runs.iterdir()))
    assert [r["settings"]["fast"] for r in (plain, fast_side)] == [False, True]
    assert [row["swapped"] for row in fast_side["numbers"]["rows"]] == [count, count]
    assert bench.main(["growth", "--quick", "--fast"]) == 0 and "too small" in capsys.readouterr().out


def test_unknown_names_are_refused(capsys):
    for args in (["--models", "BERT"], ["--measures", "speed"]):
        with pytest.raises(SystemExit):
            bench.main(args)
        assert args[1] in capsys.readouterr().err


# Compared before anything is timed


class Perturbed:
    "A contest whose peer has one weight matrix that is a little off."

    def __init__(self, contest, factor):
        self.contest, self.factor = contest, factor

    def __getattr__(self, name):
        return getattr(self.contest, name)

    def theirs(self, ours):
        model = self.contest.theirs(ours)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        with torch.no_grad():
            matrices[-1].mul_(self.factor)
        return model


@pytest.mark.parametrize("name", ["forward", "training", "memory"])
@pytest.mark.parametrize("contest", peers.CONTESTS, ids=lambda c: f"{c.name}, {c.peer}")
def test_perturbed_model_is_refused(contest, name, monkeypatch):
    monkeypatch.setattr(measure, "interleave", lambda *_: pytest.fail("timed"))
    with pytest.raises(measure.Different, match=contest.name):
        measure.Bout(Perturbed(contest, 1.02), **TINY).measure(name)


@pytest.mark.parametrize("name", ["greedy-1", "beam-32"])
@pytest.mark.parametrize("contest", [c for c in peers.CONTESTS if c.name in ("GPT-2 124M", "T5-small")], ids=lambda c: c.name)
def test_perturbed_model_writes_other_tokens(contest, name, monkeypatch):
    monkeypatch.setattr(measure, "interleave", lambda *_: pytest.fail("timed"))
    with pytest.raises(measure.Different, match="other tokens"):
        measure.Bout(Perturbed(contest, -30.0), **TINY).measure(name)


def test_mode_that_fails_is_noted():
    "As compiling does where there is no C++ compiler."
    bout = measure.Bout(peers.CONTESTS[0], **TINY)
    bout.modes = ("eager", "compiled")

    def broken():
        raise RuntimeError("no compiler\nhere")

    bout._made = {("logits", side, "compiled"): broken for side in measure.SIDES}
    row = bout.measure("forward")
    assert row["notes"] == {f"{side}, compiled": "RuntimeError: no compiler" for side in measure.SIDES}
    assert row["best"] == dict(ours="eager", theirs="eager") and set(row["alike"]) == {"eager"}
    assert "no compiler" in bench.table([row])


def test_every_side_is_really_compiled(monkeypatch, unchecked):
    "Programs are counted: logits and loss of both sides have theirs in the second contest too, and keep them."
    programs, whole, orders = [], torch.compile, []

    def count(graph, inputs):
        programs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    def compiled(f, options, **how):
        orders.append(options.get("reorder_for_peak_memory", True))
        return whole(f, backend=count, **how)

    monkeypatch.setattr(measure.torch, "compile", compiled)
    for contest in peers.CONTESTS[:2]:
        bout, before = measure.Bout(contest, **TINY | dict(compile=True)), len(programs)
        for name in ("forward", "training", "memory"):
            row = bout.measure(name)
            modes = {"eager", "compiled"} if name == "forward" else {"eager", "compiled", "in order"}
            assert not row["notes"] and set(row["ours"]) == set(row["theirs"]) == modes
            added, before = len(programs) - before, len(programs)
            assert added == 0 if name == "memory" else added >= 2
    assert orders == 2 * [True, True, True, False, True, False]  # logits, then loss, of both sides
    assert min(programs) > 20  # operations: not a shell around something that was left as it is


# What the numbers mean


def test_ratio_is_peer_to_us_with_the_best_of_each():
    times = {("ours", "eager"): [1.0, 2.0, 1.0, 1.0, 1.0], ("ours", "compiled"): [4.0] * 5,
             ("theirs", "eager"): [9.0] * 5, ("theirs", "compiled"): [2.0, 2.0, 4.0, 3.0, 5.0]}
    found = measure.summary(times)
    assert found["best"] == dict(ours="eager", theirs="compiled")
    assert (found["low"], found["ratio"], found["high"]) == (2.0, 3.0, 4.0)
    assert found["alike"] == dict(eager=9.0, compiled=0.75)


def test_calls_take_turns_after_a_warm_up(monkeypatch):
    clock, made = [0.0], []

    def call(name, seconds):
        def run():
            made.append(name)
            clock[0] += seconds if made.count(name) > 1 else 100.0  # the first one compiles
        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure.interleave({("ours", "a"): call("a", 1.0), ("theirs", "b"): call("b", 3.0)}, 4, "cpu")
    assert found == {("ours", "a"): [1.0] * 4, ("theirs", "b"): [3.0] * 4}
    assert "".join(made) == "ab" + "abbaabba"


def test_short_calls_are_repeated(monkeypatch):
    clock = [0.0]

    def call():
        clock[0] += 0.01

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    (times,) = measure.interleave({("ours", "a"): call}, 3, "cpu").values()
    assert times == pytest.approx([0.01] * 3) and clock[0] == pytest.approx(0.01 * (1 + 3 * 5))


def test_bytes_of_a_call_are_those_alive_at_once():
    x = torch.zeros(1000)

    def call():
        a = x + 1  # 4,000 bytes
        b = a + 1  # 8,000
        del a
        c = torch.cat([b, b, b])  # 16,000
        del b, c
        return x + 1

    assert measure.growth_of(call, "cpu") == pytest.approx(16_000, rel=0.02)


def test_share_of_products():
    x, weight = torch.randn(512, 1024), torch.randn(1024, 1024, requires_grad=True)
    assert measure.products(lambda: x.exp()) == 0
    # PyTorch's own names, and the operation of `annotated_nlp.parts.fast`; both ways.
    shares = [measure.products(lambda f=f: f(x, weight).sum().backward()) for f in (torch.nn.functional.linear, affine)]
    assert all(0.5 < share <= 1 for share in shares)


def test_bytes_of_a_model_count_tied_weights_once():
    model = nn.ModuleDict(dict(a=nn.Linear(10, 10, bias=False), b=nn.Linear(10, 10, bias=False)))
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["a"](torch.ones(1, 10)).sum().backward()
    assert measure.size_of(model, optimizer) == 400
    optimizer.step()
    assert measure.size_of(model, optimizer) == 3 * 400 + 4  # two averages, and a count of updates


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_a_power_law(power):
    x = [16, 64, 100, 1000]
    assert growth.exponent(x, [3 * a**power for a in x]) == pytest.approx(power)
    assert growth.exponent(x, [3 * a**power * b for a, b in zip(x, [1.1, 0.9, 0.9, 1.1])]) == pytest.approx(power, abs=0.1)


def test_growth(runs, capsys):
    assert bench.main(["growth", "--quick"]) == 0
    record = stored(runs)
    assert set(record) == KEYS
    rows = {row["against"]: row for row in record["numbers"]["rows"]}
    assert set(rows) == {"length", "rows", "depth", "tokens made", "beam"}
    for row in rows.values():
        costs = {"time": row["seconds"], "memory": row.get("bytes")}
        assert row["exponents"] == pytest.approx({k: growth.exponent(row["values"], costs[k]) for k in row["exponents"]})
    assert rows["depth"]["bytes"] == sorted(rows["depth"]["bytes"]) and "power" in capsys.readouterr().out


# What is stored in this repository


@pytest.mark.parametrize("file", sorted(STORED.glob("bench*.json")), ids=lambda file: file.name)
def test_stored_result_belongs_to_the_present_sizes(file):
    "A benchmark whose sizes were changed has to be run again."
    record = json.loads(file.read_text(encoding="utf-8"))
    kind = "cpu" if record["device"].startswith("cpu") else "cuda"
    if record["name"] == "bench_growth":
        assert record["settings"]["sweeps"] == json.loads(json.dumps(growth.SWEEPS[kind]))
    elif record["name"] == "bench_switches":
        rows = record["numbers"]["rows"]
        assert {row["model"]: (row["prompts"], row["length"], row["new"]) for row in rows} == switches.SIZES
    else:
        now = bench.sizes(kind)
        assert {key: now[key] for key in record["settings"]["sizes"] if "timm" not in key} == {
            key: size for key, size in record["settings"]["sizes"].items() if "timm" not in key}
        assert record["settings"]["rounds"] >= 10 and record["settings"]["compile"]


# What can be switched on


def test_switches(runs, capsys):
    assert bench.main(["switches", "--quick", "--no-compile"]) == 0
    rows = stored(runs)["numbers"]["rows"]
    assert [row["model"] for row in rows] == [*switches.NAMES]
    for row in rows:
        ways = {(way["side"], way["way"]): way for way in row["ways"]}
        assert {("ours", "plain"), ("ours", "fast.cpu"), ("ours", "int8"), ("theirs", "dynamic"), ("theirs", "static")} <= {*ways}
        assert all(way["same"] == 1 for (_, name), way in ways.items() if "int8" not in name)
        assert ways["theirs", row["best"]]["ratio"] == 1 and row["bandwidth"] > 1e8
        plain, rounded = ways["ours", "plain"], ways["ours", "int8"]
        assert 2 < plain["bytes"] / rounded["bytes"] < 4 and plain["limit"] < rounded["limit"]
    text = {way["way"]: way for way in rows[0]["ways"] if way["side"] == "ours"}
    assert "speculative" in text and 0 < text["int8"]["bits_per_byte"] - text["plain"]["bits_per_byte"] + 0.01 < 0.02
    printed = capsys.readouterr().out
    assert "speculative, int8" in printed and "Stored in" in printed


def test_a_way_that_writes_other_tokens_is_refused(monkeypatch):
    whole = switches.ours

    def wrong(of, compile):
        ways = whole(of, compile)
        model, write = ways["fast.cpu"]
        return ways | {"fast.cpu": (model, lambda prompt: [(write(prompt)[0] + 1) % 90, *write(prompt)[1:]])}

    monkeypatch.setattr(switches, "ours", wrong)
    with pytest.raises(measure.Different, match="fast.cpu, writes other tokens"):
        switches.compare("GPT-2 124M", 1, True, False)


def test_bits_and_bytes_of_a_model_that_knows_nothing():
    of = switches.subject("the book's GPT", True)
    with torch.no_grad():
        of.gpt.embedding.tokens.weight.zero_()
    tokens, size = sum(ids.shape[1] - 1 for ids, _ in of.texts), sum(size for _, size in of.texts)
    assert switches.bits_per_byte(of.gpt, of.texts) == pytest.approx(tokens * math.log2(of.gpt.config.vocab_size) / size)
    c = of.gpt.config
    block = 12 * c.d_model**2 + 13 * c.d_model  # d_ff is 4 d; biases and two norms
    assert switches.read_each_token(of.gpt) == 4 * (c.vocab_size * c.d_model + c.n_layers * block + 2 * c.d_model)
