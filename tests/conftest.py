"What several files of tests share."

import setuptools  # noqa: F401  first: torch.compile imports it late, which fails where the standard distutils was loaded before

import os

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

from tools import web

# The same examples on every machine and in every run, however slow: a failure elsewhere is a failure here.
settings.register_profile("book", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("book")


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
