import os
import sys
from contextlib import suppress

import pytest

with suppress(ImportError):  # the environment of vLLM has none
    import hypothesis

    # How long an example takes says how busy the machine is: those that look for slowness count what they computed.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")

#: With one of these set to "required", a skipped test is a failure, and so is a run without any.
REQUIRED = [name for name in ("ELASTICRL_HF", "ELASTICRL_VLLM") if os.environ.get(name) == "required"]

skipped: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test begins with as many of torch's threads as a worker has: their number changes the bits."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if REQUIRED and (skipped or not session.testscollected):
        print(f"\n{', '.join(REQUIRED)}: to be tested, and not tested: {skipped or 'nothing was'}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
