"""The settings of one program: each from a flag, else a variable, else a YAML file, else its default.

PROGRAM = Program(name="pagefleet serve", groups={"model": ModelConfig, "server": ServerConfig}, ...)
given = PROGRAM.read(sys.argv[1:], os.environ)
server = PROGRAM.build(ServerConfig, given)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pagefleet_protocol.exit_status import MISTAKE
from pagefleet_protocol.settings.fields import Setting, settings_of
from pagefleet_protocol.settings.log import LEVELS, LOG_LEVEL, log_level
from pagefleet_protocol.spelling import near_words

_Group = TypeVar("_Group")
_CONFIG = "config"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a program can be told. Names of settings are unique over its groups."""

    name: str
    description: str
    groups: Mapping[str, type[Any]]
    """Dataclasses by their titles in the help; each field is a setting."""
    environment: str
    """How its variables begin, e.g. `PAGEFLEET_ENGINE_`."""
    error: type[Exception]
    """What a mistake raises: the component's own."""
    positional: tuple[str, ...] = ()
    """Settings that are given without a flag, in order."""
    epilog: str = ""

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Every setting by name, in the order of the groups."""
        return {name: setting for group in self.groups.values() for name, setting in settings_of(group).items()}

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of all settings that were given, by name.

        Raises:
            error: a flag, a name in the file or a value is wrong; the message is one line and says what to do.
            SystemExit: the help was asked for and has been shown.
        """
        try:
            log_level(environment)
            given = self._read_flags(arguments)
            file = given.pop(_CONFIG, None)
            values = self._read_file(Path(file)) if file else {}
            return {**values, **self._read_environment(environment), **given}
        except ValueError as wrong:
            raise self.error(str(wrong)) from None

    def build(self, group: type[_Group], values: Mapping[str, Any]) -> _Group:
        """Make a configuration of those values that are its fields.

        Raises:
            error: a value that has no default is missing, or the values do not go together.
        """
        fields = settings_of(group)
        missing = [
            one for name, one in fields.items() if one.default is dataclasses.MISSING and values.get(name) is None
        ]
        if missing:
            why = f": {missing[0].help}" if len(missing) == 1 else f" (see {self.name} --help)"
            raise self.error(f"give {', '.join(map(self._called, missing))}{why}")
        return group(**{name: value for name, value in values.items() if name in fields})

    def tell(self, error: Exception) -> int:
        """Print what went wrong, each line of it as `pagefleet VERB: error: ...`; returns the status for a mistake."""
        for line in str(error).splitlines():
            print(f"{self.name}: error: {line}", file=sys.stderr)
        return MISTAKE

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the flags; what is not given is absent from its result."""
        parser = OneLineParser(
            prog=self.name,
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"Every option can also be set by a variable ({self.environment}NAME) or in the YAML file of "
            f"--config (name: value).\n{LOG_LEVEL} is one of {', '.join(LEVELS)}. "
            f"Status {MISTAKE}: a mistake in a setting." + (f"\n{self.epilog}" if self.epilog else ""),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        for name in self.positional:
            parser.add_argument(name, nargs="?", metavar=name.upper(), help=_help_text(self.settings[name]))
        parser.add_argument("--config", dest=_CONFIG, metavar="FILE", help="YAML file of settings.")
        for title, group in self.groups.items():
            section = parser.add_argument_group(title)
            for name, setting in settings_of(group).items():
                if name not in self.positional:
                    add_flag(section, setting, name)
        return parser

    def _read_flags(self, arguments: Sequence[str]) -> dict[str, Any]:
        parser = self.parser()
        try:
            parsed, unknown = parser.parse_known_args([*self._spelled_out(arguments)])
        except FlagError as wrong:
            raise ValueError(str(wrong)) from None
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = near_words(flag, ["--config", *(setting.flag for setting in self.settings.values())])
            hint = f"; did you mean {near[0]}?" if near and flag.startswith("--") else ""
            raise ValueError(f"unknown argument {ascii(flag)[:80]}{hint} (see {self.name} --help)")
        values = vars(parsed)
        for name in values.keys() - {_CONFIG}:
            setting = self.settings[name]
            values[name] = setting.parse(values[name], self._called(setting))
        return values

    def _called(self, setting: Setting) -> str:
        return setting.name.upper() if setting.name in self.positional else setting.flag

    def _spelled_out(self, arguments: Sequence[str]) -> Iterator[str]:
        """Write `--flag=false` of a boolean as `--no-flag`."""
        flags = {setting.flag: setting for setting in self.settings.values() if setting.kind is bool}
        rest = iter(arguments)
        for argument in rest:
            flag, equals, text = argument.partition("=")
            if argument == "--":
                yield from itertools.chain([argument], rest)
            elif equals and flag in flags:
                yield flag if flags[flag].parse(text, flag) else f"--no-{flag.removeprefix('--')}"
            else:
                yield argument

    def _read_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Take the variables that name a setting.

        Others with the prefix are no mistake: Kubernetes itself adds some for a Service called `pagefleet-engine`,
        among them `..._PORT=tcp://...`, which is not ours either.
        """
        found: dict[str, tuple[str, object]] = {}
        for name in self._names():
            variable = self.environment + name.upper()
            text = environment.get(variable)
            if text is None or (name == "port" and text.startswith("tcp://")):
                continue
            setting = self.settings.get(name)
            entries = [entry.strip() for entry in text.split(",") if entry.strip()]
            found[name] = variable, entries if setting is not None and setting.is_list else text
        return self._parse_named(found)

    def _read_file(self, file: Path) -> dict[str, Any]:
        import yaml  # noqa: PLC0415 - only this option needs it

        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {file} cannot be read ({type(error).__name__}): check the path") from None
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"--config {file} is not YAML: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(content, dict):
            raise ValueError(f"--config {file} holds no settings: write lines such as `port: 8000`")
        found = {}
        for written, value in content.items():
            name = str(written).replace("-", "_")
            if name not in self._names():
                near = near_words(name, self.settings)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"--config {file}: {name[:80]!a} is not a setting{hint}")
            found[name] = f"--config {file}: {name}", value
        return self._parse_named(found)

    def _names(self) -> list[str]:
        """What a variable or a line may name: settings, and `no_NAME` for a boolean."""
        negated = [f"no_{name}" for name, setting in self.settings.items() if setting.kind is bool]
        return [*self.settings, *negated]

    def _parse_named(self, found: Mapping[str, tuple[str, object]]) -> dict[str, Any]:
        """Parse values by the names of `_names`, each with what it is called there."""
        values: dict[str, Any] = {}
        for written, (called, value) in found.items():
            name = written if written in self.settings else written.removeprefix("no_")
            parsed = self.settings[name].parse(value, called)
            if name != written:
                if name in found:
                    raise ValueError(f"{called} and {found[name][0]} are both given: leave one out")
                parsed = not parsed
            values[name] = parsed
        return values


class FlagError(Exception):
    """A mistake that argparse found."""


class OneLineParser(argparse.ArgumentParser):
    """Tells a mistake in one line; argparse itself would print the usage of every option before it."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message} (see {self.prog} --help)")


def add_flag(group: argparse._ActionsContainer, setting: Setting, dest: str) -> None:
    """Add the flag of a setting; its value, as text, becomes the attribute `dest`, absent if it is not given."""
    options: dict[str, Any] = {"dest": dest, "help": _help_text(setting), "default": argparse.SUPPRESS}
    if setting.kind is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **options)
    else:
        action = "append" if setting.is_list else "store"
        group.add_argument(setting.flag, action=action, metavar=setting.value_name, **options)


def _help_text(setting: Setting) -> str:
    text = setting.help + (" Repeatable." if setting.is_list else "")
    default = setting.default
    if default not in (None, dataclasses.MISSING, (), "") and default is not False and "default" not in text:
        shown = ", ".join(map(str, default)) if setting.is_list else default
        text += f" Default: {shown}."
    return text.replace("%", "%%")
