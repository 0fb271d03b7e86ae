"""`elasticrl certify`: one file that says what was trained by what, and that somebody else can check without us."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from elasticrl.cli.main import Exit
from elasticrl.cli.options import AsJson
from elasticrl.cli.state import fail, refuse, run_of

if TYPE_CHECKING:
    from elasticrl.certificate.make import Told

WITHIN_S: Final = 3600.0

Run = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="A run's directory; logs below it are read too.", show_default=False),
]
Out = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The certificate.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="The key to sign with. With --check the public key that is expected: a file, or 64 digits.",
        show_default=False,
    ),
]
NewKey = Annotated[
    Path | None,
    typer.Option(
        "--new-key", metavar="PATH", help="Make a key, and PATH.pub, and do nothing else.", show_default=False
    ),
]
Through = Annotated[
    int | None,
    typer.Option(
        "--through", min=1, help="The last step; the newest checkpoint's, if none is named.", show_default=False
    ),
]
Check = Annotated[
    Path | None, typer.Option("--check", metavar="FILE", help="Check this certificate.", show_default=False)
]
Beside = Annotated[
    Path | None, typer.Option("--run", metavar="RUN", help="Compare it with this run's files.", show_default=False)
]
Exported = Annotated[
    Path | None,
    typer.Option("--model", metavar="FOLDER", help="Compare it with an exported model.", show_default=False),
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--replay", metavar="A..B", help="Compute these steps of --run again, and compare the bits.", show_default=False
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The job's configuration, for --replay.", exists=True, show_default=False
    ),
]
Within = Annotated[float, typer.Option("--within", min=1.0, help="Seconds that --replay may take.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("certify")(certify)


def certify(  # noqa: PLR0917 - typer passes options by name
    context: typer.Context,
    run: Run = None,
    output: Out = Path("run.cert.json"),
    key: Key = None,
    new_key: NewKey = None,
    through: Through = None,
    check: Check = None,
    beside: Beside = None,
    model: Exported = None,
    replay: Steps = None,
    config: Config = None,
    within: Within = WITHIN_S,
    as_json: AsJson = False,
) -> None:
    """Sign what a run was (RUN), or check such a certificate (--check). Exits with 1 if it does not hold, and with 2 if the
    arguments are wrong.
    """
    from elasticrl.certificate.keys import KeyProblem
    from elasticrl.cli import ignored

    try:
        if new_key is not None:
            _new_key(new_key, as_json=as_json)
        elif check is not None:
            ignored.refuse(context, "output", "through", because="only when a certificate is made")
            if run is not None:
                refuse("with --check the run is named by --run")
            _check(check, key, beside, model, replay, config, within, as_json=as_json)
        else:
            ignored.refuse(
                context, "beside", "model", "replay", "config", "within", because="only with --check FILE"
            )  # fmt: skip
            if run is None:
                refuse("name a run's directory, or --check FILE, or --new-key PATH")
            _make(run, output, key, through, as_json=as_json)
    except KeyProblem as why:
        refuse(str(why))


def _new_key(path: Path, *, as_json: bool) -> None:
    from elasticrl.certificate import keys

    public = keys.make(path)
    if as_json:
        typer.echo(json.dumps({"key": str(path), "public": public, "fingerprint": keys.short(public)}, indent=2))
        return
    typer.echo(f"{path}: keep it. {keys.public_of(path)}: give it to those who check. Public key {public}")


def _make(run: Path, output: Path, key: str | None, through: int | None, *, as_json: bool) -> None:
    from elasticrl.certificate import keys
    from elasticrl.certificate.check import check
    from elasticrl.certificate.form import Signed, signed_part
    from elasticrl.certificate.make import Uncertain, make
    from elasticrl.runtime.chronicle import FOLDER

    if key is None:
        refuse("name the key to sign with: --key PATH. `elasticrl certify --new-key PATH` makes one")
    if not run.is_dir():
        refuse(f"{run} is not a directory")
    signer = keys.load(Path(key))
    try:
        body = make(run_of(run, FOLDER), logs=_logs(run), last=through)
    except Uncertain as why:
        fail(f"there is no certificate of {run}: {why}", as_json=as_json)
    public, signature = keys.sign(signer, signed_part(body))
    signed = Signed(body=body, key=public, signature=signature)
    found = check(signed.text, key=public)  # what would not check is not given out
    if not found.ok:
        fail(f"there is no certificate of {run}: {found.sentence}", as_json=as_json)
    try:
        output.write_bytes(signed.text)
    except OSError as error:
        refuse(f"{output} cannot be written: {error.strerror}")
    model = f"model {body.model.sha256[:16]}" if body.model else f"no model: {body.no_model}"
    if as_json:
        typer.echo(json.dumps({"ok": True, "file": str(output), **_plain(found)}, indent=2))
        return
    typer.echo(f"{found.sentence}; {model}\n{output}")


def _check(
    file: Path, key: str | None, run: Path | None, model: Path | None, replay: str | None, config: Path | None,
    within_s: float, *, as_json: bool,
) -> None:  # fmt: skip
    from elasticrl.base.regular import open_regular
    from elasticrl.base.words import plain
    from elasticrl.certificate import keys
    from elasticrl.certificate.check import Checked, check
    from elasticrl.certificate.form import LARGEST
    from elasticrl.runtime.chronicle import FOLDER

    expected = None if key is None else keys.public(key)
    if replay is not None and (run is None or config is None):
        refuse("--replay computes steps again: name the run (--run RUN) and the job's configuration (--config FILE)")
    if run is not None and not run.is_dir():
        refuse(f"{run} is not a directory")
    try:
        with open_regular(file) as stream:
            text = stream.read(LARGEST + 1)
    except OSError as error:
        refuse(f"{file} cannot be read: {error.strerror}")
    home = None if run is None else run_of(run, FOLDER)
    found = check(text, key=expected, run=home, logs=_logs(run) if run else None, model=model)
    said = ""
    if replay is not None and found.ok:
        assert found.signed is not None
        assert home is not None
        assert config is not None
        again = _again(found, home, replay, config, within_s, as_json=as_json)
        found = Checked(findings=again, signed=found.signed)
        said = f"; steps {replay} computed again to the same bits"
    if as_json:
        typer.echo(json.dumps({"ok": found.ok, **_plain(found)}, indent=2))
    else:
        typer.echo(plain(found.sentence + (said if found.ok else ""), keep="\n"))
        if found.ok and expected is None and found.signed is not None:
            typer.echo(f"whose key that is, only --key can say: {found.signed.key}")
    raise typer.Exit(Exit.OK if found.ok else Exit.FAILED)


def _again(found: Any, home: Path, steps: str, config: Path, within_s: float, *, as_json: bool) -> tuple[str, ...]:
    from elasticrl.certificate.make import Uncertain
    from elasticrl.certificate.replay import replay, steps_of
    from elasticrl.config import ConfigError, load

    try:
        first, last = steps_of(steps)
    except ValueError:
        refuse(f"--replay {steps}: name steps as 300..310")
    try:
        return replay(found.signed.body, home, load(config), first, last, within_s=within_s)
    except ConfigError as error:
        refuse(str(error))
    except Uncertain as why:
        fail(f"steps {steps} cannot be computed again: {why}", as_json=as_json)


def _logs(run: Path) -> Mapping[int, Told]:
    """What daemons' logs below the run say of its generations."""
    from elasticrl.certificate.make import Told
    from elasticrl.report.owners import Unchosen
    from elasticrl.report.read import read

    try:
        log = read(run).log
    except Unchosen:
        return {}
    found = {}
    for number, plan in log.plans.items():
        took = log.recovered[number].said["total_s"] if number in log.recovered else None
        found[number] = Told(
            reason=str(plan.said.get("reason", "")), rung=str(plan.said.get("rung", "")),
            ms=None if took is None else round(1000 * took),
        )  # fmt: skip
    return found


def _plain(found: Any) -> dict[str, Any]:
    signed = found.signed
    if signed is None:
        return {"findings": found.findings}
    body = signed.body
    return {
        "findings": found.findings,
        "key": signed.key,
        "job": body.job,
        "steps": len(body.used),
        "generations": len(body.generations),
        "recoveries": len(body.recoveries),
        "head": body.head,
        "root": body.root,
        "model": body.model.sha256 if body.model else None,
    }
