"""Async tests, and the stores that the one suite runs on: memory, and a real etcd through either client."""

import asyncio
import inspect
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import Backend

from chaos.etcd import LocalCluster
from elasticrl.store.etcd import EtcdStore
from elasticrl.store.memory import MemoryServer
from elasticrl.store.settings import StoreSettings

TEST_S = 40.0  # no test here may take longer, whatever hangs
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(TEST_S):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


async def version(cluster: LocalCluster) -> str:
    async with EtcdStore(StoreSettings(endpoints=cluster.endpoints)) as store:
        return (await store.status()).endpoints[0].version


@pytest.fixture(scope="session")
def etcd() -> Iterator[LocalCluster]:
    """An etcd for all tests that do not break it."""
    with tempfile.TemporaryDirectory(prefix="elasticrl-store-") as folder:
        cluster = LocalCluster(Path(folder), members=1)
        asyncio.run(cluster.__aenter__())
        # `make etcd34` says which version is meant to be tested, lest it test another one unnoticed.
        assert asyncio.run(version(cluster)).startswith(os.environ.get("ELASTICRL_ETCD_IS", ""))
        yield cluster
        asyncio.run(cluster.__aexit__())


@pytest.fixture(params=["memory", "grpc", "etcd3"])
def backend(request: pytest.FixtureRequest) -> Backend:
    real = request.param != "memory"
    return Backend(
        kind=request.param,
        namespace=f"/elasticrl/test-{next(_numbers)}/",
        server=MemoryServer(),
        etcd=request.getfixturevalue("etcd") if real else None,
    )


@pytest.fixture(params=["grpc", "etcd3"])
def client(request: pytest.FixtureRequest) -> str:
    """The clients of a real etcd, for tests that break it."""
    return str(request.param)
