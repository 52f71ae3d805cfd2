"""`pagefleet serve MODEL`: settings, then the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pagefleet_protocol.early_stop import ended_by_sigterm

from pagefleet_engine.config import EngineConfig, ServerConfig, check_together
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.rank_settings import rank_settings
from pagefleet_engine.settings import ENGINE_SETTINGS, SERVE, engine_config, told_status


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
    rank_settings(engine, server)
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for secret, instead in (("--api-key", "--api-key-file"), ("--hf-token", "the variable HF_TOKEN")):
        if secret in flags:
            SERVE.say(f"{secret} can be read in the list of processes: prefer {instead}")
    return engine, server


def _check_folders(config: EngineConfig) -> None:
    """Look whether what is named is there, as far as that takes no time: nothing is downloaded.

    Raises:
        ModelLoadError: a folder is missing, or holds something else.
    """
    from pagefleet_engine.engine_core.model_folder import resolve_model_folder  # noqa: PLC0415
    from pagefleet_engine.local_model import (  # noqa: PLC0415 imports the downloader
        check_gguf,
        local_tokenizer,
        named_gguf,
        named_model,
    )

    if (file := named_gguf(config, os.environ)) is not None:
        check_gguf(file, with_tokenizer=config.model.tokenizer is None)
    elif not named_model(config, os.environ).fetchable:
        resolve_model_folder(config.model.model)
    local_tokenizer(config, os.environ)


@ended_by_sigterm()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status, with numbers of its own for mistakes in settings and for models."""
    try:
        engine, server = read_configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        if server.check:
            _check_folders(engine)
            return 0
        if server.headless:
            from pagefleet_engine.server.headless import serve_headless  # noqa: PLC0415 as below

            return serve_headless(engine, server)
        if engine.parallel.data_parallel_multi_port_external_lb:
            from pagefleet_engine.server.rank_servers import serve_ranks  # noqa: PLC0415 as below

            return serve_ranks(engine, server)
        from pagefleet_engine.client.core_ahead import core_ahead  # noqa: PLC0415 --help must not wait for it

        with core_ahead(engine) as ahead:
            from pagefleet_engine.server.serve import Parent, serve  # noqa: PLC0415 the core imports meanwhile

            return serve(engine, server, Parent(core=ahead))
    except ConfigError as error:
        return told_status(error)
    except KeyboardInterrupt:
        return 130  # a Ctrl-C before there was anything to stop


if __name__ == "__main__":
    sys.exit(main())
