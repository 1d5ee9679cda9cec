"Outputs are compared first; then both sides are run in turn, and every round gives one ratio."

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from annotated_nlp.parts import fast
from annotated_nlp.tasks.costs import mfu, peak_rate, training_flops

from .peers import Contest

Key = tuple[str, str]  # side, mode
SIDES = "ours", "theirs"
MEASURES = "forward", "greedy-1", "greedy-32", "beam-1", "beam-32", "training", "memory"  # training changes weights
BEAM = 4
FORWARD = 4  # times as many rounds: a pass is short, and ten of them leave its ratio open by two percent
# What each way of running asks of the compiler. Its own order of operations is meant to need less memory, and in some
# models it needs more memory and time; in a training step both sides may also keep the order that was written.
COMPILED = {"compiled": {}, "in order": {"reorder_for_peak_memory": False}}
# Largest difference that may be, as a share of the largest entry.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Different(RuntimeError):
    "The two sides don't compute the same, so that their times say nothing."


def difference(found: Tensor, wanted: Tensor) -> float:
    "The largest, as a share of the largest entry."
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def interleave(
    calls: dict[Key, Callable], rounds: int, device: str, tiny: bool = False
) -> dict[Key, list[float]]:
    """Seconds for each call in each round; the order turns from round to round.

    A call that takes less than 50 ms is repeated within its turn. Where all is `tiny`, nobody reads the times:
    each call is made once, and nothing is cleared away before.
    """

    def seconds(call: Callable, repeats: int) -> float:
        wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        wait(device)
        return (time.perf_counter() - started) / repeats

    warm = [seconds(call, 1) for call in calls.values()]
    repeats = 1 if tiny else min(50, math.ceil(0.05 / min(warm)))
    times, order = {key: [] for key in calls}, list(calls)
    if not tiny:
        gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key in order:
                times[key].append(seconds(calls[key], repeats))
            order.append(order.pop(0))
    finally:
        gc.enable()
    return times


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summary(costs: dict[Key, list[float]]) -> dict:
    """Ratios of peer to us, round by round, between the best mode of each: above 1 we are faster, or need less.

    The median, and the quartiles as its spread; `alike` has the medians for modes that both sides have.
    """
    sides = {side: {mode: costs[s, mode] for s, mode in costs if s == side} for side in SIDES}
    best = {side: min(modes, key=lambda mode: statistics.median(modes[mode])) for side, modes in sides.items()}

    def ratios(ours: str, theirs: str) -> list[float]:
        return [b / a for a, b in zip(sides["ours"][ours], sides["theirs"][theirs])]

    rounds = ratios(best["ours"], best["theirs"])
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else rounds * 3
    alike = {mode: statistics.median(ratios(mode, mode)) for mode in sides["ours"] if mode in sides["theirs"]}
    return dict(ratio=statistics.median(rounds), low=low, high=high, best=best, alike=alike, **sides)


def per_second(row: dict, tokens: int) -> dict[str, float]:
    "Tokens per second of each side in its best mode."
    return {side: tokens / statistics.median(row[side][mode]) for side, mode in row["best"].items()}


def size_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    "Bytes of weights and of what the optimizer remembers."
    held = [*model.parameters(), *model.buffers()]
    held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return sum(x.untyped_storage().nbytes() for x in {x.data_ptr(): x for x in held}.values())


def growth_of(call: Callable, device: str) -> int:
    "By how many bytes the tensors that are alive grow at the highest point of a call."
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        wait(device)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


# Products with weights, as PyTorch and oneDNN name them.
PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::mkldnn_convolution", "mkldnn::_linear_pointwise"
}


def products(call: Callable) -> float:
    "The share of a call's time on the CPU that products with weights take: without them nothing can be computed."
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
    return sum(e.self_cpu_time_total for e in profile.key_averages() if e.key in PRODUCTS) / 1e6 / seconds


