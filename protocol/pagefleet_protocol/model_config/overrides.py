"""A model's config.json as somebody wants it: `hf_overrides` changes fields of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet_protocol.model_config.fields import ModelConfigError, read_json_file

_ROPE = "rope_parameters"
_ROPE_BEFORE = ("rope_scaling", "rope_theta")
"""How older files spell it: beside the later spelling nobody reads these."""


def read_config(file: Path, overrides: str | None) -> dict[str, Any]:
    """Return what config.json says, with what the JSON object `overrides` says instead.

    Raises:
        FileNotFoundError: there is no such file.
        ModelConfigError: it holds no JSON object, or an override would change nothing.
    """
    config = read_json_file(file)
    return overridden(config, json.loads(overrides)) if overrides else config


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values; of objects within it only the fields that are named.

    Raises:
        ModelConfigError: an override would change nothing.
    """
    if config.get(_ROPE) and _ROPE not in overrides and (old := [name for name in _ROPE_BEFORE if name in overrides]):
        raise ModelConfigError(
            f"hf_overrides has {' and '.join(old)}, and this config.json has {_ROPE} instead: give these names within "
            f'it, as {{"{_ROPE}": {{"rope_theta": ...}}}}'
        )
    changed = dict(config)
    for name, value in overrides.items():
        before = config.get(name)
        within = isinstance(before, Mapping) and isinstance(value, Mapping)
        changed[name] = overridden(config[name], value) if within else value
    return changed
