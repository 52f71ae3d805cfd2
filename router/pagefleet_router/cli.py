"""`pagefleet route`: settings, then the router."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from pagefleet_protocol.early_stop import ended_by_sigterm
from pagefleet_protocol.settings.program import Program

from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError

ROUTE = Program(
    name="pagefleet route",
    description="Routes OpenAI requests to the engines of a fleet.",
    groups={"router": RouterConfig},
    environment="PAGEFLEET_ROUTER_",
    error=ConfigError,
)


def read_configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterConfig:
    """Work out the configuration.

    Raises:
        ConfigError: a setting is unknown or cannot work.
        SystemExit: the help was asked for.
    """
    return ROUTE.build(RouterConfig, ROUTE.read(arguments, environment))


@ended_by_sigterm()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router; returns the exit status, 2 for a mistake in the settings."""
    try:
        config = read_configuration(sys.argv[1:] if arguments is None else arguments, os.environ)
        # --help must not wait for these.
        import uvloop  # noqa: PLC0415
        from pagefleet_protocol.settings.log import set_up_logging  # noqa: PLC0415

        from pagefleet_router.app import serve  # noqa: PLC0415
        from pagefleet_router.workers.parent import run_workers  # noqa: PLC0415

        set_up_logging("router", "pagefleet_router")
        if config.workers > 1:
            return run_workers(config, lambda share, seat: uvloop.run(serve(share, seat)))
        return int(uvloop.run(serve(config)))
    except ConfigError as error:
        return ROUTE.tell(error)


if __name__ == "__main__":
    sys.exit(main())