class Bout:
    """One contest on one device: both models with the same weights, and the ways of running them.

    The products of both are PyTorch's; with `swap` ours have those of `fast.cpu`.
    """

    def __init__(
        self, contest: Contest, device: str, *, tiny: bool, compile: bool, rounds: int, swap: bool = False
    ):
        torch.manual_seed(0)
        torch.compiler.reset()  # the last bout's programs, which are kept by the lines that they were made from
        self.contest, self.device, self.rounds, self.tiny = contest, device, rounds, tiny
        self.size = contest.sizes["tiny" if tiny else device]
        ours = contest.ours(tiny)
        self.models = {"ours": ours, "theirs": contest.theirs(ours)}
        for model in self.models.values():
            model.to(device).eval()
        self.swapped = fast.cpu(ours).changed if swap else None
        self.batch = {name: x.to(device) for name, x in contest.batch(ours, self.size).items()}
        self.modes = ("eager", "compiled") if compile else ("eager",)
        self.optimizers, self._made = {}, {}
        # What is timed: on a card weights of 16 bits, and training by autocast; float32 elsewhere.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def measure(self, name: str) -> dict | None:
        "The row of the table for one of `MEASURES`; None where a contest hasn't it."
        kind, _, rows = name.partition("-")
        if rows and not self.contest.generates:
            return None
        result = self._writing(kind, int(rows)) if rows else getattr(self, kind)()
        facts = dict(model=self.contest.name, peer=self.contest.peer, measure=name)
        return facts | ({} if self.swapped is None else dict(swapped=len(self.swapped))) | result

    # Measures

    def forward(self) -> dict:
        "Logits in evaluation mode, without gradients."
        calls = self._calls("logits")
        with torch.no_grad():
            calls, outputs, notes = self._tried(calls)
            found = self._compare(outputs)
            with self._as_timed():
                self._compare(self._tried(calls)[1], self.dtype)
                return self._timed(calls, found, notes, FORWARD * self.rounds)

    def training(self) -> dict:
        "Loss, backward pass and a step of AdamW."
        calls, found, notes = self._steps
        row = self._timed(calls, found, notes)
        shape = self.contest.shape(self.models["ours"])
        if shape and self.device == "cuda":
            try:
                peak = peak_rate(torch.cuda.get_device_name())
            except ValueError as error:
                row["notes"] |= {"mfu": str(error)}
            else:
                flops = training_flops(shape, self.size.length) / self.size.length
                rates = per_second(row, self.size.rows * self.size.length)
                row["mfu"] = {side: mfu(flops, rate, peak) for side, rate in rates.items()}
        return row

    def memory(self) -> dict:
        "Bytes of tensors at the highest point of a training step: weights, AdamW's averages, gradients, activations."
        calls, found, notes = self._steps
        peaks = {}
        for (side, mode), call in calls.items():
            call()
            peaks[side, mode] = [size_of(self.models[side], self.optimizers[side]) + growth_of(call, self.device)]
        return self._row("B", peaks, found, notes)

    def _writing(self, kind: str, rows: int) -> dict:
        "Generation: the same tokens, and then the time for them."
        size, beam = self.size, BEAM if kind == "beam" else 1
        new = size.new if rows == 1 else max(1, size.new // (4 if beam == 1 else 8))  # no call shall take much longer
        vocab_size = self.models["ours"].config.vocab_size
        prompts = torch.randint(4, vocab_size, (rows, size.prompt)).to(self.device)
        # On the CPU compiling our step gains nothing for many rows; on a card transformers compiles for its static
        # cache by itself.
        own = self.modes if self.device == "cuda" or rows == 1 else ("eager",)
        modes = {"ours": own, "theirs": ("dynamic", "static")}
        calls = {}
        for side in SIDES:
            for mode in modes[side]:
                write = self.contest.writer(side, mode, self.models[side])
                calls[side, mode] = lambda write=write: write(prompts, new, beam)
        with torch.no_grad():
            calls, outputs, notes = self._tried(calls)
            wanted = outputs["theirs", "dynamic"]
            for key, found in outputs.items():
                if not torch.equal(found, wanted):
                    raise Different(f"{self.contest.name}, {kind} at batch {rows}: {' '.join(key)} writes other tokens")
            with self._as_timed():
                row = self._timed(calls, 0.0, notes)
        row |= dict(rows=rows, length=size.prompt, new=new, beam=beam)
        return row | dict(tokens_per_s=per_second(row, rows * new))

    def _timed(
        self, calls: dict[Key, Callable], found: float, notes: dict[str, str], rounds: int | None = None
    ) -> dict:
        "A row of seconds; on a CPU with the share of `products` in our best mode."
        row = self._row("s", interleave(calls, rounds or self.rounds, self.device, self.tiny), found, notes)
        if self.device == "cpu":
            row["products"] = products(calls["ours", row["best"]["ours"]])
        return row

    def _row(self, unit: str, costs: dict[Key, list[float]], found: float, notes: dict[str, str]) -> dict:
        facts = dict(rows=self.size.rows, length=self.size.length, unit=unit, difference=found, notes=notes)
        return facts | summary(costs)

    # What they are made of

    def _calls(self, what: str) -> dict[Key, Callable]:
        "Each side's `logits` or `loss` of the batch, in each mode; compiled once."
        modes = [*self.modes, "in order"] if what == "loss" and "compiled" in self.modes else self.modes
        for side in SIDES:
            for mode in modes:
                if (what, side, mode) not in self._made:

                    def call(side=side):
                        return getattr(self.contest, what)(side, self.models[side], self.batch)

                    if mode in COMPILED:
                        call = torch.compile(call, dynamic=False, options=COMPILED[mode])
                    self._made[what, side, mode] = call
        return {(side, mode): self._made[what, side, mode] for side in SIDES for mode in modes}

    def _tried(self, calls: dict[Key, Callable]) -> tuple[dict[Key, Callable], dict[Key, Tensor], dict[str, str]]:
        "Those that run, what they give, and why the others don't. The first mode of each side has to."
        outputs, notes = {}, {}
        for side, mode in calls:
            try:
                outputs[side, mode] = calls[side, mode]()
            except Exception as error:
                if side not in {s for s, _ in outputs}:
                    raise
                notes[f"{side}, {mode}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        return {key: calls[key] for key in outputs}, outputs, notes

    def _compare(self, outputs: dict[Key, Tensor], dtype: torch.dtype = torch.float32) -> float:
        "The largest difference from the peer's plain way of running; raises `Different` when it is too large."
        worst = 0.0
        for key, found in outputs.items():
            off = difference(found, outputs["theirs", "eager"])
            if not off <= TOLERANCE[dtype]:
                raise Different(
                    f"{self.contest.name}: {' '.join(key)} differs from {self.contest.peer} by {off:.1e} of the "
                    f"largest entry, in {dtype}; {TOLERANCE[dtype]:.0e} may be"
                )
            worst = max(worst, off)
        return worst

    @contextmanager
    def _as_timed(self) -> Iterator[None]:
        "Weights and inputs in the type that is timed."

        def cast(dtype: torch.dtype) -> None:
            for model in self.models.values():
                model.to(dtype)
            self.batch |= {name: x.to(dtype) for name, x in self.batch.items() if x.is_floating_point()}

        cast(self.dtype)
        try:
            yield
        finally:
            cast(torch.float32)

    @cached_property
    def _steps(self) -> tuple[dict[Key, Callable], float, dict[str, str]]:
        "Training steps, once losses and gradients agree, and the losses after an update too."
        for side, model in self.models.items():
            if side not in self.optimizers:
                self.optimizers[side] = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        losses = self._calls("loss")

        def probe(key: Key) -> Tensor:
            "Loss and the norm of its gradient."
            value = losses[key]()
            value.backward()
            norm = get_total_norm([p.grad for p in self.models[key[0]].parameters() if p.grad is not None])
            self.optimizers[key[0]].zero_grad()
            return torch.stack([value.detach(), norm])

        def agree(calls: dict[Key, Callable], what: slice) -> tuple[dict[Key, Callable], float, dict[str, str]]:
            calls, outputs, notes = self._tried(calls)
            numbers = zip(*(output[what] for output in outputs.values()))
            return calls, max(self._compare(dict(zip(outputs, values))) for values in numbers), notes

        def step(key: Key) -> None:
            with torch.autocast(self.device, self.dtype, enabled=self.device == "cuda"):
                value = losses[key]()
            value.backward()
            self.optimizers[key[0]].step()
            self.optimizers[key[0]].zero_grad()

        probes, found, notes = agree({key: lambda key=key: probe(key) for key in losses}, slice(2))
        for side in SIDES:
            step((side, "eager"))
        # AdamW's first step moves every weight by the full rate, also where the gradient is nothing but rounding. The
        # loss doesn't feel that; the next gradient of T5-base does, by 2e-4 of its norm.
        agree({(side, "eager"): probes[side, "eager"] for side in SIDES}, slice(1))
        return {key: lambda key=key: step(key) for key in probes}, found, notes
