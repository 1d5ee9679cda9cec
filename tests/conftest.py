"What several files of tests share."

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    "Without jaxtyping's run-time checks, as a user has it: the module's own errors must speak."
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def pytest_collection_modifyitems(items):
    "What takes longest begins first, so that no process is left waiting for it at the end."
    items.sort(key=lambda item: item.path.name != "test_wheel.py")
