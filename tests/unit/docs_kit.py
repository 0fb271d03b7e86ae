"""Commands that pages show, each read by the program that it is for.

Three kinds of places show commands: a block marked `sh` (each line), one marked `console` (what follows a `$`), and backticks.
There, and in a block marked `usage`, `[NODE]` or `FILE` stand for something: what is certain is looked up, the rest is left.
Whatever cannot be read raises `Misread`, which says why; nothing is passed over.
"""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import typer

from chaos.run import parser as chaos_parser
from elasticrl.cli.main import VERBS, build
from elasticrl.cli.torchrun import asked

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "bench" / "README.md",
    ROOT / "bench" / "COMPARISON.md",
    ROOT / "bench" / "FIGURES.md",
    ROOT / "bench" / "race" / "RESULTS.md",
    ROOT / "chaos" / "RECORD.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("*.md")),
]
#: What a block may hold. No block is without a word: it might be commands.
LANGUAGES = {"sh", "console", "usage", "text", "python", "ini", "yaml"}


class Misread(Exception):
    """This is no command that its program would take."""


class Line(NamedTuple):
    """A command as a page shows it. Example: Line(place="README.md:12", text="elasticrl status --watch", loose=False)"""

    place: str
    text: str
    loose: bool  # [NODE] and FILE stand for something


class Block(NamedTuple):
    """A fenced block, or an indented one, whose language is `indented`."""

    begun: int
    language: str
    lines: list[str]


# Pages


