"""Who sees to a process, and what the end of the last of them means."""

import asyncio
import subprocess

from chaos.patience import patience
from elasticrl.base.parent import Led


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_the_end_of_the_last_who_sees_to_a_process_is_told_and_nobody_elses():
    first, starter, second = others = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]

    async def scenario() -> None:
        told = asyncio.Event()
        led = Led(asyncio.get_running_loop(), told.set)
        led.by((first.pid, starter.pid))
        end(first)
        led.by((second.pid, starter.pid))  # another daemon, in its place
        end(starter)
        await asyncio.sleep(0)
        assert not told.is_set()
        end(second)
        async with asyncio.timeout(patience(10)):
            await told.wait()
        told.clear()
        led.by(())
        assert not told.is_set(), "nobody is named"
        led.by((first.pid,))
        assert told.is_set(), "it had ended already"

    try:
        asyncio.run(scenario())
    finally:
        for process in others:
            end(process)
