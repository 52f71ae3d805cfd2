"""`pagefleet up FILE`: serves the InferenceServices of a file or folder, or a model by its name, on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.settings.fields import Count, HostName, Port
from pagefleet_protocol.settings.program import Program

from pagefleet_operator.errors import ManifestError, OperatorError, SettingsError

_DESCRIPTION = """\
Serves the InferenceServices of a YAML file, or of all YAML files of a folder, as processes of this machine: engines,
and a router in front of them. Edit the file while it runs: replicas are added and removed, other changes replace one
engine after the other without losing a request. Ctrl-C lets running requests finish; once more ends them.
A model's name (Qwen/Qwen3-0.6B, a model's folder, builtin://tiny) stands for a file with one InferenceService.

Models of hf://, s3:// and gs:// are downloaded first, those of the hub into the cache of its tools (HF_HOME);
credentials come from the environment (HF_TOKEN, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS). InferenceProfiles
of the file give defaults. Fields that mean something in a cluster alone are named when a service starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What `pagefleet up` can be told."""

    file: str
    """YAML file, folder of YAML files, or a model: organization/name of the hub, a model's folder, builtin://tiny."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub."""
    replicas: Count | None = None
    """Engines of a model that is named; default: 1."""
    host: HostName = "127.0.0.1"
    """Address of the routers."""
    port: Port = 8000
    """Port of the first router, further ones get the next free ports; 0 takes any."""
    state_dir: Path | None = None
    """Folder for logs and records; default: one for each FILE in ~/.local/state/pagefleet."""


UP = Program(
    name="pagefleet up",
    description=_DESCRIPTION,
    groups={"fleet": UpConfig},
    environment="PAGEFLEET_UP_",
    error=SettingsError,
    positional=("file",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 after a clean stop, 1 when it cannot run, 2 when flags or the file have mistakes, 130 when a second Ctrl-C
        ended it.
    """
    try:
        config = UP.build(UpConfig, UP.read(sys.argv[1:] if argv is None else argv, os.environ))
        # After parsing: --help is instant, and a mistake on the command line costs nothing.
        from pagefleet_operator.local.named import fleet_source  # noqa: PLC0415
        from pagefleet_operator.local.up import up  # noqa: PLC0415

        source = fleet_source(config.file, config.revision, config.replicas, os.environ)
        return up(
            source=source,
            host=config.host,
            port=config.port,
            state_dir=config.state_dir,
            environment=os.environ,
        )
    except OperatorError as error:
        status = UP.tell(error)
        return status if isinstance(error, SettingsError | ManifestError) else 1
    except KeyboardInterrupt:
        return 130  # a Ctrl-C before there was anything to stop


if __name__ == "__main__":
    sys.exit(main())
