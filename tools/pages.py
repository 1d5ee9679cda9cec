"""Run pages, each in a process of its own: `python -P pages.py FOLDER [--workers 2]`, as `tools.away` calls it.

It needs nothing of the repository, so the Python that has the wheel can run it. On Linux the processes are forked from
one that has imported PyTorch and the rest, read the corpora and computed nothing; elsewhere each begins anew.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from functools import partial
from multiprocessing import connection
from pathlib import Path

from nbdev.config import get_config
from nbdev.test import test_nb

FORKS = sys.platform == "linux"  # macOS's own libraries may not be used in a forked process; Windows has no fork
HEAVY = ("torch._dynamo", "torch.testing", "torch.utils.flop_counter", "transformers.modeling_utils", "accelerate",
         "transformers.generation.utils", "tokenizers", "jaxtyping", "einops", "matplotlib.pyplot", "pandas", "sympy",
         "matplotlib_inline.backend_inline", "scipy.stats", "sacrebleu", "sklearn.linear_model", "sklearn.naive_bayes",
         "sklearn.feature_extraction.text", "sklearn.pipeline")


CORPORA = ("movie_reviews", "review_sentences", "verses", "senses", "python_prose", "handwritten_digits",
           "interface_strings")
MANY = 20  # pages; for fewer it takes longer to read all of this than each page to read its own


def warm(pages: int) -> int | None:
    """Import what most pages import and, for many pages, read what many read. What is missing is the pages' affair.

    Gives the number of threads with which PyTorch begins. In this process it has one alone: a process that is forked
    from one whose pool of threads has worked would wait for these threads for ever.
    """
    for name in HEAVY:
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    threads = None
    if torch := sys.modules.get("torch"):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
    try:  # the package remembers what it has read
        from annotated_nlp.corpora import loaders, packages
        from annotated_nlp.hub import gguf
        reading = [*(getattr(loaders, name) for name in CORPORA), lambda: gguf.opened(packages.smollm2()),
                   *(partial(loaders.number_words, split=split) for split in loaders.SPLITS)] if pages > MANY else []
    except ImportError:
        reading = []
    for read in reading:
        try:
            read()
        except Exception:  # without a network, or without a package
            pass
    gc.freeze()  # else each process's first collection would copy all of it
    return threads


def cpu() -> float:
    "Seconds that this process and those that it waited for have computed."
    return sum(os.times()[:4])


def watch(unfit: list[str]) -> None:
    "From here on, note each drawing that is shown in which things touch, or whose text a phone makes too small."
    from annotated_nlp.show.diagram import Diagram

    draw = Diagram._repr_png_

    def looked_at(drawing):
        touching, smallest = drawing.overlaps(), drawing.smallest_text(390)
        if touching or smallest < 9:
            unfit.append(f"{drawing}: touching {touching}; its smallest text is {smallest:.1f} pixels high "
                         "where it is shown 390 wide, and should be at least 9")
        return draw(drawing)

    Diagram._repr_png_ = looked_at


def one(page: Path, said: Path, report: Path, skip: list[str], path: Path, threads: int | None = None) -> None:
    "In a process of its own: run a page as nbdev_test does, print into `said`, and write `report` at the end of it."
    with said.open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        before, unfit = cpu(), []
        if threads:
            sys.modules["torch"].set_num_threads(threads)
        try:
            watch(unfit)
            passed = test_nb(page, skip_flags=skip, basepath=path)[0] and not unfit
            print(*unfit, sep="\n")
        except BaseException:  # what leaves test_nb, such as a page that can't be read, is a failure to tell of
            traceback.print_exc()
            passed = False
        sys.stdout.flush()
        sys.stderr.flush()
        report.write_text(json.dumps([passed, cpu() - before]), encoding="utf-8")


def finished(process, said: Path, report: Path) -> tuple[bool, float, str]:
    "Whether a page passed, the seconds that it computed, what it printed. If its process ended first, it has failed."
    text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    if report.exists():
        return *json.loads(report.read_text(encoding="utf-8")), text
    return False, 0.0, f"{text}The process ended before the page did, with exit code {process.exitcode}.\n"


def run(pages: list[Path], folder: Path, workers: int, threads: int | None = None) -> list[str]:
    """Run the pages, `workers` at a time in the order given; print what those that fail say, and the ten slowest.

    Gives the names of those that failed.
    """
    # One thread starts them all: a fork beside a thread that holds a lock would hold it for ever.
    start = multiprocessing.get_context("fork" if FORKS else "spawn").Process
    config = get_config()
    skip, waiting, running, failed, times = config.tst_flags.split(), list(pages), {}, [], {}
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < workers:
                page, number = waiting.pop(0), len(waiting)
                name = page.parent.relative_to(folder).as_posix()
                files = Path(scratch) / f"{number}.txt", Path(scratch) / f"{number}.json"
                process = start(target=one, args=(page.resolve(), *files, skip, config.config_path, threads))
                process.start()
                running[process.sentinel] = name, process, files, time.perf_counter()
            for sentinel in connection.wait(list(running)):
                name, process, files, started = running.pop(sentinel)
                process.join()
                passed, computed, text = finished(process, *files)
                times[name] = time.perf_counter() - started
                verdict = "passed" if passed else "FAILED"
                print(f"{verdict} {name}: {times[name]:.1f} s, computing {computed:.1f} s", flush=True)
                if not passed:
                    failed.append(name)
                    print(text, file=sys.stderr, flush=True)
    slowest = sorted(times.items(), key=lambda item: -item[1])[:10]
    print("The slowest:", *(f"{seconds:6.1f} s  {name}" for name, seconds in slowest), sep="\n", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="each page stands in a folder of its name, somewhere in it")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    # The largest first, which take longest, as a rule: so both workers end at about the same time.
    pages = sorted(args.folder.rglob("*.ipynb"), key=lambda page: -page.stat().st_size)
    threads = warm(len(pages)) if FORKS and len(pages) > args.workers else None
    failed = run(pages, args.folder, args.workers, threads and max(1, threads // args.workers))
    print(f"{len(pages) - len(failed)} of {len(pages)} pages passed", flush=True)
    if failed:
        print("These failed:", *failed, sep="\n  ", file=sys.stderr)
    return 1 if failed or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
