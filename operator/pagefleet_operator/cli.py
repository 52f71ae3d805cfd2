"""`pagefleet up FILE`: serves the InferenceServices of a file or folder on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = """\
Serves the InferenceServices of a YAML file, or of all YAML files of a folder, as processes of this machine: engines,
and a router in front of them. Edit the file while it runs: replicas are added and removed, other changes replace one
engine after the other without losing a request. Ctrl-C lets running requests finish; once more ends them.

Models of hf://, s3:// and gs:// are downloaded into ~/.cache/pagefleet/models first; credentials come from the
environment (HF_TOKEN, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS). InferenceProfiles of the file give defaults.
Fields that mean something in a cluster alone are named when a service starts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 after a clean stop, 1 when it cannot run, 130 when a second Ctrl-C ended it."""
    arguments = _parser().parse_args(argv)
    try:
        # After parsing: --help is instant, and a mistake on the command line costs nothing.
        from pagefleet_operator.local.up import up  # noqa: PLC0415

        return up(
            manifest=arguments.manifest,
            host=arguments.host,
            port=arguments.port,
            state_dir=arguments.state_dir,
            environment=os.environ,
        )
    except KeyboardInterrupt:
        return 130  # a Ctrl-C before there was anything to stop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet up", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", metavar="FILE", type=Path, help="YAML file, or folder of YAML files")
    parser.add_argument("--host", default="127.0.0.1", help="address of the routers (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="port of the first router, further ones get the next free ports; 0 takes any (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="folder for logs and records (default: one for each FILE in ~/.local/state/pagefleet)",
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
