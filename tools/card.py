"""Where no GPU is: `python -m tools.card 09_contextual lab/heads` names the cells of these pages that mix devices.

What `lab.device()` gives and where Accelerate trains is the "card" of tests/second_device.py. Trainings stop after two
updates, so a page's own assertions may fail, and what the card lacks, such as generators: such cells are counted.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import torch

from . import chapters

ROOT = Path(__file__).resolve().parent.parent
MIXED = ("on the same device", "can't convert card", "storage on different device")


def prepare() -> None:
    "Make the card the device of this process, and trainings short."
    os.environ["ACCELERATE_TORCH_DEVICE"] = "card"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import second_device  # noqa: F401 (makes the device)
    from annotated_nlp import lab, training
    from torch.utils._pytree import tree_map

    torch.set_num_threads(1)
    lab.device = lambda: "card"
    fit, save = training.fit, torch.save

    def short(*args, **options):
        options |= dict(epochs=None, steps=2, warmup=0, compile=False)
        return fit(*args, **options)

    def copied(kind):
        plain = kind.__deepcopy__

        def copy(x, memo):  # PyTorch's own ends the process on the card
            if x.device.type != "card":
                return plain(x, memo)
            if id(x) not in memo:
                new = x.detach().clone()
                memo[id(x)] = torch.nn.Parameter(new, x.requires_grad) if isinstance(x, torch.nn.Parameter) else new
            return memo[id(x)]

        kind.__deepcopy__ = copy

    copied(torch.nn.Parameter)
    copied(torch.Tensor)
    training.fit = short
    here = lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x
    plain = lambda what: dict(what) if isinstance(what, dict) else what
    torch.save = lambda what, *args, **options: save(tree_map(here, plain(what)), *args, **options)


def mixed(page: Path) -> tuple[list[str], int]:
    "Run a page to its end, whatever fails: a line for each cell that mixed devices, and how many failed otherwise."
    prepare()
    from IPython.core.interactiveshell import InteractiveShell

    os.environ["MPLBACKEND"] = "agg"
    cells, found, others = nbformat.read(page, as_version=4).cells, [], 0
    os.chdir(page.parent)
    shell = InteractiveShell.instance(colors="NoColor")
    for i, cell in enumerate(cells):
        if cell.cell_type != "code":
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = shell.run_cell(cell.source)
        error = result.error_before_exec or result.error_in_exec
        if error is not None and any(words in str(error) for words in MIXED):
            found.append(f"{page.stem}, cell {i}, {type(error).__name__}: {str(error).splitlines()[0]}")
        elif error is not None:
            others += 1
    return found, others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="pages, e.g. 03_seq2seq or lab/heads")
    names = parser.parse_args().names
    if len(names) > 1:  # each in a process of its own
        return max(subprocess.run([sys.executable, "-m", "tools.card", name], cwd=ROOT).returncode for name in names)
    page = chapters.page(names[0])
    if not page.exists():
        sys.exit(f"no notebook {names[0]!r}: give names as 03_seq2seq or lab/heads")
    if torch.cuda.is_available():
        sys.exit("A CUDA device is here, beside which the stand-in isn't made: `make gpu` asks the device itself.")
    found, others = mixed(page)
    print(*found, f"{names[0]}: {len(found)} cells mix devices, {others} failed otherwise", sep="\n", flush=True)
    os._exit(bool(found))  # the card's tensors may not outlive PyTorch


if __name__ == "__main__":
    sys.exit(main())
