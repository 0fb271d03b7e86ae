"""What a certificate proves, by what its check finds: each attack is a test, also by somebody who has the operator's key."""

import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from certificate_kit import KEY, WALK, a_run, certificate, chained, digest, head, renamed, save, signed
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from elasticrl.certificate import keys
from elasticrl.certificate.check import check
from elasticrl.certificate.dealt import dealt
from elasticrl.certificate.form import Certificate, Early, Model, Signed, State, Unfit, Used, read
from elasticrl.certificate.make import Told, Uncertain, make, named
from elasticrl.certificate.merkle import root_of, root_of_steps
from elasticrl.runtime.chain import link
from elasticrl.runtime.data.cursor import Cursor, SampleId, Segment, Walk


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def body(home: Path) -> Certificate:
    return make(home)


def findings(body: Certificate, **beside: object) -> str:
    """What is found in a certificate that was signed with the operator's own key."""
    return "; ".join(check(signed(body), **beside).findings)  # type: ignore[arg-type]


def test_a_run_of_three_generations_has_a_certificate_that_checks(home: Path, body: Certificate) -> None:
    found = check(signed(body), key=KEY.public_key().public_bytes_raw().hex(), run=home)
    assert found.ok, found.sentence
    assert "12 steps, 144 samples each used exactly once, 3 generations, recoveries: 2" in found.sentence
    assert [(each.number, each.parent, each.step, each.cause) for each in body.generations] == [
        (1, 0, 0, "n1 was lost"), (2, 1, 5, "n2 was lost"), (3, 2, 9, "n3 was lost")
    ]  # fmt: skip
    assert [(each.generation, each.step, each.again) for each in body.recoveries] == [(2, 5, 1), (3, 9, 0)]
    assert (body.package_sha256, body.data) == (("c0de",), ("numbers",))
    assert body.packages == ({"torch": "2.13.0"},)
    assert {(node.name, node.made["torch"]) for node in body.nodes} == {("n0", "2.13.0"), ("n1", "2.13.0")}
    assert body.no_model


def test_a_run_that_nothing_happened_to_has_the_same_chain_and_the_same_root(body: Certificate, tmp_path: Path) -> None:
    quiet = make(a_run(tmp_path, [(1, 0, 12)]))
    assert (quiet.head, quiet.root) == (body.head, body.root)
    assert quiet.history != body.history


def test_what_daemons_logs_say_of_a_generation_is_told(home: Path) -> None:
    told = {2: Told(reason="of the log", ms=480), 4: Told(reason="nobody came", rung="reform")}
    found = make(home, logs=told)
    assert found.generations[1].cause == "n2 was lost"  # the ledger's own word comes first
    assert (found.recoveries[0].ms, found.recoveries[1].ms) == (480, None)
    assert (found.generations[3].number, found.generations[3].step, found.generations[3].cause) == (
        4,
        None,
        "nobody came",
    )
    assert check(signed(found), run=home).ok


def test_a_secret_in_a_cause_is_not_certified(home: Path) -> None:
    told = make(home, logs={9: Told(reason="password=hunter2secret was refused")})
    assert b"hunter2secret" not in signed(told)


# -- attacks: a sample


def other(
    step: int, lane: int, change: Callable[[tuple[SampleId, ...]], tuple[SampleId, ...]]
) -> dict[tuple[int, int], tuple[SampleId, ...]]:
    return {(step, lane): change(Cursor(WALK).ids(step, 0, lane))}


DROPPED = other(4, 1, lambda ids: ids[1:])
TWICE = other(4, 1, lambda ids: (*ids[1:], ids[1]))
SWAPPED = {
    (4, 1): (*Cursor(WALK).ids(4, 0, 1)[1:], Cursor(WALK).ids(5, 0, 1)[0]),
    (5, 1): (*Cursor(WALK).ids(5, 0, 1)[1:], Cursor(WALK).ids(4, 0, 1)[0]),
}


