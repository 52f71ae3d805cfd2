"""`pagefleet serve MODEL`: flags from the fields of the configuration, then the server.

The same settings come, in this order, from a flag, the environment (PAGEFLEET_ENGINE_MAX_MODEL_LEN), a YAML file
(`--config`), or the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn

from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.exit_status import MISTAKE, MODEL_NOT_LOADED

from pagefleet_engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    check_together,
)
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.settings import Setting, close_matches, engine_config, server_config, settings

ENVIRONMENT_PREFIX = "PAGEFLEET_ENGINE_"
_TITLES = {
    ModelConfig: "model",
    CacheConfig: "KV cache",
    SchedulerConfig: "scheduling",
    ExecutionConfig: "execution",
    KVTransferConfig: "KV transfer",
    ServerConfig: "server",
}


class OneLineParser(argparse.ArgumentParser):
    """Tells a mistake in one line; argparse itself would print the usage of every option before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; options that are not given are absent from its result."""
    parser = OneLineParser(
        prog="pagefleet serve",
        description="Serve a model with an OpenAI-compatible API.",
        epilog=f"Every option can also be set by the environment ({ENVIRONMENT_PREFIX}MAX_MODEL_LEN=4096) "
        "or in the YAML file of --config (max_model_len: 4096). "
        f"Exit status: {MISTAKE} for a setting that cannot work, {MODEL_NOT_LOADED} for a model that cannot be loaded.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=settings()["model"].help)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings.")
    groups = {group: parser.add_argument_group(title) for group, title in _TITLES.items()}
    for setting in settings().values():
        if setting.name != "model":
            add_option(groups[setting.group], setting, setting.name)
    return parser


def read_configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    """Work out the configuration.

    Raises:
        ConfigError: a flag or a setting is unknown or cannot work.
        SystemExit: argparse has shown the help.
    """
    given = vars(_parse(arguments))
    file = given.pop("config", None)
    values = {**(_from_file(Path(file)) if file else {}), **_from_environment(environment), **given}
    server = {name: value for name, value in values.items() if settings()[name].group is ServerConfig}
    engine = {name: value for name, value in values.items() if name not in server}
    configured = engine_config(engine), server_config(server)
    check_together(*configured)
    return configured


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parsed, unknown = build_parser().parse_known_args(arguments)
    if not unknown:
        return parsed
    flag = unknown[0].partition("=")[0]
    known = ["--" + name.replace("_", "-") for name in settings()]
    hint = close_matches(flag, known)
    raise ConfigError(f"unknown argument {ascii(flag)[:80]}{hint} (see pagefleet serve --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status, with numbers of its own for mistakes in settings and for models."""
    try:
        engine, server = read_configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        from pagefleet_engine.server.app import serve  # noqa: PLC0415 --help must not wait for it

        return serve(engine, server)
    except ConfigError as error:
        print(f"pagefleet serve: error: {error}", file=sys.stderr)
        return MODEL_NOT_LOADED if isinstance(error, ModelLoadError) else MISTAKE


def add_option(group: argparse._ArgumentGroup, setting: Setting, dest: str) -> None:
    """Add the flag of a setting; its value, as text, becomes the attribute `dest`, absent if it is not given."""
    flag = "--" + setting.name.replace("_", "-")
    text = setting.help.replace("%", "%%")
    if setting.default not in (None, MISSING) and "default" not in text:
        text += f" Default: {setting.default}."
    options: dict[str, Any] = {"dest": dest, "help": text, "default": argparse.SUPPRESS}
    if setting.kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    else:
        metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.kind.__name__.upper()
        group.add_argument(flag, metavar=metavar, **options)


def _from_file(file: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 only this option needs it

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read ({type(error).__name__}): check the path") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file} holds no settings: write lines such as `max_model_len: 4096`")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in values:
        if name not in settings():
            raise ConfigError(f"--config {file}: {name} is not a setting{close_matches(name, list(settings()))}")
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Take the variables that name a setting.

    Others with the prefix are no mistake: Kubernetes itself adds some for a Service called `pagefleet-engine`, among
    them `..._PORT=tcp://...`, which is not ours either.
    """
    values = {}
    for name in settings():
        value = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if value is not None and not (name == "port" and value.startswith("tcp://")):
            values[name] = value
    return values


if __name__ == "__main__":
    sys.exit(main())
