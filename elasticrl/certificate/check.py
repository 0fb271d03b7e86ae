"""Checks a certificate: what it says of itself, and then against the run's files and an exported model, if they are there.

The one idea: whoever holds the key can sign anything, so a good signature is where checking begins. Everything that can be
computed from the rest of the certificate is computed, and each finding is a sentence that names the place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticrl.base.words import count
from elasticrl.certificate import keys
from elasticrl.certificate.dealt import dealt, first_of
from elasticrl.certificate.form import Begun, Certificate, Signed, Unfit, read, signed_part
from elasticrl.certificate.make import Told, Uncertain, make, named
from elasticrl.certificate.merkle import root_of, root_of_steps
from elasticrl.certificate.model import NoModel, of_folder
from elasticrl.runtime.chain import link

SAMPLES: Final = 1 << 26  # of all steps: more are not dealt again, which takes minutes
LARGE: Final = 1 << 20  # samples of one step
SHOWN: Final = 20  # findings that are spelled out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check came to. `ok` is the proof; otherwise the findings say what is wrong."""

    findings: tuple[str, ...]
    signed: Signed | None = None  # None: it could not be read

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    @property
    def sentence(self) -> str:
        """For people."""
        if self.findings or self.signed is None:
            more = f" ... and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            return f"NOT certified, {count(len(self.findings), 'finding')}: " + "; ".join(self.findings[:SHOWN]) + more
        body = self.signed.body
        samples = sum(each.samples for each in body.used)
        return (
            f"{body.job}: {count(len(body.used), 'step')}, {samples} samples each used exactly once, "
            f"{count(len(body.generations), 'generation')}, recoveries: {len(body.recoveries)}, chain head {body.head[:16]}; "
            f"signed by {keys.short(self.signed.key)}"
        )


def check(
    text: bytes, *, key: str | None = None, run: Path | None = None, logs: Mapping[int, Told] | None = None,
    model: Path | None = None,
) -> Checked:  # fmt: skip
    """Everything that can be checked with what is given. `key`: the public key that is expected."""
    try:
        signed = read(text)
    except Unfit as why:
        return Checked(findings=(f"this is no certificate: {why}",))
    body = signed.body
    findings = [*_signature(signed, key)]
    for part in (_chain, _generations, _samples, _checkpoints):
        findings += _guarded(part, body)
    if run is not None and not findings:
        findings += _against(body, run, logs or {})
    if model is not None:
        findings += _exported(body, model)
    return Checked(findings=tuple(findings), signed=signed)


def _guarded(part: Callable[[Certificate], Iterator[str]], body: Certificate) -> list[str]:
    """Findings; what no run can have written is one."""
    found: list[str] = []
    try:
        for finding in part(body):
            found.append(finding)
            if len(found) > SHOWN:
                break
    except (ValueError, ArithmeticError, LookupError, TypeError, AssertionError, struct.error) as error:
        found.append(f"no run writes such numbers: {type(error).__name__}: {error}")
    return found


def _signature(signed: Signed, key: str | None) -> Iterator[str]:
    if not keys.fits(signed.key, signed.signature, signed_part(signed.body)):
        yield "the signature does not fit: something was changed after it was signed, or the key is another one"
    if key is not None and key != signed.key:
        yield f"it is signed with another key: {signed.key} and not {key}"


def _chain(body: Certificate) -> Iterator[str]:
    """Each link follows from the one before, and the last is the head."""
    before, numbers = "", {each.number for each in body.generations}
    for each in body.states:
        if each.link != link(before, each.step, each.digest):
            yield f"step {each.step}: its digest or its link was changed, as the link does not follow from the one before"
            return
        if each.generation not in numbers:
            yield f"step {each.step} was computed by generation {each.generation}, which is left out"
        before = each.link
    steps = [each.step for each in body.states]
    if not steps or steps != sorted(set(steps)) or steps[0] < 0:
        yield "the chain's steps are not in order"
    if before != body.head:
        yield "the chain does not end at its head: steps were cut off"


def _generations(body: Certificate) -> Iterator[str]:
    """Each names the one before it, and the one that it goes on from is there."""
    digest, known = "", dict[int, Begun]()
    for each in body.generations:
        if each.before != digest:
            yield f"a generation before {each.number} was left out or changed: it names another one before it"
        if each.parent and each.parent not in known:
            yield f"generation {each.number} goes on from generation {each.parent}, which is left out"
        if known and each.number <= max(known):
            yield f"generation {each.number} is not in its place"
        digest, known[each.number] = named(each), each
    if digest != body.history:
        yield "the newest generation was left out or changed"
    recovered = [each.number for each in body.generations if each.parent and each.step is not None]
    if recovered != [each.generation for each in body.recoveries]:
        yield "the recoveries are not those of the generations that go on from others"