@pytest.mark.parametrize(
    ("swap", "said"),
    [(DROPPED, "was not used"), (TWICE, "was used twice"), (SWAPPED, "is not among the step's samples")],
    ids=["dropped", "used twice", "swapped"],
)
def test_a_run_that_dropped_or_repeated_or_swapped_a_sample_gets_no_certificate(
    tmp_path: Path, swap, said: str
) -> None:
    with pytest.raises(Uncertain, match=said):
        make(a_run(tmp_path, swap=swap))


@pytest.mark.parametrize(("swap"), [DROPPED, TWICE, SWAPPED], ids=["dropped", "used twice", "swapped"])
def test_a_certificate_of_samples_that_no_cursor_deals_is_found_and_the_step_named(body: Certificate, swap) -> None:
    used = list(body.used)
    for (step, lane), ids in swap.items():
        dealt_ids = [id_ for other in range(4) if other != lane for id_ in Cursor(WALK).ids(step, 0, other)]
        samples = [(id_.epoch, id_.index) for id_ in (*dealt_ids, *ids)]
        used[step] = replace(used[step], root=root_of(step, samples, 1), samples=len(samples))
    forged = replace(body, used=tuple(used), root=root_of_steps(each.root for each in used))
    assert (
        "step 4: its samples are not the 12 that it must have used: one was dropped, used twice or swapped"
        in findings(forged)
    )


def test_a_run_that_has_lost_a_sample_since_does_not_fit_its_certificate(body: Certificate, tmp_path: Path) -> None:
    said = findings(body, run=a_run(tmp_path, swap=DROPPED))
    assert "does not hold together" in said
    assert "was not used" in said


def test_a_root_that_is_not_its_steps_is_found(body: Certificate) -> None:
    assert "the ledger's root is not that of its steps" in findings(replace(body, root="0" * 64))


def test_a_step_without_samples_is_found(body: Certificate) -> None:
    assert "a step was left out" in findings(replace(body, used=body.used[:3] + body.used[4:]))


# -- attacks: a digest


def with_digest(body: Certificate, step: int) -> Certificate:
    states = [replace(each, digest="f" * 16) if each.step == step else each for each in body.states]
    return replace(body, states=tuple(states))


def test_a_changed_digest_is_found_and_its_step_named(body: Certificate) -> None:
    assert "step 7: its digest or its link was changed" in findings(with_digest(body, 7))


def test_a_changed_digest_with_a_chain_made_anew_is_found_by_the_checkpoints_and_by_the_run(
    body: Certificate, home: Path
) -> None:
    forged = chained(with_digest(body, 7))
    assert "step-00000012-g3 is a checkpoint from a fork: the chain has another link at step 12" in findings(forged)
    blind = replace(forged, checkpoints=())
    assert findings(blind) == ""  # of itself it holds together
    assert f"step 7: the run in {home} has {digest(7)}, not ffffffffffffffff: a fork" in findings(blind, run=home)


def test_a_chain_that_was_cut_off_is_found(body: Certificate) -> None:
    assert "the chain does not end at its head: steps were cut off" in findings(replace(body, states=body.states[:-1]))


def test_a_digest_that_is_not_there_breaks_the_chain_of_a_run(tmp_path: Path) -> None:
    (path,) = a_run(tmp_path, [(1, 0, 12)]).glob("digests/*")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5] + lines[6:]))
    with pytest.raises(Uncertain, match="the chain of digests is broken at step 5"):
        make(tmp_path)


def test_a_run_that_was_gone_on_from_an_older_step_with_other_bits_is_a_fork(tmp_path: Path) -> None:
    from elasticrl.runtime.chronicle import Chronicle

    chronicle = Chronicle(a_run(tmp_path), "n9-w0", bits=lambda: "b")
    chronicle.add(step=8, generation=4, digest="beef", link=link(head(7), 8, "beef"))
    chronicle.close()
    with pytest.raises(Uncertain, match=r"step 8 has 2 different digests.*\(a fork\)"):
        make(tmp_path)


