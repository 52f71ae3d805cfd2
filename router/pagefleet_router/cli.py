"""`pagefleet route`: flags from the fields of the configuration, then the router.

A setting comes, in this order, from a flag, the environment (PAGEFLEET_ROUTER_POLICY), or the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError

ENVIRONMENT_PREFIX = "PAGEFLEET_ROUTER_"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; options that are not given are absent from its result."""
    parser = argparse.ArgumentParser(
        prog="pagefleet route",
        description="Route OpenAI requests to the engines of a fleet.",
        epilog=f"Every option can also be set by the environment, e.g. {ENVIRONMENT_PREFIX}POLICY=least-load.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for field in fields(RouterConfig):
        flag = "--" + field.name.replace("_", "-")
        default = field.default
        text = field.metadata["help"] + ("" if default in (None, (), MISSING, False) else f" Default: {default}.")
        options: dict[str, Any] = {"dest": field.name, "help": text}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            options |= {"action": "append", "metavar": field.metadata["metavar"]}
        else:
            choices = field.metadata.get("choices")
            options["metavar"] = "{" + ",".join(choices) + "}" if choices else _kind(field).__name__.upper()
        parser.add_argument(flag, **options)
    return parser


def read_configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterConfig:
    """Work out the configuration.

    Raises:
        ConfigError: a setting is of the wrong type or cannot work.
        SystemExit: argparse has answered, e.g. with the help.
    """
    given = vars(build_parser().parse_args(arguments))
    values: dict[str, Any] = {}
    for field in fields(RouterConfig):
        text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
        # Kubernetes gives `..._PORT=tcp://...` to every pod beside a Service called pagefleet-router.
        if text is not None and not (field.name == "port" and text.startswith("tcp://")):
            values[field.name] = parse(field, text)
    for field in fields(RouterConfig):
        if field.name in given:
            values[field.name] = parse(field, given[field.name])
    return RouterConfig(**values)


def parse(field: Field[Any], value: str | bool | list[str]) -> Any:
    """Return a value for a field from what a flag or a variable holds.

    Raises:
        ConfigError: it is of another type.
    """
    if isinstance(value, bool):
        return value
    if isinstance(field.default, tuple):
        return tuple(value.split(",") if isinstance(value, str) else value)
    assert isinstance(value, str)
    if isinstance(field.default, bool):
        if value.lower() not in {"true", "false", "1", "0"}:
            raise ConfigError(f"{field.name} is {value!r}: give true or false")
        return value.lower() in {"true", "1"}
    try:
        return _kind(field)(value)
    except ValueError:
        raise ConfigError(f"{field.name} is {value!r}: give a number") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router; returns the exit status, 2 for a mistake in the settings."""
    try:
        config = read_configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        # --help must not wait for these.
        import uvloop  # noqa: PLC0415

        from pagefleet_router.app import serve  # noqa: PLC0415
        from pagefleet_router.telemetry.log import set_up_logging  # noqa: PLC0415
        from pagefleet_router.workers.parent import run_workers  # noqa: PLC0415

        set_up_logging()
        if config.workers > 1:
            return run_workers(config, lambda share, seat: uvloop.run(serve(share, seat)))
        return int(uvloop.run(serve(config)))
    except ConfigError as error:
        print(f"pagefleet route: {error}", file=sys.stderr)
        return 2


def _kind(field: Field[Any]) -> type:
    if isinstance(field.default, int | float):
        return type(field.default)
    return Path if "Path" in str(field.type) else str


if __name__ == "__main__":
    sys.exit(main())
