import sys

import hypothesis
import pytest

# How long an example takes says how busy the machine is: those that look for slowness count what they computed.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test begins with as many of torch's threads as a worker has: their number changes the bits."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