# -- attacks: a checkpoint, a model


def test_a_checkpoint_from_a_fork_is_found_in_the_run_and_in_the_certificate(body: Certificate, tmp_path: Path) -> None:
    save(a_run(tmp_path), 9, 7, link(head(8), 9, "beef"))
    with pytest.raises(Uncertain, match="step-00000009-g7 is a checkpoint from a fork: its chain at step 9 is"):
        make(tmp_path)
    assert "step-00000009-g7 is a checkpoint from a fork" in findings(body, run=tmp_path)
    forged = replace(body, checkpoints=(replace(body.checkpoints[0], link=link("", 6, "beef")), *body.checkpoints[1:]))
    assert "step-00000006-g1 is a checkpoint from a fork" in findings(forged)


def with_model(body: Certificate, **changed: object) -> Certificate:
    model = Model(checkpoint="step-00000012-g3", step=12, digest=digest(12), sha256="ab" * 32, tensors=1, nbytes=4)
    return replace(body, model=replace(model, **changed), no_model="")  # type: ignore[arg-type]


def test_a_model_that_is_not_the_runs_is_found(body: Certificate, tmp_path: Path) -> None:
    assert findings(with_model(body)) == ""
    assert "the model is not the run's: its digest is ffff, and that of step 12 is" in findings(
        with_model(body, digest="ffff")
    )
    assert "the model is not the run's" in findings(with_model(body, step=6, digest=digest(6)))
    assert "a checkpoint that is not among the run's" in findings(with_model(body, checkpoint="step-00000012-g9"))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abcd")
    assert f"the model in {tmp_path} is not the run's" in findings(with_model(body), model=tmp_path)
    assert "the certificate names no model" in findings(body, model=tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"12", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 12) + b'{"w":{"a":1}}'],
)
def test_a_broken_model_is_a_finding(body: Certificate, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert "is no safetensors file that can be read" in findings(with_model(body), model=tmp_path)


# -- attacks: a generation


def test_a_generation_that_was_left_out_is_found(body: Certificate) -> None:
    first, second, third = body.generations
    assert "was left out or changed" in findings(replace(body, generations=(first, third)))
    assert "the newest generation was left out or changed" in findings(replace(body, generations=(first, second)))
    named_anew = renamed((first, third))
    forged = replace(body, generations=named_anew, history=named(named_anew[-1]), recoveries=body.recoveries[1:])
    said = findings(forged)
    assert "generation 3 goes on from generation 2, which is left out" in said
    assert "was computed by generation 2, which is left out" in said


def test_a_generation_that_is_left_out_with_all_its_traces_is_found_by_the_run(body: Certificate, home: Path) -> None:
    first, _, third = body.generations
    named_anew = renamed((first, replace(third, parent=1)))
    states = [replace(each, generation=3 if each.generation == 2 else each.generation) for each in body.states]
    forged = replace(
        body,
        generations=named_anew,
        history=named(named_anew[-1]),
        recoveries=body.recoveries[1:],
        states=tuple(states),
    )
    assert findings(forged) == ""
    assert "generation 2 of the run in" in findings(forged, run=home)


def test_a_cause_that_was_changed_is_found(body: Certificate) -> None:
    first, *others = body.generations
    assert "was left out or changed" in findings(replace(body, generations=(replace(first, cause="nothing"), *others)))


def test_a_recovery_that_was_left_out_is_found(body: Certificate) -> None:
    assert "the recoveries are not those" in findings(replace(body, recoveries=body.recoveries[1:]))


# -- attacks: the file


def test_another_key_is_found(body: Certificate) -> None:
    expected = KEY.public_key().public_bytes_raw().hex()
    stranger = signed(body, Ed25519PrivateKey.generate())
    assert check(stranger).ok  # nobody said whose it has to be
    assert "it is signed with another key" in check(stranger, key=expected).sentence
    found = read(signed(body))
    swapped = Signed(body=found.body, key=read(stranger).key, signature=found.signature)
    assert "the signature does not fit" in check(swapped.text).sentence
    for junk in ("", "zz", "00" * 32, "ab" * 31):
        assert "the signature does not fit" in check(Signed(body=body, key=junk, signature=junk).text).sentence


def test_what_was_changed_after_it_was_signed_is_found(body: Certificate) -> None:
    text = signed(body)
    for before, after in (
        (b'"job":"kit"', b'"job":"cat"'),
        (b"n2 was lost", b"n2 was fine"),
        (b'"filtered":0', b'"filtered":1'),
    ):
        assert before in text
        assert "the signature does not fit" in check(text.replace(before, after)).sentence


def test_a_certificate_that_was_cut_short_is_found_wherever_it_was(body: Certificate) -> None:
    text = signed(body)
    for end in (0, 1, 2, len(text) // 3, len(text) // 2, len(text) - 3, len(text) - 2, len(text) - 1):
        assert not check(text[:end]).ok, end
    assert "cut short" in check(text[: len(text) // 2]).sentence


def test_a_field_that_was_added_is_found_wherever_it_was(body: Certificate) -> None:
    plain = json.loads(signed(body))
    for place in (plain, plain["body"], plain["body"]["states"][3], plain["body"]["segments"][0]["walk"]):
        place["more"] = 1
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        assert "a field was added: 'more'" in check(text).sentence
        del place["more"]
    twice = signed(body).replace(b'"job":"kit"', b'"job":"cat","job":"kit"')
    assert "a field stands there twice" in check(twice).sentence
    del plain["body"]["root"]
    assert "'root' is missing" in check(json.dumps(plain).encode()).sentence


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"body":' * 5000,
        b"\xff\xfe",
        b'{"body":1e999,"key":"","signature":""}',
        b"1" * 5000,
    ],
)
def test_what_is_no_certificate_is_refused_with_a_sentence(text: bytes) -> None:
    assert "this is no certificate" in check(text).sentence


@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, states=(replace(b.states[-1], step=1 << 60),)),
        lambda b: replace(b, states=()),
        lambda b: replace(b, segments=()),
        lambda b: replace(b, used=(replace(b.used[0], step=-1), *b.used[1:])),
        lambda b: replace(b, used=(replace(b.used[0], root="zz"), *b.used[1:])),
        lambda b: replace(b, segments=(Segment(first=0, epoch=-(1 << 63), offset=1 << 63, walk=WALK),)),
        lambda b: replace(b, segments=(Segment(first=-5, epoch=0, offset=-7, walk=WALK),)),
        lambda b: replace(b, segments=(replace(b.segments[0], walk=replace(WALK, lanes=1 << 12, per_lane=1 << 12)),)),
        lambda b: replace(b, segments=(replace(b.segments[0], walk=replace(WALK, size=1 << 63)),)),
        lambda b: replace(b, segments=(replace(b.segments[0], walk=replace(WALK, size=None)),)),
        lambda b: replace(b, generations=()),
        lambda b: replace(b, job="x" * 5000),
    ],
)  # fmt: skip
def test_a_hostile_certificate_costs_neither_memory_nor_time(body: Certificate, change) -> None:
    begun = time.process_time()
    assert findings(change(body)) != ""
    assert time.process_time() - begun < 10


