"""Side by side: `python -m benchmarks` compares, `growth` asks how cost grows with the work, `switches` what can be
switched on where one text is written.

A run that was interrupted goes on where it was; when all is measured, the result is stored beside the laboratory's.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from annotated_nlp import lab

from . import switches
from .growth import SWEEPS, sweep
from .measure import BEAM, FORWARD, MEASURES, Bout
from .peers import CONTESTS, find_spec

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
PACKAGES = [*lab.PACKAGES, "transformers", *(name for name in ("timm", "ctranslate2") if find_spec(name))]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("peers", "growth", "switches"), default="peers")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these, e.g. BERT-base")
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES, metavar="NAME",
                        help=f"only these of {', '.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--fast", action="store_true", help="our large layers by fast.cpu, stored under another name")
    parser.add_argument("--quick", action="store_true", help="tiny models, two rounds: does it work?")
    args = parser.parse_args(argv)
    known = sorted({contest.name for contest in CONTESTS} | {*switches.NAMES})
    if strange := set(args.models or ()) - set(known):
        parser.error(f"no model {', '.join(sorted(strange))}; there are: {', '.join(known)}")
    return args


class Store:
    """What has been measured, kept after each row in `runs/`, so that a run that is cut off goes on there.

    Rows made with other settings, from another commit or with other versions are forgotten.
    """

    def __init__(self, name: str, command: str, settings: dict, wanted: Iterable[str], quick: bool):
        self.name, self.quick, self.wanted = f"{name}_quick" if quick else name, quick, list(wanted)
        self.rows, self.seconds = {}, 0.0
        facts = dict(command=command, settings=settings, packages=PACKAGES)
        self.empty = lab.new_record(self.name, numbers={}, seconds=0.0, **facts)
        self.path = RUNS / f"{self.name}.{self.empty['device']}.partial.json"
        if self.path.exists():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if all(kept["of"][key] == self.empty[key] for key in ("settings", "commit", "versions")):
                self.rows, self.seconds = kept["rows"], kept["seconds"]

    def add(self, key: str, measured: Callable[[], object]) -> None:
        "Measure, unless it has been."
        if key in self.rows:
            return
        started = time.perf_counter()
        self.rows[key] = measured()
        self.seconds += time.perf_counter() - started
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps(dict(of=self.empty, seconds=self.seconds, rows=self.rows), allow_nan=False)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.path)

    def finish(self) -> str:
        "Store the result if nothing is missing; says where, or what is still to be done."
        missing = [key for key in self.wanted if key not in self.rows]
        if missing:
            return f"Not stored: {len(missing)} of {len(self.wanted)} are still to be measured ({missing[0]}, ...)."
        rows = [self.rows[key] for key in self.wanted if self.rows[key] is not None]
        record = self.empty | dict(numbers=dict(rows=rows), wall_s=round(self.seconds, 1))
        path = lab.store(record, RUNS) if self.quick else lab.store(record)
        self.path.unlink(missing_ok=True)
        return f"Stored in {path}, {self.seconds / 60:.1f} minutes."


def sizes(kind: str) -> dict[str, dict]:
    return {f"{contest.name}, {contest.peer}": asdict(contest.sizes[kind]) for contest in CONTESTS}


def peers(args: argparse.Namespace) -> int:
    "Every contest in every measure."
    device = "cpu" if args.quick else lab.device()
    rounds, kind = (2, "tiny") if args.quick else (args.rounds, device)
    settings = dict(seed=0, rounds=rounds, forward_rounds=FORWARD * rounds, compile=not args.no_compile, beam=BEAM,
                    fast=args.fast, sizes=sizes(kind))
    wanted = {f"{c.name}, {c.peer}: {measure}": (c, measure) for c in CONTESTS for measure in MEASURES}
    name, command = ("bench_fast", 'make bench ARGS="--fast"') if args.fast else ("bench", "make bench")
    store = Store(name, command, settings, wanted, args.quick)
    models = args.models or [contest.name for contest in CONTESTS]
    chosen = {key: (c, m) for key, (c, m) in wanted.items() if c.name in models and m in args.measures}
    bout, at = None, None
    for key, (contest, measure) in (bar := tqdm(chosen.items(), leave=False, disable=not sys.stderr.isatty())):
        bar.set_description(key)
        if key not in store.rows and at is not contest:
            bout = None  # lets the last one's models go
            bout = Bout(contest, device, tiny=args.quick, compile=settings["compile"], rounds=rounds, swap=args.fast)
            at = contest
        store.add(key, lambda: bout.measure(measure))  # noqa: B023
    print(lab.machine())
    print(table([store.rows[key] for key in chosen if store.rows[key]]))
    print(store.finish())
    return 0


def cost(row: dict, side: str) -> str:
    "The median of a side's best way, and which that is."
    mode = row["best"][side]
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s'][side]:,.0f} tokens/s, {mode}"
    middle = statistics.median(row[side][mode])
    return (f"{middle * 1e3:,.1f} ms" if row["unit"] == "s" else f"{middle / 2**20:,.1f} MiB") + f", {mode}"


def table(rows: list[dict]) -> str:
    """One line a row; the ratio is peer to us, so above 1 we are faster or smaller.

    The limit is the ratio if all of ours but the products with weights took no time; `swapped` counts the layers
    that `fast.cpu` changed.
    """
    names = ["model", "measure", "size", "ours", "peer", "ratio", "quartiles", "limit", "eager/eager", "difference"]
    names += ["swapped"]
    lines = [names]
    for row in rows:
        new = f" + {row['new']}" if "new" in row else ""
        lines.append([
            row["model"] + (f" ({row['peer']})" if row["peer"] != "transformers" else ""), row["measure"],
            f"{row['rows']} x {row['length']}{new}", cost(row, "ours"), cost(row, "theirs"), f"{row['ratio']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['ratio'] / row['products']:.2f}" if "products" in row else "",
            f"{row['alike']['eager']:.2f}" if "eager" in row["alike"] else "",
            f"{row['difference']:.0e}", str(row.get("swapped", "")),
        ])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    text += [f"{row['model']}, {row['measure']}: {mode}: {why}" for row in rows for mode, why in row["notes"].items()]
    for row in rows:
        if "mfu" in row:
            text.append(f"{row['model']}: MFU {row['mfu']['ours']:.1%}, peer {row['mfu']['theirs']:.1%}")
    return "\n".join(text)


def growth(args: argparse.Namespace) -> int:
    "Time and memory of ours against length, batch, depth and tokens made, with the exponents that fit them."
    if args.fast:
        print("Growth has no fast side: its matrices are too small for it.")
        return 0
    device = "cpu" if args.quick else lab.device()
    kind = "tiny" if args.quick else device
    settings = dict(seed=0, sweeps=SWEEPS[kind])
    store = Store("bench_growth", "make bench", settings, SWEEPS[kind]["values"], args.quick)
    for name in (bar := tqdm(store.wanted, leave=False, disable=not sys.stderr.isatty())):
        bar.set_description(name)
        store.add(name, lambda: sweep(name, kind, device))  # noqa: B023
    print(lab.machine())
    for row in store.rows.values():
        exponents = ", ".join(f"{what} grows with the power {power:.2f}" for what, power in row["exponents"].items())
        print(f"{row['what']} against {row['against']} ({row['values'][0]} to {row['values'][-1]}): {exponents}")
    print(store.finish())
    return 0


def one_text(args: argparse.Namespace) -> int:
    "What can be switched on where one text at a time is written, on the CPU."
    if lab.device() != "cpu" and not args.quick:
        print("Switches are measured on a CPU: set CUDA_VISIBLE_DEVICES to nothing.")
        return 0
    rounds = 2 if args.quick else args.rounds
    settings = dict(seed=0, rounds=rounds, compile=not args.no_compile)
    store = Store("bench_switches", "make bench", settings, switches.NAMES, args.quick)
    for name in (bar := tqdm(args.models or store.wanted, leave=False, disable=not sys.stderr.isatty())):
        bar.set_description(name)
        store.add(name, lambda: switches.compare(name, rounds, args.quick, settings["compile"]))  # noqa: B023
    print(lab.machine())
    print("\n".join(map(switches.told, store.rows.values())))
    print(store.finish())
    return 0


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=UserWarning)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # All that is compiled comes from the same few lines, and beyond a limit PyTorch would silently compile no more.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        return dict(peers=peers, growth=growth, switches=one_text)[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