def _samples(body: Certificate) -> Iterator[str]:
    """Each step's samples are those that the data's description deals, each once; and the root is that of these steps."""
    if not body.segments or not body.used:
        yield "it names no samples"
        return
    first, last = first_of(body.segments), body.states[-1].step if body.states else 0
    steps = range(first, last)
    if len(steps) != len(body.used) or any(each.step != step for each, step in zip(body.used, steps, strict=True)):
        yield f"the samples are not those of steps {first} to {last - 1}: a step was left out"
        return
    size = max(each.walk.batch * each.walk.draws for each in body.segments)
    streamed = sum(end.index + 1 for end in body.ends)
    if size * len(steps) > SAMPLES or streamed > SAMPLES or size > LARGE:
        yield f"it speaks of more than {SAMPLES} samples, or {LARGE} of a step, which are not dealt again here"
        return
    ends = {end.epoch: end.index for end in body.ends}
    for each, (step, samples, turns) in zip(body.used, dealt(body.segments, steps, ends), strict=True):
        if each.root != root_of(step, samples, turns) or each.samples != len(samples):
            yield (
                f"step {step}: its samples are not the {len(samples)} that it must have used: one was dropped, used twice or "
                "swapped"
            )
        if each.by is not None:
            yield from _weights(step, each.by, [early.by for early in each.early])
            if not {(early.epoch, early.index) for early in each.early} <= set(samples):
                yield f"step {step}: it names weights of a sample that it has not used"
    if body.root != root_of_steps(each.root for each in body.used):
        yield "the ledger's root is not that of its steps"


def _weights(step: int, by: int, early: Sequence[int]) -> Iterator[str]:
    if not 0 <= by <= step or any(not 0 <= other < by for other in early):
        yield f"step {step}: its samples cannot have been generated by the weights that it names"


def _checkpoints(body: Certificate) -> Iterator[str]:
    """Each lies on the chain, and so does the model."""
    links = {each.step: each for each in body.states}
    for saved in body.checkpoints:
        if saved.step not in links or links[saved.step].link != saved.link:
            yield f"{saved.name} is a checkpoint from a fork: the chain has another link at step {saved.step}"
    if body.model is None:
        if not body.no_model:
            yield "it names no model, and does not say why"
        return
    last = body.states[-1]
    if (body.model.step, body.model.digest) != (last.step, last.digest):
        yield f"the model is not the run's: its digest is {body.model.digest}, and that of step {last.step} is {last.digest}"
    if body.model.checkpoint not in {saved.name for saved in body.checkpoints if saved.step == last.step}:
        yield "the model is of a checkpoint that is not among the run's"


def _against(body: Certificate, run: Path, logs: Mapping[int, Told]) -> Iterator[str]:
    """The run's own files give the same certificate."""
    try:
        ours = make(run, logs=logs, last=body.states[-1].step)
    except Uncertain as why:
        yield f"the run in {run} does not hold together: {why}"
        return
    yield from _same_states(body, ours, run)
    for said, found in zip(body.used, ours.used, strict=False):
        if said != found:
            yield f"step {said.step}: the run in {run} has used other samples, or other weights have generated them"
            break
    newest = max(each.number for each in body.generations)
    began = {each.number: each for each in ours.generations if each.step is not None}
    said_of = {each.number: each for each in body.generations}
    for number, each in began.items():
        mine = said_of.get(number)
        if number <= newest and (
            mine is None or (mine.parent, mine.step, mine.seats) != (each.parent, each.step, each.seats)
        ):
            yield f"generation {number} of the run in {run} was left out, or is another one"
    there = {each.name: each for each in ours.checkpoints}
    for saved in body.checkpoints:
        here = [each for each in ours.checkpoints if each.name == saved.name]
        if here and saved not in here:
            yield f"{there[saved.name].name} in {run} is another checkpoint than the one that was certified"
    if body.model is not None and ours.model is not None and body.model.sha256 != ours.model.sha256:
        yield f"the model in {run} is not the one that was certified"
    if body.model is not None and ours.model is None:
        yield f"the certified model cannot be found in {run}: {ours.no_model}"


def _same_states(body: Certificate, ours: Certificate, run: Path) -> Iterator[str]:
    mine = {each.step: each for each in ours.states}
    for each in body.states:
        other = mine.get(each.step)
        if other is None or (other.digest, other.link) != (each.digest, each.link):
            yield f"step {each.step}: the run in {run} has {other.digest if other else 'no digest'}, not {each.digest}: a fork"
            return


def _exported(body: Certificate, model: Path) -> Iterator[str]:
    if body.model is None:
        yield f"the certificate names no model: {body.no_model}"
        return
    try:
        found = of_folder(model)
    except NoModel as why:
        yield str(why)
        return
    if found != body.model.sha256:
        yield (
            f"the model in {model} is not the run's: its tensors come to {found[:16]}, the certified ones to "
            f"{body.model.sha256[:16]}; one that was exported with --dtype or --config has other tensors"
        )
