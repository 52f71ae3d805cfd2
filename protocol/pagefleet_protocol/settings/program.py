"""The settings of one program: each from a flag, else a variable, else a YAML file, else its default.

PROGRAM = Program(name="pagefleet serve", groups={"model": ModelConfig, "server": ServerConfig}, ...)
given = PROGRAM.read(sys.argv[1:], os.environ)
server = PROGRAM.build(ServerConfig, given)
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pagefleet_protocol.exit_status import MISTAKE
from pagefleet_protocol.settings.arguments import NO_SWITCH, SWITCH, Flag, spelled_out, write_each, write_once
from pagefleet_protocol.settings.fields import Setting, settings_of
from pagefleet_protocol.settings.foreign import ForeignOption
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
    """Settings that may be given without a flag, in order."""
    epilog: str = ""
    foreign: Callable[[], Mapping[str, ForeignOption]] = dict
    """Returns options of another program that are understood, by their names there."""

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
        neutral: list[str] = []
        try:
            log_level(environment)
            given = self._read_flags(arguments, neutral)
            file = given.pop(_CONFIG, None)
            values = self._read_file(Path(file), neutral) if file else {}
            values = {**values, **self._read_environment(environment), **given}
        except ValueError as wrong:
            raise self.error(str(wrong)) from None
        if neutral:
            self.say(f"nothing changes by {', '.join(neutral)}: ignored")
        return values

    def meaning(self, name: str, value: object, called: str, neutral: list[str]) -> Mapping[str, Any]:
        """Return the settings that a name stands for: itself, or what an option of the other program means.

        Args:
            name: of a setting, or of the other program's option.
            value: text, or what YAML or a caller makes of it.
            called: what it is called where it was found.
            neutral: gets what is called so if it changes nothing here.

        Raises:
            ValueError: the value cannot be, or nothing here is what the option asks for.
        """
        option = self.foreign().get(name)
        if option is not None and (option.is_neutral(value) or (value is None and name not in self.settings)):
            neutral.append(called)
            return {}
        if name in self.settings:
            return {name: self.settings[name].parse(value, called)}
        assert option is not None, f"{name} is neither a setting nor an option"
        meant = option.settings(value, called)
        return {found: self.settings[found].parse(one, called) for found, one in meant.items()}

    def build(self, group: type[_Group], values: Mapping[str, Any]) -> _Group:
        """Make a configuration of those values that are its fields.

        Raises:
            error: a value that has no default is missing, or the values do not go together.
        """
        fields = settings_of(group)
        missing = [
            name for name, one in fields.items() if one.default is dataclasses.MISSING and values.get(name) is None
        ]
        if missing:
            why = f": {fields[missing[0]].help}" if len(missing) == 1 else f" (see {self.name} --help)"
            raise self.error(f"give {', '.join(map(self._called, missing))}{why}")
        return group(**{name: value for name, value in values.items() if name in fields})

    def say(self, text: str) -> None:
        """Print a line as `pagefleet VERB: ...`."""
        print(f"{self.name}: {text}", file=sys.stderr)

    def tell(self, error: Exception) -> int:
        """Print what went wrong, each line of it as `pagefleet VERB: error: ...`; returns the status for a mistake."""
        for line in str(error).splitlines():
            self.say(f"error: {line}")
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
        for name, option in self.foreign().items():
            self._add_foreign(parser, name, option)
        return parser

    def _add_foreign(self, parser: argparse.ArgumentParser, name: str, option: ForeignOption) -> None:
        flags = [*option.flags] if name in self.settings else [_flag(name), *option.flags]
        if not flags:
            return
        if option.takes == "switch":
            parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            several = "+" if option.takes == "words" else None
            parser.add_argument(*flags, dest=name, nargs=several, help=argparse.SUPPRESS)

    def _read_flags(self, arguments: Sequence[str], neutral: list[str]) -> dict[str, Any]:
        parser = self.parser()
        try:
            parsed, unknown = parser.parse_known_args([*spelled_out(arguments, self._flags(), len(self.positional))])
        except FlagError as wrong:
            raise ValueError(str(wrong)) from None
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = near_words(flag, ["--config", *(setting.flag for setting in self.settings.values())])
            hint = f"; did you mean {near[0]}?" if near and flag.startswith("--") else ""
            raise ValueError(f"unknown argument {ascii(flag)[:80]}{hint} (see {self.name} --help)")
        values: dict[str, Any] = {}
        for name, value in vars(parsed).items():
            values |= {name: value} if name == _CONFIG else self.meaning(name, value, self._called(name), neutral)
        return values

    def _called(self, name: str) -> str:
        return name.upper() if name in self.positional else _flag(name)

    def _flags(self) -> Mapping[str, Flag]:
        """Every flag, as a command line may have it."""
        flags = {"--config": Flag("value", write=write_once)}
        for name, option in self.foreign().items():
            flag = SWITCH if option.takes == "switch" else Flag(option.takes)
            flags |= dict.fromkeys([_flag(name), *option.flags], flag)
        for name, setting in self.settings.items():
            own = Flag(setting.takes, name in self.positional, write_each if setting.is_list else write_once)
            flags[setting.flag] = SWITCH if setting.takes == "switch" else own
        off = {f"--no-{flag[2:]}": NO_SWITCH for flag, how in flags.items() if how is SWITCH}
        return flags | off

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

    def _read_file(self, file: Path, neutral: list[str]) -> dict[str, Any]:
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
        foreign: dict[str, Any] = {}
        for written, value in content.items():
            name = str(written).replace("-", "_")
            option = self.foreign().get(name)
            if option is not None and (name not in self._names() or option.is_neutral(value)):
                ignored: list[str] = []
                foreign |= self.meaning(name, value, f"--config {file}: {name}", ignored)
                neutral += [name] * len(ignored)
                continue
            if name not in self._names():
                near = near_words(name, self.settings)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"--config {file}: {name[:80]!a} is not a setting{hint}")
            found[name] = f"--config {file}: {name}", value
        return {**foreign, **self._parse_named(found)}

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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