def test_a_certificate_has_one_spelling(body: Certificate) -> None:
    text = signed(body)
    assert read(text).text == text
    for other_text in (json.dumps(json.loads(text), indent=1).encode(), text + b" ", b" " + text):
        with pytest.raises(Unfit, match="not written as certificates are"):
            read(other_text)


# -- whose weights


def test_the_weights_that_generated_each_sample_are_named(tmp_path: Path) -> None:
    found = make(a_run(tmp_path, by=True))
    third = found.used[3]
    early = [
        Early(by=2, epoch=id_.epoch, index=id_.index) for lane in range(4) for id_ in Cursor(WALK).ids(3, 0, lane)[:1]
    ]
    assert (third.by, set(third.early)) == (3, set(early))
    assert (found.used[0].by, found.used[0].early) == (0, ())
    assert check(signed(found), run=tmp_path).ok
    later = replace(found, used=tuple(replace(each, by=each.step + 1) for each in found.used))
    assert "cannot have been generated by the weights" in findings(later)
    earlier = replace(found, used=tuple(replace(each, by=0, early=()) for each in found.used))
    assert "other weights have generated them" in findings(earlier, run=tmp_path)


# -- keys


def test_a_new_key_is_its_owners_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "k"
    public = keys.make(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.public(str(keys.public_of(path))) == public == keys.public(public.upper())
    assert keys.sign(keys.load(path), b"x")[0] == public
    with pytest.raises(keys.KeyProblem, match="exists already"):
        keys.make(path)
    path.chmod(0o640)
    with pytest.raises(keys.KeyProblem, match="others can read the key"):
        keys.load(path)
    with pytest.raises(keys.KeyProblem, match="is no private key"):
        keys.load(_private(keys.public_of(path)))
    with pytest.raises(keys.KeyProblem, match="is no public key"):
        keys.public(str(path))
    with pytest.raises(keys.KeyProblem, match="make one with"):
        keys.load(tmp_path / "absent")


def _private(path: Path) -> Path:
    path.chmod(0o600)
    return path


# -- what is dealt


@pytest.mark.parametrize(
    "walk",
    [
        WALK,
        Walk(size=7, lanes=2, per_lane=3, draws=2, turns=3, seed=1),
        Walk(size=1000, lanes=4, per_lane=3, edge="drop", seed=3),
        Walk(size=64, lanes=1, per_lane=5, shuffle=False),
        Walk(size=1, lanes=2, per_lane=1),
    ],
)
def test_what_is_dealt_at_once_is_what_the_cursor_deals(walk: Walk) -> None:
    cursor = Cursor(walk)
    for step, samples, turns in dealt(cursor.segments, range(40), {}):
        places = [(draw, lane) for draw in range(walk.draws) for lane in range(walk.lanes)]
        expected = [(id_.epoch, id_.index) for draw, lane in places for id_ in cursor.ids(step, draw, lane)]
        assert (samples, turns) == (expected, walk.turns)


@pytest.mark.long
def test_ten_thousand_steps_are_verified_in_seconds(body: Certificate) -> None:
    walk, steps = Walk(name="many", size=100_000, lanes=8, per_lane=8, seed=7), 10_000
    segments, before, states, used = (Segment(first=0, epoch=0, offset=0, walk=walk),), "", [], []
    for step in range(steps + 1):
        before = link(before, step, digest(step))
        states.append(State(step=step, generation=1, digest=digest(step), link=before))
    for step, samples, turns in dealt(segments, range(steps), {}):
        used.append(Used(step=step, samples=len(samples), root=root_of(step, samples, turns), by=None, early=()))
    (generation, *_) = body.generations
    large = replace(
        body, states=tuple(states), head=before, used=tuple(used), segments=segments, checkpoints=(), generations=(generation,),
        history=named(generation), recoveries=(), root=root_of_steps(each.root for each in used),
    )  # fmt: skip
    text = signed(large)
    begun = time.process_time()
    found = check(text)
    took = time.process_time() - begun
    assert found.ok, found.sentence
    assert took < 15, took
    print(f"{len(text)} bytes, {took:.1f} s of a processor")


def test_the_kit_is_a_run(tmp_path: Path) -> None:
    assert certificate(tmp_path).head == head(12)
