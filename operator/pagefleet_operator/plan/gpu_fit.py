"""Whether a model fits: its weights and the KV cache of one sequence, against what an engine may use.

Each rank has its share of both on a GPU of its own: of the layers its stage's, of each its part of the heads, and its
part of the experts. Ranks of one node that compute on the CPU share its memory.

A lower bound on purpose: what is refused here cannot work, and what is let through is measured by the engine itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import ResolvedMemory
from pagefleet_protocol.model_facts import ModelFacts
from pagefleet_protocol.parallelism import MAX_RANKS
from pagefleet_protocol.quantities import quantity

from pagefleet_operator.plan.ranks import Ranks, find_ranks
from pagefleet_operator.plan.reasons import Reason
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.stage_shares import Share, device_shares, latest_stage, stage_shares
from pagefleet_operator.plan.verdict import Refusal

GIB = 1024**3
DEFAULT_SHARE = 0.9
"""Of a device's memory; `gpu_memory_utilization` of the engine's CacheConfig."""
GPU_OVERHEAD = int(1.8 * GIB)
"""Beside weights and KV cache: CUDA's context and graphs, and the activations of a step of 2048 tokens."""
NCCL_OVERHEAD = int(0.25 * GIB)
"""The same, where ranks on several GPUs talk to each other."""
CPU_OVERHEAD = int(0.4 * GIB)
"""The same there: the libraries and two processes; activations are small at the CPU's pace."""
CPU_RANK_OVERHEAD = int(0.2 * GIB)
"""More for the process of each rank, where there are several."""
MIN_LENGTH = 2048
"""Tokens for which there has to be room where nobody said how many there should be."""
_ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_GPU_DTYPES = {"float16": "float16"}
"""What an engine computes in on a GPU unless told: the checkpoint's, else bfloat16 (the engine's `resolve_dtype`)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of the check."""

    refusal: Refusal | None = None
    memory: ResolvedMemory | None = None
    """None where the model's facts are not known."""
    max_model_len: int | None = None
    """Longest sequence that engines will take, as far as can be told."""
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Device:
    total: int
    usable: int
    name: str
    """As messages have it, e.g. `of 80 GiB (profile h100)`."""


@dataclass(frozen=True, slots=True)
class _Need:
    """Of the devices of one copy: of a rank's GPU, or the memory that all ranks of a node share."""

    facts: ModelFacts
    token: int
    """KV bytes of one token in one layer of one rank."""
    devices: tuple[tuple[int, Share], ...]
    """Bytes of weights, and what they are of the model."""

    def most(self, num_tokens: int) -> tuple[int, int]:
        """Return the bytes of weights and of a sequence's KV cache, of the device that needs the most for both."""
        return max(((weights, self._kv(share, num_tokens)) for weights, share in self.devices), key=sum)

    def longest(self, room: int) -> int:
        """Return the most tokens that take no more than `room` bytes of any device with the weights, up to what the
        model was made for."""
        low, high = 0, self.facts.max_position_embeddings
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(self.most(middle)) <= room else (low, middle - 1)
        return low

    def _kv(self, share: Share, num_tokens: int) -> int:
        in_window = min(num_tokens, self.facts.window)
        return math.ceil(self.token * (share.whole * num_tokens + share.windowed * in_window))


def check_fit(service: InferenceService, resolved: Resolved) -> Fit:
    """Return what one engine needs of its device, and a refusal where that is more than there is.

    Args:
        service: of which advice is given, or one part as `role_view` shows it.
        resolved: from it.
    """
    facts = resolved.facts
    if facts is None:
        return Fit(max_model_len=resolved.max_model_len)
    if refusal := _undivided(resolved.ranks, facts):
        return Fit(refusal)
    made_for = facts.max_position_embeddings
    if resolved.max_model_len is not None and resolved.max_model_len > made_for:
        message = f"is {resolved.max_model_len}, the model was made for {made_for} tokens: give that at most"
        return Fit(Refusal("spec.engine.maxModelLen", Reason.INVALID_SPEC, message), None, made_for)
    need, active = _need(resolved, facts), _active(resolved, facts)
    wanted = resolved.max_model_len or facts.default_length or made_for
    device = _device(resolved)
    if device is None:
        place = "its profile has no gpuMemory" if resolved.profile else "no InferenceProfile tells the GPU's memory"
        reason = place if resolved.gpus else "resources.memory is not set"
        memory = _memory(need, wanted, None)
        return Fit(None, memory, wanted, (*active, f"whether the model fits was not checked: {reason}"))
    longest = need.longest(device.usable)
    if resolved.max_model_len is not None or longest < min(wanted, MIN_LENGTH):
        asked = resolved.max_model_len or min(wanted, MIN_LENGTH)
        refusal = None
        if asked > longest:
            refusal = _refuse(resolved, need, device, asked, _advice(service, resolved, need, device, longest))
        return Fit(refusal, _memory(need, asked, device), asked, active)
    served = min(wanted, longest)
    shorter = () if served == wanted else (_shortened(served, wanted, device),)
    return Fit(None, _memory(need, served, device), served, (*active, *shorter))


