import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test begins with as many of torch's threads as a worker has: their number changes the bits."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
