"""The folded solutions of a chapter's exercises, run: `python -m tools.solutions [--quick] [05_attention ...]`.

They run behind the chapter, in its namespace and in order, as for a reader who pastes them in at the end of the page.
One that trains begins with a line that names its sizes, and smaller ones with which `--quick` and `tools.away` run it:

    steps, seeds = 300, 3  # smaller: 5, 1
"""

import argparse
import ast
import re
import sys
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from .chapters import NBS, _without_debris

EXERCISE = re.compile(r"^\*\*(\d+)\.\*\*", re.M)
SOLUTION = re.compile(r'^::: \{\.callout-note collapse="true"\}\n## Solution\n(.*?)^:::$', re.M | re.S)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
SIZES = re.compile(r"^(\w+(?:, \w+)*) = (.+?)  # smaller: (.+)$", re.M)


def extract(nb) -> dict[str, str]:
    """The code of each solution by the number of its exercise, in order; several blocks of one become one.

    ValueError if an exercise has no solution, or more than one.
    """
    prose = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    exercises = prose.partition("\n## Exercises\n")[2].partition("\n## References\n")[0]
    *parts, rest = SOLUTION.split(exercises)
    numbers = [EXERCISE.findall(question) for question in parts[::2]] + [EXERCISE.findall(rest)]
    if any(len(some) != 1 for some in numbers[:-1]) or numbers[-1]:
        raise ValueError(f"give each exercise one solution: before each, and behind the last, stand {numbers}")
    return {number: "\n\n".join(block.strip("\n") for block in BLOCK.findall(answer))
            for (number,), answer in zip(numbers, parts[1::2])}


def quick(code: str) -> str:
    "The code with its smaller sizes, if it names any. ValueError if the line that names them is not of the form above."
    lines = SIZES.findall(code)
    if len(lines) != code.count("# smaller") or len(lines) > 1 or not all(map(fits, lines)):
        raise ValueError(f"give sizes in one line, such as `steps, seeds = 300, 3  # smaller: 5, 1`, not so:\n{code}")
    return SIZES.sub(r"\1 = \3", code)


def fits(line: tuple[str, str, str]) -> bool:
    "Whether both values of a line are written out, one for each name, and differ."
    count = line[0].count(",") + 1
    try:
        full, small = map(ast.literal_eval, line[1:])
    except (SyntaxError, ValueError):
        return False
    return full != small and (count == 1 or all(isinstance(v, tuple) and len(v) == count for v in (full, small)))


def append(nb, smaller: bool = True) -> list:
    "Put the solutions behind the notebook's cells, a cell for each; give these cells."
    cells = [nbformat.v4.new_code_cell(f"# Solution of exercise {number}\n{quick(code) if smaller else code}")
             for number, code in extract(nb).items() if code]
    nb.cells += cells
    return cells


def run(name: str, smaller: bool) -> tuple[float, int]:
    "Run a chapter and its solutions, print what these show and take; give their seconds together and how many failed."
    nb = nbformat.read(NBS / f"{name}.ipynb", as_version=4)
    page, total, failed = len(nb.cells), 0.0, 0
    append(nb, smaller)
    client = NotebookClient(nb, timeout=None, kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(NBS)}})
    with client.setup_kernel():
        for i, cell in enumerate(nb.cells):
            started = time.perf_counter()
            try:
                client.execute_cell(cell, i)
            except CellExecutionError as error:
                if i < page:
                    raise
                print(error)
                failed += 1
            if i >= page:
                seconds = time.perf_counter() - started
                total += seconds
                _without_debris(cell)
                shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
                title = cell.source.splitlines()[0].removeprefix("# Solution of ")
                print(f"{name}, {title}: {seconds:.1f} s", *shown, sep="\n", flush=True)
    return total, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="chapters, e.g. 05_attention; all when none is named")
    parser.add_argument("--quick", action="store_true", help="with the smaller sizes")
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in NBS.glob("[0-9]*.ipynb"))
    results = [run(name.removesuffix(".ipynb"), args.quick) for name in names]
    print(f"{sum(seconds for seconds, _ in results):.0f} s for all solutions, {sum(n for _, n in results)} failed")
    return sum(n for _, n in results)


if __name__ == "__main__":
    sys.exit(main())