def _undivided(ranks: Ranks, facts: ModelFacts) -> Refusal | None:
    """Refuse ranks among which heads, layers or experts cannot be shared out."""
    most = latest_stage(facts) + 1
    if ranks.pipeline > most:
        together = facts.num_layers - most + 1
        which = f", the last {together} of which have to be together" if together > 1 else ""
        message = f"is {ranks.pipeline}, and the model has {facts.num_layers} layers{which}: give {most} at most"
        return Refusal("spec.parallelism.pipeline", Reason.INVALID_SPEC, message)
    if ranks.expert and facts.num_experts is not None and facts.num_experts < ranks.apart:
        has = f"{facts.num_experts} experts in a layer, for {ranks.apart} ranks" if facts.num_experts else "no experts"
        fewer = "lower parallelism.tensor or parallelism.data, or " if facts.num_experts else ""
        message = f"is true, and the model has {has}: {fewer}leave it out"
        return Refusal("spec.parallelism.expert", Reason.INVALID_SPEC, message)
    if divides(facts, ranks.tensor):
        return None
    most = max(MAX_RANKS, ranks.tensor)
    counts = ", ".join(str(one) for one in range(1, most + 1) if divides(facts, one))
    latent = "a latent for all of them" if facts.kv.is_latent else f"{facts.num_kv_heads} of keys and values"
    heads = f"{facts.num_attention_heads} heads of attention, {latent}"
    message = f"is {ranks.tensor}, and ranks share heads evenly: the model has {heads}; give one of {counts}"
    return Refusal("spec.parallelism.tensor", Reason.INVALID_SPEC, message)


def divides(facts: ModelFacts, ranks: int) -> bool:
    """Return whether each rank gets as many heads as the others; the engine's `own_heads` asks for the same."""
    heads, kv_heads = facts.num_attention_heads, facts.num_kv_heads
    return not heads % ranks and not (kv_heads % ranks and ranks % kv_heads)


