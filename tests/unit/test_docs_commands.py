"""Every command that README and docs show is one: its verb and options exist, and the cheap ones are run.

Two kinds of places are read. In a block marked `sh`, each command must parse as it stands. In `backticks`, where `[NODE]` or
`FILE` stand for something, the verb and each option must exist. Configuration keys and files are looked up too.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from elasticrl.cli.main import VERBS, build
from elasticrl.config.section import leaves, sections
from elasticrl.config.tree import Tree
from elasticrl.telemetry.events import BY_NAME

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "bench" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "configs").rglob("*.md")),
    )
    if page.name != "NEXT.md"  # what is not there yet
]
#: What costs nothing and changes nothing, so it is run as it stands, at the top of the repository.
CHEAP = (["version"], ["config", "check"], ["config", "show"], ["config", "schema"])
HOMES = {"docs/EVENTS.md", "docs/METRICS.md", "docs/CONFIGURATION.md"}  # generated, with tests of their own


class Command(NamedTuple):
    """An `elasticrl` command. Example: Command(page="README.md:12", words=["status", "--watch"])"""

    page: str
    words: list[str]


def blocks(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, language and lines of each fenced block."""
    language, begun, lines = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip().startswith("```"):
            if language is None:
                language, begun, lines = line.strip().strip("`"), number, []
            else:
                yield begun, language, lines
                language = None
        elif language is not None:
            lines.append(line)


def split(line: str) -> Iterator[list[str]]:
    """The elasticrl commands of a shell line, without what stands before them and comments."""
    for part in re.split(r"&&|\|\||[|;]", line):
        words = shlex.split(part.split(" #")[0], comments=True)
        at = next((i for i, word in enumerate(words) if word in ("elasticrl", ".venv/bin/elasticrl")), None)
        if at is not None:
            yield [word for word in words[at + 1 :] if word != "&"]


def shell() -> list[Command]:
    found = []
    for page in PAGES:
        for begun, language, lines in blocks(page):
            if language == "sh":
                text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
                found += [Command(f"{page.name}:{begun}", words) for line in text.splitlines() for words in split(line)]
    return found


def mentioned() -> list[Command]:
    """In backticks, anywhere."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            texts = re.findall(r"`(elasticrl [^`]+)`", line.replace(r"\|", "/"))
            found += [Command(f"{page.name}:{number}", text.split()[1:]) for text in texts]
    return found


@cache
def verbs() -> dict[str, Any]:
    return dict(typer.main.get_command(build([])).commands)  # type: ignore[attr-defined] # it is a group


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the rest of them."""
    command, rest = verbs()[words[0]], words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


SHELL = shell()


def test_there_are_commands_to_look_at() -> None:
    assert len(SHELL) >= 8
    assert len(mentioned()) >= 40


@pytest.mark.parametrize("command", SHELL, ids=lambda command: f"{command.page} {' '.join(command.words)}")
def test_a_command_in_a_shell_block_parses(command: Command) -> None:
    found, rest = command_of(command.words)
    context = found.context_class(found, info_name=command.words[0])
    _, left, _ = found.make_parser(context).parse_args(list(rest))
    assert not left, f"too many arguments: {left}"
    for word in rest:
        if word.startswith(("docs/", "configs/")):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize(
    "command",
    [c for c in SHELL if any(c.words[: len(cheap)] == cheap for cheap in CHEAP)],
    ids=lambda c: " ".join(c.words),
)
def test_the_cheap_ones_do_what_they_say(command: Command) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticrl.cli.main", *command.words], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("ELASTICRL")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_plan_shows_what_the_quick_start_says_it_does(tmp_path: Path) -> None:
    (planned,) = [command.words for command in SHELL if command.words[0] == "plan"]
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    # The sample's lie on a disk that is not here.
    models = [f"{key}={tmp_path}" for key in ("model.path", "model.critic_path", "reward.model")]
    command = [sys.executable, "-m", "elasticrl.cli.main", *planned, *models]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in ("memory that stays", "bytes that it sends", "phase budgets"))


def test_every_bench_that_is_named_is_there_with_its_options() -> None:
    named = {
        (page.name, *found)
        for page in PAGES
        for found in re.findall(r"`python (bench/\w+\.py)([^`]*)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 6
    for page, program, rest in named:
        assert (ROOT / program).exists(), f"{page}: {program}"
        source = (ROOT / program).read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z-]+", rest):
            assert f'"{option}"' in source, f"{page}: {program} has no {option}"


def test_each_command_that_is_mentioned_has_its_verb_and_options() -> None:
    wrong = []
    for page, words in mentioned():
        verb = words[0].strip(".,:;")
        for name in re.split(r"[/,]", verb):
            if name.startswith("-") or not name:
                continue
            if name not in VERBS:
                wrong.append(f"{page}: there is no verb {name!r}")
                continue
            subs = words[1].split("/") if len(words) > 1 and hasattr(verbs()[name], "commands") else [""]
            options = {opt for word in words for opt in re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", word)}
            for sub in subs:
                group = verbs()[name]
                if sub and sub not in group.commands:
                    wrong.append(f"{page}: {name} has no {sub!r}")
                    continue
                command = group.commands[sub] if sub else group
                known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}
                wrong += [f"{page}: {name} {sub} has no {opt}" for opt in sorted(options - known)]
    assert not wrong, "\n".join(wrong)


def test_every_key_that_is_mentioned_exists() -> None:
    keys = set(leaves(Tree)) | {key for key, _ in sections(Tree)}
    tops = {key.split(".")[0] for key in keys if key}
    wrong = []
    for page in PAGES:
        if str(page.relative_to(ROOT)) in HOMES:
            continue
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for text in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?::[^`]*)?`", line):
                top = text.split(".")[0]
                if top in tops and text not in keys and not text.endswith((".py", ".md", ".yaml")):
                    wrong.append(f"{page.name}:{number}: {text}")
    known = {*BY_NAME, "data.train_batch_size", "rollout.n"}  # events; and what others call their keys
    wrong = [text for text in wrong if text.split(": ")[1] not in known and not module(text.split(": ")[1])]
    assert not wrong, "\n".join(wrong)


def module(text: str) -> bool:
    """Is it a module of ours, or something in one?"""
    parts = text.split(".")
    places = [ROOT / "elasticrl" / Path(*parts[:n]) for n in range(2, len(parts) + 1)]
    return any(place.with_suffix(".py").exists() or place.is_dir() for place in places)


def test_every_page_that_is_named_is_there() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"(?<![/\w])([A-Z]{4,}\.md)\b", text)) | set(
            re.findall(r"`((?:docs|configs|bench|systemd)/[\w./-]+)`", text)
        ):
            place = ROOT / name if "/" in name else ROOT / "docs" / name
            if not place.exists() and not (ROOT / name).exists():
                wrong.append(f"{page.name}: {name}")
    assert not wrong, "\n".join(wrong)


def test_every_target_of_make_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for text in re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert text in targets, f"{page.name}: make {text}"
