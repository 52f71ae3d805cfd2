"""The commands that the documents tell people to type: in blocks, and in running text between backticks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
)
PROGRAMS = (
    *("pagefleet", "make", "python", "kubectl", "helm", "curl", "docker", "cosign", "pip", "uvx", "git"),
    *("pre-commit", "openssl", "seq", "uv", "conda", "npm", "apt", "apt-get", "sudo", "promtool", "vllm", "hf"),
)
"""What may begin a command; the rest of a shell's line (echo, grep, xargs, variables) only joins them."""

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SHELLS = ("", "sh", "bash", "shell", "console")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_HEREDOC = re.compile(r"<<(\w+)\n.*?^\1$", re.MULTILINE | re.DOTALL)
_BETWEEN = re.compile(r"[();<>|&\n]+")
_FUNCTION = re.compile(r"\{\n(.*?)\n *\}", re.DOTALL)
_BEGINNING = re.compile(rf" *(?:(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)})(?: |$)|for |while |[A-Z]+=\$\()")


@dataclass(frozen=True, slots=True)
class Command:
    """One program with its arguments, as a document has it."""

    document: Path
    words: tuple[str, ...]
    in_block: bool
    """To be pasted as it stands; in running text it may lack what goes without saying."""

    def __str__(self) -> str:
        return shlex.join(self.words)


def documented_commands() -> list[Command]:
    """Return every command of the documents, in their order."""
    return [command for document in DOCUMENTS for command in commands_of(document)]


def commands_of(document: Path) -> Iterator[Command]:
    """Yield the commands of one document: those of blocks first."""
    text = document.read_text()
    for language, block in _BLOCK.findall(text):
        if language in _SHELLS:
            for line in typed_lines(block):
                yield from (Command(document, words, in_block=True) for words in simple_commands(line))
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        if _BEGINNING.match(span) and " " in span:
            yield from (Command(document, words, in_block=False) for words in simple_commands(span))


def typed_lines(block: str) -> list[str]:
    """Return what is typed, of a block that may show what is answered, too.

    Where lines begin with `$ `, it is those, and the bodies of their functions; else those that begin as commands do.
    """
    joined = re.sub(r"\\\n\s*", "", _HEREDOC.sub("", block))
    lines = _FUNCTION.sub(lambda body: "{ ;" + body[1].replace("\n", ";"), joined).splitlines()
    prompted = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
    return prompted or [line for line in lines if _BEGINNING.match(line)]


def simple_commands(line: str) -> list[tuple[str, ...]]:
    """Return the words of each program that a line of shell runs; of loops and pipes what is between their words."""
    lexer = shlex.shlex(line.strip(), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    try:
        for word in lexer:
            if _BETWEEN.fullmatch(word):
                found.append([])
            elif word in PROGRAMS or word.removeprefix(".venv/bin/") in PROGRAMS:
                # Behind `do`, `xargs -P 4` or `KEY=value`; but `uvx pagefleet` is one command.
                found[-1] = [*found[-1], word] if found[-1][:1] and found[-1][0] in PROGRAMS else [word]
            else:
                found[-1].append(word)
    except ValueError:  # an apostrophe: this is prose, or what a program printed
        return []
    cleaned = [(words[0].removeprefix(".venv/bin/"), *words[1:]) for words in found if words]
    return [words for words in cleaned if words[0] in PROGRAMS]
