"""JSON from elsewhere: one reader, and nothing that it lets through ends who asked."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from chaos.patience import patience
from elasticrl.base.parsed import DEEP, LARGEST, Unfit, parsed
from elasticrl.cli.lines import event_of
from elasticrl.contract import versions, wire
from elasticrl.contract.events import WriteCommit
from elasticrl.contract.model import Commit, Member, Plan, Record, View
from elasticrl.daemon import control
from elasticrl.diagnose import incident
from elasticrl.report.read import _objects
from elasticrl.runtime.checkpoint.manifest import unseal
from elasticrl.runtime.data import ledger
from elasticrl.runtime.vault.errors import CheckpointCorrupt
from elasticrl.shell import keys
from elasticrl.shell.office import Office
from elasticrl.shell.sight import Sight
from elasticrl.store import Put
from elasticrl.store.memory import MemoryServer, MemoryStore

ROOT = Path(__file__).parent.parent.parent
OWN = {  # who reads only what this process, or the one that started it, has written a moment before
    "contract/seat.py", "cli/bundle.py", "cli/demo.py", "base/parsed.py", "diagnose/probe_torch.py", "ppo/confined.py",
    "diagnose/afar_probe.py", "agent/worker.py",
}  # fmt: skip
LOADS = re.compile(r"\bjson\.(?:loads?|JSONDecoder)\b")
PIT = b"[" * 200_000
PITS = [
    PIT,
    b'{"a":' * 200_000,
    PIT + b"]" * 200_000,
    b"[" * 900 + b"]" * 900,
    b'{"v":2,"value":' + b"[" * 500 + b"]" * 500 + b"}",
]


def test_depth_size_and_numbers_are_bounded_and_half_letters_replaced() -> None:
    assert parsed("[" * DEEP + "]" * DEEP) is not None
    assert parsed(json.dumps(["[" * 300, {"{" * 300: 1}])) == ["[" * 300, {"{" * 300: 1}], "brackets in words are none"
    assert parsed('["\\ud800", "\\ud83d\\ude00"]') == ["?", "😀"]
    assert parsed("[NaN, 1e999, 1.5]")[2] == 1.5
    for text in ("[" * (DEEP + 1) + "]" * (DEEP + 1), '{"a":' * 70 + "1" + "}" * 70, '"' + "x" * LARGEST + '"'):
        with pytest.raises(Unfit):
            parsed(text)
    for text in ("NaN", "[Infinity]", '{"a": -1e999}', b"\xff", b"", "1" * 5000, "x"):
        with pytest.raises(ValueError):  # noqa: PT011 - of any kind: that is its contract
            parsed(text, finite=True)


def test_all_json_of_others_goes_through_the_one_reader() -> None:
    sources = {path: path.read_text() for path in (ROOT / "elasticrl").rglob("*.py")}
    loading = {str(path.relative_to(ROOT / "elasticrl")) for path, text in sources.items() if LOADS.search(text)}
    assert loading == OWN


READERS = {
    "store": (lambda text: keys.load(Plan, text, "plan"), keys.Unreadable),
    "control": (control.parse, control.Refused),
    "agent": (wire.decode, wire.Garbled),
    "worker's log": (lambda text: event_of(text.decode()),),
    "report": (lambda text: list(_objects([text.decode()])),),
    "versions": (lambda text: versions.read(text.decode()),),
    "checkpoint": (lambda text: unseal(text, "manifest.json"), CheckpointCorrupt),
    "ledger": (ledger.decode,),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_depth_of_brackets_ends_a_reader(reader: str) -> None:
    read, *refusals = READERS[reader]
    for text in PITS:
        with suppress(*refusals):  # any other is what this is about
            read(text)


def test_an_incident_of_brackets_is_named_as_unreadable(tmp_path: Path) -> None:
    for number, text in enumerate(PITS):
        (tmp_path / f"{number}.json").write_bytes(text)
    found, unread = incident.found([tmp_path])
    assert (found, len(unread)) == ([], len(PITS))


def test_no_value_at_any_key_ends_the_watch() -> None:
    async def script() -> None:
        store, told, views = MemoryStore(MemoryServer()), list[str](), list[View]()
        sight = Sight(store, Member(node="n00", incarnation=1), changed=views.append, complain=told.append)
        watch = asyncio.create_task(sight.watch(everyone=True))
        places = [
            keys.PLAN,
            keys.COMMIT,
            keys.LEADER,
            keys.INTENT,
            keys.LOOK,
            "drain/n00",
            "members/n00",
            "quarantine/n01",
        ]
        for key in places:
            for text in PITS:
                await store.txn((), [Put(key=key, value=text)])
        good = Record(member=Member(node="n02", incarnation=1), step=7)
        await store.txn((), [Put(key=keys.member_key("n02"), value=keys.dump(good))])
        async with asyncio.timeout(patience(10)):
            while not views or "n02" not in (views[-1].records or {}):
                assert not watch.done(), watch.exception()
                await asyncio.sleep(0)
        watch.cancel()
        assert len(told) >= len(places) * len(PITS)

    asyncio.run(script())


@pytest.mark.parametrize(
    "step", [2**62, -5, 10**13, 1e300, str(2**62), "61", 61.0, True, pytest.param(10**400, id="400 digits")]
)
def test_a_wrong_commit_is_refused_with_a_sentence_and_the_next_commit_replaces_it(step: float | str) -> None:
    async def script() -> None:
        store, told, views = MemoryStore(MemoryServer()), list[str](), list[View]()
        me = Member(node="n00", incarnation=1)
        sight = Sight(store, me, changed=views.append, complain=told.append)
        watch = asyncio.create_task(sight.watch(everyone=False))
        office = Office(store, me, sight, ttl_s=5.0, post=lambda _: None, clock=lambda: 0.0)

        async def until(holds: Callable[[], bool]) -> None:
            async with asyncio.timeout(patience(10)):
                while not holds():
                    assert not watch.done(), watch.exception()
                    await asyncio.sleep(0)

        await store.txn((), [Put(key=keys.COMMIT, value=keys.dump(Commit(step=60, generation=3)))])
        await until(lambda: sight.view.committed == 60)
        wrong = json.dumps({"v": 2, "value": {"step": step, "generation": 3}}).encode()
        await store.txn((), [Put(key=keys.COMMIT, value=wrong)])
        await until(lambda: bool(told))
        assert re.match(r"commit: step(?: is|: Input should be a valid integer)|commit is not JSON .*digits", told[0])
        assert "delete the key" in told[0]
        assert sight.view.committed == 60
        next_one = WriteCommit(
            step=80, generation=3, manifest="", if_plan=sight.view.plan_revision, if_commit=sight.view.commit_revision
        )
        assert await office.perform(next_one)
        await until(lambda: sight.view.committed == 80)
        watch.cancel()

    asyncio.run(script())


@pytest.mark.parametrize("name", ["generation", "resume"])
def test_a_plan_of_numbers_that_nothing_can_follow_is_refused(name: str) -> None:
    plain = {"v": 2, "value": {"generation": 1, "phase": "train", "seats": [], name: 2**62}}
    with pytest.raises(keys.Unreadable, match=f"plan: {name} is {2**62}"):
        keys.load(Plan, json.dumps(plain), "plan")
    plain["value"][name] = str(2**62)
    with pytest.raises(keys.Unreadable, match=f"plan: {name}: Input should be a valid integer"):
        keys.load(Plan, json.dumps(plain), "plan")


@pytest.mark.parametrize("born", [2**62, str(2**62), "1", 1.0])
def test_a_number_inside_of_a_seat_is_bounded_too(born: float | str) -> None:
    seat = {"member": {"node": "n00", "incarnation": 1}, "born": born, "slots": 1}
    plain = {"v": 2, "value": {"generation": 1, "phase": "train", "seats": [seat]}}
    with pytest.raises(keys.Unreadable, match=r"plan: (?:born is|seats\.0\.born: )"):
        keys.load(Plan, json.dumps(plain), "plan")
    plain["value"]["seats"] = [{**seat, "born": 1, "member": {"node": "n00", "incarnation": born}}]
    with pytest.raises(keys.Unreadable, match=r"plan: (?:incarnation is|seats\.0\.member\.incarnation: )"):
        keys.load(Plan, json.dumps(plain), "plan")


@pytest.mark.parametrize("at", ["inf", "nan", "0.5", pytest.param(10**400, id="400 digits"), True])
def test_a_text_is_no_number_of_a_record(at: float | str) -> None:
    plain = {"v": 2, "value": {"member": {"node": "n00", "incarnation": 1}, "beat_at": at}}
    with pytest.raises(keys.Unreadable, match=r"members/n00(?:: beat_at: Input should be a valid number| is not JSON)"):
        keys.load(Record, json.dumps(plain), "members/n00")


def test_a_stranger_s_brackets_are_answered_with_who_may_ask(tmp_path: Path) -> None:
    async def script() -> None:
        bugs: list[str] = []

        async def unasked(*_: object) -> None:
            raise AssertionError("nobody asks")

        it = control.Control(tmp_path / "x.sock", unasked, {}, failed=bugs.append)
        nobody = control.Asker(pid=1, uid=54321, gid=54321)
        written: list[bytes] = []

        class Writer:
            def write(self, data: bytes) -> None:
                written.append(data)

            async def drain(self) -> None: ...

        for asker in (nobody, control.Asker(pid=1, uid=0, gid=0)):
            for text in PITS:
                await it._one(text, asker, Writer())  # type: ignore[arg-type]
        assert bugs == []
        answers = [json.loads(line)["error"] for line in written]
        assert {"may not control" in answer for answer in answers[: len(PITS)]} == {True}
        assert {"JSON object" in answer or "verb" in answer for answer in answers[len(PITS) :]} == {True}

    asyncio.run(script())
