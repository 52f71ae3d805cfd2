"""The Dockerfile as stages and instructions, as far as its own uses it: no heredocs, no ONBUILD, no SHELL."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_VARIABLE = re.compile(r"\$\{(\w+)(?::([+-])((?:[^{}]|\$\{\w+\})*))?\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, continuation lines joined, variables as they are written."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of COPY, LABEL and ENV, or the items of a JSON list."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)

    @property
    def flags(self) -> dict[str, str]:
        """The `--name=value` before the words of COPY and RUN."""
        pairs = (word[2:].partition("=") for word in self.words if word.startswith("--"))
        return {name: value for name, _, value in pairs}


@dataclass(slots=True)
class Stage:
    """One FROM and what follows it; `base` is an image or the name of an earlier stage."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> Iterator[Instruction]:
        return (one for one in self.instructions if one.name == name)


def read(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Return the stages by name, in order. `arguments` replace the defaults of those ARGs that name the base.

    Raises:
        ValueError: an instruction comes before the first FROM, or a stage has no name.
    """
    stages: dict[str, Stage] = {}
    before: dict[str, str] = {}
    current: Stage | None = None
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            if not name:
                raise ValueError(f"FROM {base} gives its stage no name")
            current = stages[name] = Stage(name, expanded(base, {**before, **(arguments or {})}))
        elif current is not None:
            current.instructions.append(instruction)
        elif instruction.name == "ARG":
            argument, _, default = instruction.text.partition("=")
            before[argument] = default
        else:
            raise ValueError(f"{instruction.name} comes before the first FROM")
    return stages


def lineage(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """Return the stages that a target stands on, the first of them first, the target last."""
    stage = stages[target]
    return [*(lineage(stages, stage.base) if stage.base in stages else ()), stage]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word}; a name without a value is empty."""

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[4], "")
        match match[2]:
            case "+":
                return expanded(match[3], values) if value else ""
            case "-":
                return value or expanded(match[3], values)
        return value

    return _VARIABLE.sub(replace, text)


def _instructions(text: str) -> Iterator[Instruction]:
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in kept.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Instruction(name.upper(), re.sub(r"\s{2,}", " ", rest.strip()))
