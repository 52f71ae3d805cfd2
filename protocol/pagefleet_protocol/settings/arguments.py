"""A command line as people write it, turned into what argparse takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagefleet_protocol.settings.fields import FALSE, TRUE, Takes


@dataclass(frozen=True, slots=True)
class Flag:
    """What follows a flag, and how argparse wants it."""

    takes: Takes
    is_positional: bool = False
    """It spells what may be given without a flag, and goes on without it."""
    write: Callable[[str, Sequence[str]], Sequence[str]] = lambda flag, words: [flag, *words]
    """Returns the arguments for a flag and the words that follow it."""


def spelled_out(arguments: Sequence[str], flags: Mapping[str, Flag], num_positional: int) -> Iterator[str]:
    """Yield the arguments with each flag in its one spelling: `--flag_name` as `--flag-name`, `--flag.key` as `--flag`.

    Where all positional arguments are there, the words after a flag that takes several are all its own.

    Args:
        arguments: as given.
        flags: every flag that is known.
        num_positional: arguments without a flag.
    """
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            yield from [argument, *rest]
            return
        if not argument.startswith("-") or argument == "-":
            num_positional -= 1
            yield argument
            continue
        given, equals, text = argument.partition("=")
        name = _known(given, flags)
        flag = flags.get(name)
        if flag is None:
            yield argument
            continue
        num_positional -= flag.is_positional
        words = [text] if equals else []
        if flag.takes != "switch" and not equals and rest:
            words.append(rest.popleft())
        while flag.takes == "words" and num_positional <= 0 and rest and not rest[0].startswith("-"):
            words.append(rest.popleft())
        yield from words if flag.is_positional and words else flag.write(name, words)


def write_once(flag: str, words: Sequence[str]) -> Sequence[str]:
    """Write one value, or several with commas between them."""
    return [f"{flag}={','.join(words)}"] if words else [flag]


def write_each(flag: str, words: Sequence[str]) -> Sequence[str]:
    """Write the flag before each value."""
    return [f"{flag}={word}" for word in words] or [flag]


def _write_switch(flag: str, words: Sequence[str]) -> Sequence[str]:
    """Write `--flag=false` as `--no-flag`."""
    text = words[0].lower() if words else "true"
    if text not in TRUE + FALSE:
        raise ValueError(f"{flag} is {words[0][:80]!r}: give true or false")
    return [flag if text in TRUE else f"--no-{flag.removeprefix('--')}"]


SWITCH = Flag("switch", write=_write_switch)
NO_SWITCH = Flag("switch", write=write_once)


def _known(flag: str, flags: Mapping[str, Flag]) -> str:
    if flag in flags or not flag.startswith("--"):
        return flag
    dashed = flag.replace("_", "-")
    return dashed if dashed in flags else dashed.partition(".")[0]
