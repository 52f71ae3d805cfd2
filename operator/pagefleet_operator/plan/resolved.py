"""The settings in force for one InferenceService: its spec, over its profile, over pagefleet's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import EnvVar
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.model_uri import ModelUri

CacheKind = Literal["none", "pvc", "hostPath", "image", "file", "builtin"]
"""none: each pod downloads; pvc: a claim, ours or the user's; image: OCI volume; file, builtin: in the
engine's image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """No field is left to be decided."""

    uri: ModelUri
    revision: str
    """What to download: the commit once it is known, else what the user wrote; empty where the source has none."""
    cache: CacheKind
    claim: str
    """Claim that holds the model (for pvc), whoever made it; else empty."""
    makes_claim: bool
    """Whether the claim is a child of ours."""
    profile: InferenceProfile | None
    image: str
    args: tuple[str, ...]
    """The profile's, then the service's."""
    env: tuple[EnvVar, ...]
    dtype: str
    quantization: str
    max_model_len: int | None
    kv_offload: KvOffload | None
    gpus: int
    gpu_resource: str
    cpu: str | None
    memory: str | None
    shm: str
    runtime_class: str | None
    node_selector: Mapping[str, str]
    max_surge: int
    max_unavailable: int
    facts: ModelFacts | None
    why: tuple[str, ...]
    """One line for each setting that was not in the spec, e.g. `resources.gpus: 1, from profile h100`."""
