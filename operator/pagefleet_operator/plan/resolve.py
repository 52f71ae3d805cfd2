"""Decides every setting of an InferenceService: its own spec, over its profile, over pagefleet's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, TypeVar

from pagefleet_protocol.inference_profile import InferenceProfile, InferenceProfileSpec
from pagefleet_protocol.inference_service import MAX_RANKS, Disaggregation, EnvVar, InferenceService
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.model_uri import ModelUri, parse_model_uri
from pagefleet_protocol.quantities import scaled

from pagefleet_operator.plan.names import names_of
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
    gpus: int
    """All of one node, one for each rank; 0: ranks compute on the CPU."""
    tensor: int
    """Ranks that compute every layer together."""
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


DEFAULT_SHM_GIB = 1
"""Of each rank: NCCL and plans go through it where GPUs cannot reach each other."""
DEFAULT_REVISION = "main"
"""Of repositories at hf://."""

ONE_CACHE = "an engine passes K/V of several caches to nobody: leave out disaggregation, or --data-parallel-size"

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
    copies = data_ranks((*engine.args, *spec.engine.args))
    gpus = _gpus(service, copies, choice)
    tensor = _tensor(service, gpus // copies, choice)
    if wrong := _wrong_ranks(gpus, tensor, copies, spec.disaggregation):
        return Refusal("spec.parallelism", Reason.INVALID_SPEC, wrong)
    share = _Share(gpus, resources.gpus or 1)
    surge, unavailable = _rollout(service, gpus, choice)
    shm = f"{tensor * copies * DEFAULT_SHM_GIB}Gi"
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
        gpus=gpus,
        tensor=tensor,
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


def data_ranks(args: tuple[str, ...]) -> int:
    """Return the data ranks that an engine's flags ask for, each of which has tensor ranks of its own."""
    values = re.findall(r"(?:^|\n)(?:--data-parallel-size|-dp)[=\n](\d+)(?=\n|$)", "\n".join(args))
    return max(1, int(values[-1])) if values else 1


def _gpus(service: InferenceService, copies: int, choice: _Choice) -> int:
    """Return GPUs per engine. Who names a class of GPU wants one, or one for each rank."""
    named = service.spec.resources.gpu_type or choice.spec.gpu_type
    given, profiled = service.spec.resources.gpus, choice.spec.resources.gpus
    ranks = service.spec.parallelism.tensor
    on_gpus = profiled != 0 if named else bool(profiled)
    if given is None and on_gpus and (ranks is not None or (profiled or 1) % copies):
        count = (ranks or 1) * copies
        choice.note("resources.gpus", count, f"as there {f'are {count} ranks' if count > 1 else 'is one rank'}")
        return count
    if given is None and profiled is None and named:
        choice.note("resources.gpus", 1, f"as gpuType is {named}")
        return 1
    gpus = choice.take("resources.gpus", given, profiled, 0)
    wanted = service.spec.resources.gpu_type
    if wanted and choice.profile is None:
        choice.note("resources.gpuType", wanted, "for which there is no InferenceProfile: it gives no defaults")
    return gpus


def _wrong_ranks(gpus: int, tensor: int, copies: int, both: Disaggregation | None) -> str:
    """Return what is wrong with the ranks, if anything; `both`: how K/V gets to other engines."""
    count = tensor * copies
    if count > MAX_RANKS:
        return f"makes {count} ranks with {copies} data ranks, and one node has {MAX_RANKS} at most: lower either"
    if gpus not in (0, count):
        return f"takes {count} GPUs, and resources.gpus is {gpus}: make them equal, or leave gpus out"
    if both is not None and tensor > 1 and both.data_plane not in ("auto", "tcp"):
        return f"with {tensor} ranks K/V goes by tcp, and disaggregation.dataPlane is {both.data_plane}: leave it out"
    if both is not None and copies > 1:
        return f"with {copies} data ranks {ONE_CACHE}"
    return ""


def _tensor(service: InferenceService, gpus: int, choice: _Choice) -> int:
    """Return the ranks that compute every layer together: a GPU that is asked for is there to be used.

    Args:
        gpus: of each copy of the model.
    """
    given = service.spec.parallelism.tensor
    if given is None and gpus > 1:
        choice.note("parallelism.tensor", gpus, f"as there are {gpus} GPUs")
    return given or max(1, gpus)


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
