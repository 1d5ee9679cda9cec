"""`python tests/prove_second_device.py` takes each `device=` out of the package in turn: test_second_device.py must fail.

Names modules to be restricted to them: `python tests/prove_second_device.py decoding gpt`. Ends with an error if one
is not missed. A minute or two for the whole package on an idle machine.
"""

import ast
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import accelerate  # noqa: F401 (what takes seconds to import is imported once, before the forks)
import pytest
import torch._dynamo.testing  # noqa: F401

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "annotated_nlp"


def without(source: str) -> Iterator[tuple[str, str]]:
    "The line of each call that names a device, and the module without that argument."
    tree = ast.parse(source)
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) != "dict"]:
        for argument in [argument for argument in call.keywords if argument.arg == "device"]:
            place = call.keywords.index(argument)
            call.keywords.remove(argument)
            yield f"{argument.value.lineno}: {ast.unparse(call)} without {ast.unparse(argument)}", ast.unparse(tree)
            call.keywords.insert(place, argument)


def missed(module: str, source: str) -> str:
    "The first test that fails with this source, or nothing."
    with TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name)
        (Path(folder) / PACKAGE.name / module).write_text(source, encoding="utf-8")
        report = Path(folder) / "report"
        child = os.fork()
        if not child:
            sys.path.insert(0, folder)
            with report.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", str(TESTS / "chapters" / "test_second_device.py")])
            os._exit(0)
        os.waitpid(child, 0)
        return next((line for line in report.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))), "")


if __name__ == "__main__":
    chosen = [PACKAGE / f"{name}.py" for name in sys.argv[1:]] or sorted(PACKAGE.rglob("[a-z]*.py"))
    survivors, failing = 0, missed(str(chosen[0].relative_to(PACKAGE)), chosen[0].read_text(encoding="utf-8"))
    assert not failing, f"it fails as things are: {failing}"
    for path in chosen:
        for place, source in without(path.read_text(encoding="utf-8")):
            test = missed(str(path.relative_to(PACKAGE)), source)
            survivors += not test
            print(f"{path.name}:{place}\n    {test[:110] or 'SURVIVES'}", flush=True)
    sys.exit(f"{survivors} not missed" if survivors else 0)
