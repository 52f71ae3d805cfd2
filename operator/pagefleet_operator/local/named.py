"""`pagefleet up MODEL`: the InferenceService that somebody would have written for a model's name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pagefleet_protocol.kube_names import API_VERSION, KIND, RESERVED_SUFFIXES
from pagefleet_protocol.model_uri import ModelUri, model_named
from pagefleet_protocol.resource_rules import MAX_NAME_LENGTH
from pydantic_core import PydanticCustomError

from pagefleet_operator.errors import ManifestError, SettingsError
from pagefleet_operator.local.state_dir import default_state_dir, state_home

_YAML = (".yaml", ".yml")
_FILE_NAME = "inferenceservice.yaml"


@dataclass(frozen=True, slots=True)
class FleetSource:
    """What a fleet is made of."""

    manifest: Path
    """File or folder of InferenceServices."""
    document: str | None
    """What to write into it first; None: somebody else wrote it."""
    state_dir: Path
    """Of this fleet, unless another is given."""


def fleet_source(given: str, revision: str | None, replicas: int | None, environment: Mapping[str, str]) -> FleetSource:
    """Decide what `pagefleet up GIVEN` serves: the InferenceServices of a file or folder, or a model.

    Raises:
        ManifestError: it is neither.
        SettingsError: a flag is about a model, and a file is given.
    """
    path = Path(given).expanduser()
    if path.is_file() or given.endswith(_YAML) or (path.is_dir() and not (path / "config.json").is_file()):
        if revision is not None or replicas is not None:
            raise SettingsError("--revision and --replicas are for a model's name: write them into the file instead")
        return FleetSource(path, None, default_state_dir(path, environment))
    try:
        uri = model_named(given, os.path.exists)
    except PydanticCustomError as error:
        raise ManifestError([f"there is no such file, and {error}"]) from error
    if uri.scheme == "file" and not path.exists() and "://" not in given:
        raise ManifestError([f"{given}: there is no such file or folder"])
    name = service_name(uri)
    document = model_document(name, uri, revision, replicas)
    digest = hashlib.sha256("\n".join((uri.text, revision or "")).encode()).hexdigest()[:8]
    state_dir = state_home(environment) / f"{name}-{digest}"
    return FleetSource(state_dir / _FILE_NAME, document, state_dir)


def service_name(uri: ModelUri) -> str:
    """Make a resource's name of the last part of a model's: lower-case letters, digits and `-`."""
    last = uri.path.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")
    if not name[:1].isalpha():
        name = f"model-{name}".strip("-")
    name = name[: MAX_NAME_LENGTH - 4].strip("-")
    return f"{name}-llm" if name.endswith(RESERVED_SUFFIXES) or re.search("-x[0-9a-f]{10}$", name) else name


def model_document(name: str, uri: ModelUri, revision: str | None, replicas: int | None) -> str:
    """Write the InferenceService. Clients call a model of the hub as the hub does, and by the last part of its name."""
    model: dict[str, Any] = {"uri": uri.text}
    if revision is not None:
        model["revision"] = revision
    if uri.has_revisions:
        model |= {"name": uri.path, "aliases": [uri.path.partition("/")[2]]}
    spec = {"model": model} | ({"replicas": replicas} if replicas is not None else {})
    return yaml.safe_dump(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}, sort_keys=False
    )
