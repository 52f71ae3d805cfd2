"""Decides every setting of an InferenceService: its own spec, over its profile, over pagefleet's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeVar

from pagefleet_protocol.inference_profile import InferenceProfile, InferenceProfileSpec
from pagefleet_protocol.inference_service import EnvVar, InferenceService
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.model_uri import ModelUri, parse_model_uri
from pagefleet_protocol.quantities import scaled

from pagefleet_operator.plan.names import names_of
from pagefleet_operator.plan.ranks import Ranks, find_ranks
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.verdict import Refusal

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
    ranks: Ranks
    """Of each engine."""
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

    @property
    def gpus(self) -> int:
        """Of each node of an engine, one for each rank; 0: ranks compute on the CPU."""
        return self.ranks.gpus

    @property
    def nodes(self) -> int:
        """Pods of each engine."""
        return self.ranks.nodes


DEFAULT_SHM_GIB = 1
"""Of each rank: NCCL and plans go through it where GPUs cannot reach each other."""
DEFAULT_REVISION = "main"
"""Of repositories at hf://."""

T = TypeVar("T")


def resolve(
    service: InferenceService,
    observed_profiles: Mapping[str, InferenceProfile],
    facts: ModelFacts | None,
    engine_image: str = "",
) -> Resolved | Refusal:
    """Return the settings in force, or why there are none.

    Args:
        observed_profiles: all profiles that can be used, by name.
        facts: of the model, once they are known; its revision takes the place of a branch.
        engine_image: the default one; empty outside a cluster, where there are no images.
    """
    profile = find_profile(service, observed_profiles)
    if isinstance(profile, Refusal):
        return profile
    spec, uri = service.spec, parse_model_uri(service.spec.model.uri)
    choice = _Choice(profile)
    engine, resources = choice.spec.engine, choice.spec.resources
    cache = _cache_kind(service, uri, choice)
    ranks = find_ranks(service, profile, choice.note)
    if isinstance(ranks, str):
        return Refusal("spec.parallelism", Reason.INVALID_SPEC, ranks)
    if spec.resources.gpu_type and spec.resources.gpus is not None and profile is None:
        reason = "for which there is no InferenceProfile: it gives no defaults"
        choice.note("resources.gpuType", spec.resources.gpu_type, reason)
    share = _Share(ranks.gpus, resources.gpus or 1)
    surge, unavailable = _rollout(service, ranks.gpus, choice)
    shm = f"{ranks.per_node * DEFAULT_SHM_GIB}Gi"
    own_claim = names_of(service).model
    claim = uri.claim if uri.scheme == "pvc" else spec.cache.claim or own_claim
    return Resolved(
        uri=uri,
        revision=_revision(service, uri, facts, choice),
        cache=cache,
        claim=claim if cache == "pvc" else "",
        makes_claim=cache == "pvc" and uri.scheme != "pvc" and spec.cache.claim is None,
        profile=profile,
        image=choice.take("engine.image", spec.engine.image, engine.image, engine_image),
        args=(*engine.args, *spec.engine.args),
        env=_merge_env(engine.env, spec.engine.env),
        dtype=choice.take("engine.dtype", spec.engine.dtype, engine.dtype, "auto"),
        quantization=choice.take("engine.quantization", spec.engine.quantization, engine.quantization, ""),
        max_model_len=choice.take("engine.maxModelLen", spec.engine.max_model_len, engine.max_model_len, None),
        kv_offload=choice.take("engine.kvOffload", spec.engine.kv_offload, engine.kv_offload, None),
        ranks=ranks,
        gpu_resource=choice.spec.gpu_resource,
        cpu=choice.take("resources.cpu", spec.resources.cpu, share.of(resources.cpu), None),
        memory=choice.take("resources.memory", spec.resources.memory, share.of(resources.memory), None),
        shm=choice.take("resources.shm", spec.resources.shm, share.of(resources.shm), shm),
        runtime_class=choice.spec.runtime_class_name,
        node_selector=choice.spec.node_selector,
        max_surge=surge,
        max_unavailable=unavailable,
        facts=facts,
        why=tuple(choice.why),
    )


