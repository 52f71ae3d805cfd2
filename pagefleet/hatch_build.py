"""Tells hatchling what `pagefleet` requires: all parts in its own version, so that an upgrade moves them together."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PARTS = ("protocol", "kernels", "text", "kv", "download", "console", "engine", "router", "operator")
EXTRAS = {"bench": ("engine",), "traces": ("engine", "router")}
"""The parts that have each extra."""


class Parts(MetadataHookInterface):
    """Adds the requirements; a source distribution has them written down already."""

    def update(self, metadata: dict[str, Any]) -> None:
        version = metadata["version"]
        metadata.setdefault("dependencies", [f"pagefleet-{part}=={version}" for part in PARTS])
        metadata.setdefault(
            "optional-dependencies",
            {extra: [f"pagefleet-{part}[{extra}]=={version}" for part in parts] for extra, parts in EXTRAS.items()},
        )