def _need(resolved: Resolved, facts: ModelFacts) -> _Need:
    (common, experts), ranks = _weight_bytes(resolved, facts), resolved.ranks
    token = facts.kv.of_rank(ranks.tensor).numbers * _kv_itemsize(resolved, facts)
    if ranks.gpus:
        num_devices, copies = ranks.each, Fraction(1)
        experts_each = experts * _most_experts(ranks, facts) / ranks.pipeline
    else:  # what all ranks have, and how many nodes share it
        num_devices = max(1, ranks.nodes // ranks.data)
        copies = Fraction(ranks.data * num_devices, ranks.nodes)
        experts_each = Fraction(experts * (1 if ranks.together else ranks.data), ranks.nodes)
    stages = stage_shares(facts, ranks.pipeline, _flag(resolved.args, "--pipeline-layers"))
    shares = device_shares(stages, ranks.tensor, num_devices)
    devices = [(math.ceil(common * share.weights * copies + experts_each), share) for share in shares]
    return _Need(facts, token, tuple(devices))


def _most_experts(ranks: Ranks, facts: ModelFacts) -> Fraction:
    """Return the share of a stage's experts that the rank with the most of them has."""
    if not ranks.expert or not facts.num_experts:
        return Fraction(1, ranks.apart)
    return Fraction(-(-facts.num_experts // ranks.apart), facts.num_experts)


def _active(resolved: Resolved, facts: ModelFacts) -> tuple[str, ...]:
    """Say how much of a mixture of experts a token goes through: it has to be there whole, and is not read whole."""
    if not (facts.num_experts and facts.experts_per_token):
        return ()
    common, experts = _weight_bytes(resolved, facts)
    active = common + experts * facts.experts_per_token // facts.num_experts
    chosen = f"{facts.experts_per_token} of {facts.num_experts} experts in a layer"
    return (f"weights: {_gib(common + experts)} in all, {_gib(active)} active for a token, with {chosen}",)


def _device(resolved: Resolved) -> _Device | None:
    """Return what an engine has; None where nobody said."""
    share = _flag(resolved.args, "--gpu-memory-utilization")
    try:
        usable_share = float(share) if share else DEFAULT_SHARE
    except ValueError:
        usable_share = DEFAULT_SHARE  # the engine itself refuses the flag, in better words
    profile = resolved.profile
    if resolved.gpus and profile and profile.spec.gpu_memory:
        total = int(quantity(profile.spec.gpu_memory))
        meets = resolved.ranks.each > 1 or resolved.ranks.together
        overhead = GPU_OVERHEAD + (NCCL_OVERHEAD if meets else 0)
        return _Device(total, int(total * usable_share) - overhead, f"{_gib(total, 0)} (profile {profile.name})")
    if not resolved.gpus and resolved.memory:
        total = int(quantity(resolved.memory))
        ranks = resolved.ranks.per_node if resolved.ranks.total > 1 else 0
        overhead = CPU_OVERHEAD + CPU_RANK_OVERHEAD * ranks
        return _Device(total, int(total * usable_share) - overhead, f"{_gib(total)} (resources.memory)")
    return None


def _refuse(resolved: Resolved, need: _Need, device: _Device, asked: int, advice: str) -> Refusal:
    weights, kv = need.most(asked)
    part = _share_words(resolved.ranks)
    sentence = (
        f"{part}weights {_gib(weights)} + KV cache of one sequence of {asked} tokens {_gib(kv)} = "
        f"{_gib(weights + kv)}, more than the {_gib(max(0, device.usable))} that an engine may use of {device.name}"
    )
    return Refusal(
        "spec.engine.maxModelLen" if resolved.max_model_len else "spec.resources",
        Reason.DOES_NOT_FIT,
        f"{sentence}. {advice}",
    )


def _share_words(ranks: Ranks) -> str:
    """Return whose share the numbers are; empty: one device has everything."""
    nodes = f" of each of {ranks.nodes} nodes" if ranks.nodes > 1 else ""
    if not ranks.gpus:
        return f"each of {ranks.nodes} nodes gets " if nodes else ""
    return f"each of {ranks.gpus} GPUs{nodes} gets " if ranks.gpus > 1 or nodes else ""


def _advice(service: InferenceService, resolved: Resolved, need: _Need, device: _Device, longest: int) -> str:
    asked = resolved.max_model_len or MIN_LENGTH
    settings = [f"engine.maxModelLen to {_round(longest)} or less"] if longest >= 2 else []
    if not resolved.gpus:
        return _sentence(settings, "raise resources.memory")
    halved = _need(replace(resolved, quantization="fp8"), need.facts).most(asked)
    if halved[0] < need.most(asked)[0] and sum(halved) <= device.usable:
        settings.append("engine.quantization: fp8")
    for name, wider in _wider(service, resolved, need.facts):
        spread = replace(resolved, ranks=wider)
        part, each = _need(spread, need.facts), _device(spread)
        if each and sum(part.most(asked)) <= each.usable:
            settings.append(name)
            break
    return _sentence(settings, "use a GPU with more memory")


def _wider(service: InferenceService, resolved: Resolved, facts: ModelFacts) -> list[tuple[str, Ranks]]:
    """Return more ranks for each copy of the model, each with how they are asked for; those on few nodes come first."""
    most = (resolved.profile.spec.gpus_per_node if resolved.profile else None) or MAX_RANKS
    found = []
    for settings in _edits(service, resolved):
        # As they will be found, once that is written.
        ranks = find_ranks(_edited(service, settings), resolved.profile, lambda *_: None)
        if isinstance(ranks, str) or ranks.each <= resolved.ranks.each or ranks.gpus > most:
            continue
        if _undivided(ranks, facts) is None:
            found.append((" and ".join(f"{path}: {value}" for path, value in settings.items()), ranks))
    return sorted(found, key=lambda one: one[1].nodes)


def _edits(service: InferenceService, resolved: Resolved) -> Iterator[Mapping[str, int]]:
    """Yield settings, by path, that may make more ranks: by themselves, or as stages of the tensor ranks there are."""
    yield from ({"resources.gpus": count} for count in (2, 4, 8, 16))
    yield from ({"nodes": count} for count in (2, 4, 8))
    now, profile = resolved.ranks, resolved.profile
    # A profile's ranks do not count where the service names some.
    lost = profile and profile.spec.parallelism.tensor and service.spec.parallelism.tensor is None
    tensor = {"parallelism.tensor": now.tensor} if lost else {}
    for times in (2, 4, 8):
        stages = {**tensor, "parallelism.pipeline": now.pipeline * times}
        yield stages
        yield {**stages, "resources.gpus": now.gpus * times}
        yield {**stages, "nodes": now.nodes * times}


def _edited(service: InferenceService, settings: Mapping[str, int]) -> InferenceService:
    spec = service.spec
    for path, value in settings.items():
        parent, _, name = path.rpartition(".")
        own = getattr(spec, parent).model_copy(update={name: value}) if parent else value
        spec = spec.model_copy(update={parent or name: own})
    return service.model_copy(update={"spec": spec})


def _sentence(settings: list[str], otherwise: str) -> str:
    text = ", or ".join((f"set {', or '.join(settings)}", otherwise) if settings else (otherwise,))
    return text[0].upper() + text[1:]


def _shortened(served: int, wanted: int, device: _Device) -> str:
    return (
        f"engine.maxModelLen: about {served}, as more does not fit {device.name} beside the weights; "
        f"the model was made for {wanted}"
    )


def _memory(need: _Need, num_tokens: int, device: _Device | None) -> ResolvedMemory:
    weights, kv = need.most(num_tokens)
    return ResolvedMemory(
        weights=round(weights / GIB, 2),
        kv=round(kv / GIB, 2),
        device=round(device.total / GIB, 2) if device else None,
    )


def computed_dtype(resolved: Resolved) -> str:
    """Return the type that engines compute in; `auto` where it depends on the node's CPU, or on facts not known."""
    return _dtype(resolved, resolved.facts) if resolved.gpus and resolved.facts else resolved.dtype


def _dtype(resolved: Resolved, facts: ModelFacts) -> str:
    if resolved.dtype != "auto":
        return resolved.dtype
    # Not knowing the CPU, the smaller of what engines take there.
    return _GPU_DTYPES.get(facts.dtype, "bfloat16")


def _weight_bytes(resolved: Resolved, facts: ModelFacts) -> tuple[int, int]:
    """Return the bytes of what every copy has, and of the experts; of a model that nobody looked at all may be such."""
    experts = facts.weights_bytes if facts.num_experts is None else facts.expert_bytes
    common = facts.weights_bytes - experts
    if facts.quantization == "mxfp4" and not resolved.gpus:
        # A CPU keeps the scale of 32 numbers in two bytes.
        return common, experts * 18 // 17
    if kept := facts.gpu_bytes if resolved.gpus else facts.cpu_bytes:
        of_experts = kept * experts // facts.weights_bytes
        return kept - of_experts, of_experts
    if facts.quantization:
        return common, experts
    stored = _ITEMSIZE.get(facts.dtype, 2)
    # A CPU has no fp8, and int8 only where it multiplies that: nothing is counted on there.
    halved = bool(resolved.quantization) and resolved.gpus > 0
    kept = 1 if halved else _ITEMSIZE[_dtype(resolved, facts)]
    return common * kept // stored, experts * kept // stored


def _kv_itemsize(resolved: Resolved, facts: ModelFacts) -> int:
    return 1 if _flag(resolved.args, "--kv-cache-dtype").startswith("fp8") else _ITEMSIZE[_dtype(resolved, facts)]


def _flag(args: tuple[str, ...], name: str) -> str:
    """Return the value of a flag as the engine's command line would read it: the last one counts."""
    value = ""
    for index, word in enumerate(args):
        flag, equals, given = word.partition("=")
        if flag == name:
            value = given if equals else args[index + 1] if index + 1 < len(args) else ""
    return value


def _round(num_tokens: int) -> int:
    """Return the number people would write: whole thousands, of 1024, where there are some."""
    return num_tokens // 1024 * 1024 or num_tokens


def _gib(num_bytes: int, digits: int = 1) -> str:
    return f"{num_bytes / GIB:.{digits}f} GiB"