def find_profile(
    service: InferenceService, profiles: Mapping[str, InferenceProfile]
) -> InferenceProfile | Refusal | None:
    """Return the profile that gives `service` its defaults; None where it needs none."""
    if service.spec.profile_ref is not None:
        name = service.spec.profile_ref.name
        known = f"name one of {', '.join(sorted(profiles))}" if profiles else "there are none: make it, or name none"
        return profiles.get(name) or Refusal(
            "spec.profileRef.name", Reason.PROFILE_NOT_FOUND, f"there is no InferenceProfile {name}; {known}"
        )
    gpu_type = service.spec.resources.gpu_type
    matching = sorted(name for name, one in profiles.items() if gpu_type and one.spec.gpu_type == gpu_type)
    if len(matching) > 1:
        return Refusal(
            "spec.resources.gpuType",
            Reason.PROFILE_INVALID,
            f"InferenceProfiles {' and '.join(matching)} are all for gpuType {gpu_type}: name one in spec.profileRef",
        )
    return profiles[matching[0]] if matching else None


@dataclass(slots=True)
class _Choice:
    """Picks settings, and takes down where those that nobody wrote come from."""

    profile: InferenceProfile | None
    why: list[str] = field(default_factory=list)

    @property
    def spec(self) -> InferenceProfileSpec:
        """The profile's defaults; empty ones where there is no profile."""
        return self.profile.spec if self.profile else InferenceProfileSpec()

    def take(self, path: str, given: T | None, profiled: T | None, default: T) -> T:
        if given is not None:
            return given
        if profiled is not None:
            assert self.profile is not None
            self.note(path, profiled, f"from profile {self.profile.name}")
            return profiled
        if default not in (None, ""):
            self.note(path, default, "the default")
        return default

    def note(self, path: str, value: object, reason: str) -> None:
        self.why.append(f"{path}: {value}, {reason}")


@dataclass(frozen=True, slots=True)
class _Share:
    """What an engine gets of what a profile says: its host resources go with its GPUs."""

    gpus: int
    profiled: int

    def of(self, size: str | None) -> str | None:
        """Return a quantity of the profile as it is for this engine's GPUs."""
        if size is None or self.gpus in (0, self.profiled):
            return size
        return scaled(size, Fraction(self.gpus, self.profiled))


def _cache_kind(service: InferenceService, uri: ModelUri, choice: _Choice) -> CacheKind:
    """Return how engines get at the model; the spec's own wish is one that fits the URI."""
    if uri.scheme in ("file", "builtin"):
        return "file" if uri.scheme == "file" else "builtin"
    if uri.scheme == "pvc":
        return "pvc"
    wanted = service.spec.cache.type
    if wanted != "auto":
        return wanted
    if uri.scheme == "oci":
        choice.note("cache.type", "image", "as the model is an OCI image")
        return "image"
    choice.note("cache.type", "none", "the default: each engine downloads the model when it starts")
    return "none"


def _revision(service: InferenceService, uri: ModelUri, facts: ModelFacts | None, choice: _Choice) -> str:
    if uri.scheme != "hf":
        return ""
    wanted = service.spec.model.revision or DEFAULT_REVISION
    if facts is None or not facts.revision or facts.revision == wanted:
        return wanted
    choice.note("model.revision", facts.revision, f"which {wanted} meant when the model was first looked at")
    return facts.revision


def _rollout(service: InferenceService, gpus: int, choice: _Choice) -> tuple[int, int]:
    """Return how many engines may be too many, and too few, while a revision replaces another."""
    rollout = service.spec.rollout
    surge, unavailable = rollout.max_surge, rollout.max_unavailable
    if surge is None:
        # Both 0 would never end: where none may be missing, there has to be one more.
        scarce = gpus > 0 and not choice.spec.spare_gpus and unavailable != 0
        surge = 0 if scarce else 1
        reason = "as no spare GPU is known of" if scarce else "the default"
        choice.note("rollout.maxSurge", surge, reason)
    if unavailable is None:
        unavailable = 0 if surge else 1
        choice.note("rollout.maxUnavailable", unavailable, f"as maxSurge is {surge}")
    return surge, unavailable


def _merge_env(profiled: tuple[EnvVar, ...], given: tuple[EnvVar, ...]) -> tuple[EnvVar, ...]:
    """Return the profile's variables and then the service's; of two with one name, the service's."""
    own = {variable.name for variable in given}
    return (*(variable for variable in profiled if variable.name not in own), *given)
