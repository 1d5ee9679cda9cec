"What several files of tests share."

import setuptools  # noqa: F401  first: torch.compile imports it late, which fails where the standard distutils was loaded before

import os
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

from tools import web

# The same examples on every machine and in every run, however slow: a failure elsewhere is a failure here.
settings.register_profile("book", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("book")


# Files in order of their seconds. One worker runs a whole file: a long one that begins last is waited for by all.
LONG = ("test_live", "test_site", "test_packages", "test_transforms", "test_parity", "test_invariants", "test_second_device", "test_training",
        "test_colab", "test_checkpoints", "test_tokenization", "test_bench")


def pytest_collection_modifyitems(items):
    assert set(LONG) <= {path.stem for path in Path(__file__).parent.rglob("test_*.py")}, "a file of LONG was renamed"
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def unchecked():
    "Without jaxtyping's run-time checks, as a user has it: the module's own errors must speak."
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def browser():
    if web.chromium() is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine; the browser tests run in continuous integration")
    with web.browser() as it:
        yield it
