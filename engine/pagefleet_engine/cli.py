"""`pagefleet serve MODEL`: settings, then the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pagefleet_protocol.exit_status import MODEL_NOT_LOADED

from pagefleet_engine.config import EngineConfig, ServerConfig, check_together
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.settings import ENGINE_SETTINGS, SERVE, engine_config


def read_configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    """Work out the configuration.

    Raises:
        ConfigError: a flag or a setting is unknown or cannot work.
        SystemExit: the help was asked for.
    """
    given = SERVE.read(arguments, environment)
    engine = engine_config({name: value for name, value in given.items() if name in ENGINE_SETTINGS})
    server = SERVE.build(ServerConfig, given)
    check_together(engine, server)
    return engine, server


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status, with numbers of its own for mistakes in settings and for models."""
    try:
        engine, server = read_configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        from pagefleet_engine.server.app import serve  # noqa: PLC0415 --help must not wait for it

        return serve(engine, server)
    except ConfigError as error:
        status = SERVE.tell(error)
        return MODEL_NOT_LOADED if isinstance(error, ModelLoadError) else status


if __name__ == "__main__":
    sys.exit(main())