def named(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks, and indented ones where they are no part of a list."""
    language, begun, held = None, 0, list[str]()
    before, in_list = "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip().startswith("```"):
            if language is None:
                language, begun, held = line.strip().strip("`"), number, []
            else:
                yield Block(begun, language, held)
                language = None
        elif language is not None:
            held.append(line)
        elif line.startswith(" " * (6 if in_list else 4)) and not before.strip():
            yield Block(number, "indented", [line])
        elif line.strip() and not line.startswith(" "):
            in_list = bool(re.match(r"[-*] |\d+\. ", line))
        before = line
    assert language is None, f"{page.name}:{begun}: this block does not end"


def whole(block: Block) -> Iterator[tuple[int, str]]:
    """Its lines with their numbers, those that end in a backslash put together."""
    begun, text = 0, ""
    for number, line in enumerate(block.lines, block.begun + 1):
        begun, text = (begun, text + line.strip()) if text else (number, line.strip())
        if text.endswith("\\"):
            text = text[:-1]
            continue
        yield begun, text
        text = ""


def prose(page: Path) -> str:
    """The page with its blocks blank: as many lines as it has."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        for at in range(block.begun - 1, block.begun + len(block.lines)):
            lines[at] = ""
    return "\n".join("" if line.strip() == "```" else line for line in lines)


def lines(page: Path) -> Iterator[Line]:
    """All commands that a page shows."""
    name = named(page)
    for block in blocks(page):
        for number, text in whole(block):
            place = f"{name}:{number}"
            if block.language in ("sh", "usage") and text and not text.startswith("#"):
                loose = block.language == "usage"
                yield Line(place, text.replace("|", "/") if loose else text, loose)
            elif block.language == "console" and text.startswith("$ "):
                yield Line(place, text[2:], loose=False)
    text = prose(page)
    for match in re.finditer(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", text):
        shown = " ".join(match[1].replace(r"\|", "/").split())
        if " " in shown and first(shown) in PROGRAMS:
            yield Line(f"{name}:{text.count(chr(10), 0, match.start()) + 1}", shown, loose=True)


def hidden(page: Path) -> Iterator[str]:
    """Blocks that nobody could read: without a word, indented, or with a command where none is looked for."""
    name = named(page)
    for block in blocks(page):
        if block.language not in LANGUAGES:
            yield f"{name}:{block.begun}: a block is one of {', '.join(sorted(LANGUAGES))}, not {block.language!r}"
        elif block.language == "text":
            for number, text in whole(block):
                drawn = re.search(r"[\u2500-\u257f]", text)  # a picture may begin a line with a program's name
                if not drawn and " " in text and first(text.removeprefix("$ ")) in PROGRAMS:
                    yield f"{name}:{number}: this is a command in a block of text: {text}"


def first(text: str) -> str:
    """The program's name, without what is set for it and where it lies."""
    words = [word for word in text.split() if not re.match(r"[A-Z_]+=", word)]
    return re.sub(r"^(?:\.venv|venv)/bin/", "", words[0]) if words else ""


# Commands


def split(text: str) -> Iterator[list[str]]:
    """The commands of a shell line."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>")
        lexer.wordchars += "[]:,@%+{}$"
        lexer.whitespace_split = True
        words = [*lexer, ";"]
    except ValueError as error:
        raise Misread(str(error)) from error
    command = list[str]()
    for word in words:
        if not re.fullmatch(r"[|&;]+", word):
            command.append(word)
        elif command:
            yield command
            command = []


def read(line: Line) -> list[list[str]]:
    """Read what a line says. Returns the words of each `elasticrl` in it, without that one."""
    found = list[list[str]]()
    for words in split(line.text):
        _read(words, line.loose, found)
    return found


def _read(words: list[str], loose: bool, found: list[list[str]]) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return
    if ">" in words:  # where it writes to is its own affair
        words = words[: words.index(">")]
    program, rest = first(words[0]), words[1:]
    if program not in PROGRAMS:
        raise Misread(f"nobody here knows the program {program!r}: {' '.join(words)}")
    if program == "elasticrl":
        found.append(rest)
    inner = PROGRAMS[program](rest, loose)
    if inner:
        _read(inner, loose, found)


Inner = list[str] | None  # a command that this one runs


@cache
def verbs() -> dict[str, Any]:
    return dict(typer.main.get_command(build([])).commands)  # type: ignore[attr-defined] # it is a group


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the rest of them."""
    if words[0] not in VERBS:
        raise Misread(f"elasticrl has no verb {words[0]!r}")
    command, rest = verbs()[words[0]], words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise Misread(f"elasticrl {words[0]} has no {rest[0]!r}")
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def elasticrl(words: list[str], loose: bool) -> Inner:
    if loose:
        return _mentioned(words)
    if words[0] == "run":
        understood = asked(words[1:])
        if understood.problems:
            raise Misread(" ".join(understood.problems))
        words = ["run", *understood.own]
    found, rest = command_of(words)
    context = found.context_class(found, info_name=words[0])
    try:
        _, left, _ = found.make_parser(context).parse_args(list(rest))
    except Exception as error:  # click's, whichever
        raise Misread(f"{type(error).__name__}: {error}") from error
    if left:
        raise Misread(f"elasticrl {words[0]}: too many arguments: {left}")
    files(rest)
    return None


def _mentioned(words: list[str]) -> None:
    """`elasticrl pause/resume`, `elasticrl config check/show FILE`, `elasticrl drain [NODE]`: verbs and options exist."""
    options = {option for word in words for option in re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", word)} - {"--help"}
    for name in filter(None, re.split(r"[/,]", words[0].strip(".,:;"))):
        if name.startswith("-"):
            continue
        if name not in VERBS:
            raise Misread(f"elasticrl has no verb {name!r}")
        subs = words[1].split("/") if len(words) > 1 and hasattr(verbs()[name], "commands") else []
        for sub in subs or [None]:
            command, _ = command_of([name, *([sub] if sub else [])])
            known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            if options - known:
                raise Misread(f"elasticrl {name} {sub or ''} has no {', '.join(sorted(options - known))}")


def files(words: list[str]) -> None:
    """What lies in the repository is there."""
    for word in words:
        place = word.partition("=")[2] or word
        ours = place.startswith(("docs/", "configs/", "bench/", "chaos/", "tests/", "systemd/"))
        if ours and not (ROOT / place).exists():
            raise Misread(f"there is no {place}")


def python(words: list[str], loose: bool) -> Inner:
    if words[0] == "-m":
        module, rest = words[1], words[2:]
        if module == "chaos.run":
            _argparse(chaos_parser(), "chaos.run", rest, loose)
        elif module.startswith(("elasticrl.", "chaos.")):
            if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists():
                raise Misread(f"there is no module {module}")
        elif module not in ("venv", "torch.distributed.checkpoint.format_utils"):
            raise Misread(f"nobody here knows the module {module}")
    else:
        program, rest = words[0], words[1:]
        if not program.endswith(".py") or not (ROOT / program).exists():
            raise Misread(f"there is no {program}")
        _argparse(parser_of(program), program, rest, loose)
    files(rest)
    return None


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """A program's parser, made of the calls in its source (without the defaults): to import it would import torch."""
    parser = argparse.ArgumentParser()
    types = {"int": int, "float": float, "Path": Path, "str": str}
    for node in ast.walk(ast.parse((ROOT / program).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            asked: dict[str, Any] = {}
            for word in node.keywords:
                if word.arg == "type" and isinstance(word.value, ast.Name):
                    asked["type"] = types[word.value.id]
                elif word.arg in ("action", "nargs", "choices", "required"):
                    asked[word.arg] = ast.literal_eval(word.value)
            parser.add_argument(*(ast.literal_eval(name) for name in node.args), **asked)
    return parser


def _argparse(parser: argparse.ArgumentParser, program: str, words: list[str], loose: bool) -> None:
    if loose:
        if not words:
            return  # a program's name
        words = ["1" if re.fullmatch(r"[A-Z_]+", word) else word.strip("[]") for word in words]

    def refuse(message: str) -> None:
        raise Misread(f"{program}: {message}")

    parser.error = refuse  # type: ignore[method-assign, assignment] # the parser is ours alone
    for action in parser._actions:
        for sub in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            sub.error = refuse
    parser.parse_args(words)


def make(words: list[str], loose: bool) -> Inner:
    del loose
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", text, flags=re.MULTILINE))
    for word in words:
        name, given, _ = word.partition("=")
        if given and not re.search(rf"\$[({{]{name}\b|\$\(if \$\({name}\)", text):
            raise Misread(f"make: nothing reads {name}")
        if not given and name not in targets:
            raise Misread(f"make has no target {name!r}")
    return None


def pip(words: list[str], loose: bool) -> Inner:
    del loose
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if words[0] != "install":
        raise Misread(f"pip {words[0]}")
    for before, word in pairwise(words):
        if before in ("-c", "-r", "--constraint", "--requirement") and not (ROOT / word).exists():
            raise Misread(f"there is no {word}")
        for extra in (re.findall(r"\[(.*)\]", word) or [""])[0].split(","):
            if extra and extra not in extras:
                raise Misread(f"pyproject.toml has no extra {extra!r}")
    return None


def torchrun(words: list[str], loose: bool) -> Inner:
    if loose or words == ["..."]:
        return None
    from torch.distributed.run import get_args_parser

    _argparse(get_args_parser(), "torchrun", words, loose)
    return None


def docker(words: list[str], loose: bool) -> Inner:
    """Docker's own words are its own; what runs inside is ours. The image is called elasticrl, as its entry point is."""
    verb, rest = words[0], words[1:]
    if verb == "exec" and len(rest) > 1:
        return rest[1:]
    if verb == "run" and not loose:
        return rest[rest.index("elasticrl") :]
    if verb not in ("build", "exec", "logs", "run", "stop", "wait"):
        raise Misread(f"docker {verb}")
    return None


def systemctl(words: list[str], loose: bool) -> Inner:
    del loose
    units = {path.name.removesuffix(".service") for path in (ROOT / "systemd").glob("*.service")}
    for word in words[1:]:
        if not word.startswith("-") and word.partition("@")[0].removesuffix(".service") not in units:
            raise Misread(f"systemd/ has no unit {word}")
    return None


def sbatch(words: list[str], loose: bool) -> Inner:
    del loose
    if not (ROOT / "configs" / "slurm" / words[-1]).exists():
        raise Misread(f"configs/slurm has no {words[-1]}")
    return None


def srun(words: list[str], loose: bool) -> Inner:
    del loose
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] == "-w" else words[1:]
    return words


def sh(words: list[str], loose: bool) -> Inner:
    for command in split(words[1]):
        _read(command, loose, [])
    return None


def pytest(words: list[str], loose: bool) -> Inner:
    del loose
    return files(words)


def foreign(words: list[str], loose: bool) -> Inner:
    """Another's program, whose words are its own."""
    del words, loose
    return None


PROGRAMS: dict[str, Callable[[list[str], bool], Inner]] = {
    "elasticrl": elasticrl,
    "python": python,
    "python3": python,
    "python3.11": python,
    "pytest": pytest,
    "make": make,
    "pip": pip,
    "torchrun": torchrun,
    "docker": docker,
    "systemctl": systemctl,
    "sbatch": sbatch,
    "sh": sh,
    "exec": lambda words, _: words,
    "srun": srun,
    "env": lambda words, _: words,
    "sudo": lambda words, _: words[2:] if words[0] == "-u" else words,
    "runuser": lambda words, _: words[3:] if words[0] == "-u" else words,
    **dict.fromkeys((".", "set", "etcd", "etcdctl", "journalctl", "scontrol"), foreign),
}
