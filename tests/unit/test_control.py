"""The control socket: who may ask, and that finding it out holds nobody up."""

import asyncio
import grp
import os
import pwd
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrl.daemon.control import Asker, Control, Refused

SOMEBODY = Asker(pid=1, uid=54321, gid=54321)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Users and groups, and how long it takes to look one up."""
    known = SimpleNamespace(groups=[54321, 980], slow_s=0.0, asked=0)

    def groups(_: str, __: int) -> list[int]:
        known.asked += 1
        time.sleep(known.slow_s)
        return list(known.groups)

    monkeypatch.setattr(grp, "getgrnam", lambda _: SimpleNamespace(gr_gid=980))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="somebody"))
    monkeypatch.setattr(os, "getgrouplist", groups)
    return known


async def unused(*_: Any) -> None:
    raise AssertionError("nobody asks")


def control(path: Path, deadline_s: float = 5.0) -> Control:
    return Control(path, unused, {}, group="elasticrl", deadline_s=deadline_s)


def test_a_member_of_the_group_may_ask_and_is_looked_up_once_a_minute(
    tmp_path: Path, directory: SimpleNamespace
) -> None:
    async def script() -> None:
        it = control(tmp_path / "x.sock")
        assert [await it._may(SOMEBODY) for _ in range(3)] == [True] * 3
        assert directory.asked == 1
        directory.groups = []
        assert not await control(tmp_path / "x.sock")._may(SOMEBODY)
        assert await it._may(Asker(pid=1, uid=os.geteuid(), gid=0))

    asyncio.run(script())


def test_a_directory_of_users_that_is_slow_holds_no_beat_up(tmp_path: Path, directory: SimpleNamespace) -> None:
    # Found by reading: where LDAP was down, `elasticrl status` by a member of the group cost the node its lease.
    directory.slow_s = 0.6

    async def longest() -> float:
        asking = asyncio.create_task(control(tmp_path / "x.sock")._may(SOMEBODY))
        ticks = [time.monotonic()]
        while not asking.done():
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic())
        assert asking.result()
        return max(late - early for early, late in pairwise(ticks))

    assert asyncio.run(longest()) < 0.5


def test_who_cannot_be_found_out_about_in_time_is_told_so(tmp_path: Path, directory: SimpleNamespace) -> None:
    directory.slow_s = 0.5

    async def script() -> None:
        it = control(tmp_path / "x.sock", deadline_s=0.1)
        for _ in range(3):
            with pytest.raises(Refused, match=r"does not say within 0 s who user 54321 is \(getent passwd 54321\)"):
                await it._may(SOMEBODY)
        assert directory.asked == 1, "one look-up at a time"
        await asyncio.sleep(0.5)
        assert await it._may(SOMEBODY)

    asyncio.run(script())


def test_the_socket_is_its_user_s_and_its_group_s_whatever_the_umask(tmp_path: Path) -> None:
    async def mode() -> int:
        it = control(tmp_path / "control.sock")
        await it.open()
        found = (tmp_path / "control.sock").stat().st_mode & 0o777
        await it.close()
        return found

    before = os.umask(0)
    try:
        assert asyncio.run(mode()) == 0o660
    finally:
        os.umask(before)
