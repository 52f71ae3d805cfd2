"""Over how many ranks, GPUs and nodes an engine is spread: from what of it is written, and what follows from that.

An engine has `tensor * pipeline * data` ranks. Its nodes have equal parts of them, each rank a GPU where there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagefleet_protocol.engine_rules import KV_OF_RANKS, LESS_THAN_RANKS, ONE_COPY, PORTS_OF_A_POOL
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.parallelism import MAX_NODES, MAX_RANKS, Parallelism

Note = Callable[[str, object, str], None]
"""Takes down a setting that nobody wrote, its value, and where it comes from."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Of one engine."""

    tensor: int = 1
    """Ranks that compute every layer together."""
    pipeline: int = 1
    """Stages, each of which has some of the layers."""
    data: int = 1
    """Copies of the model."""
    nodes: int = 1
    """Pods, each with as many ranks as the others."""
    gpus: int = 0
    """Of each node, one for each of its ranks; 0: ranks compute on the CPU."""
    expert: bool = False
    """Each has some experts of a mixture whole; copies have each expert once among them."""

    @property
    def together(self) -> bool:
        """Whether copies step together, and so are one engine behind one port."""
        return self.expert and self.data > 1

    @property
    def endpoints(self) -> int:
        """Engines that routers take it for: copies that know nothing of each other have ports of their own."""
        return 1 if self.together else self.data

    @property
    def each(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline

    @property
    def apart(self) -> int:
        """Ranks that have the experts of a layer between them, whole or in part."""
        return self.tensor * self.data if self.together else self.tensor

    @property
    def total(self) -> int:
        return self.each * self.data

    @property
    def per_node(self) -> int:
        return self.total // self.nodes


def find_ranks(service: InferenceService, profile: InferenceProfile | None, note: Note) -> Ranks | str:
    """Return the ranks of each engine, or what is wrong with those that are written."""
    asked = _asked(service, profile, note)
    found = _on_cpu(asked, note) if asked.gpus == 0 else _on_gpus(asked, note)
    if isinstance(found, str):
        return found
    found = replace(found, expert=bool(asked.parallelism.expert))
    return _wrong(found) or _kv_stays(found, service) or _many_ports(found, service) or _apart(found) or found


def _kv_stays(ranks: Ranks, service: InferenceService) -> str:
    """Return why an engine of these ranks cannot pass its K/V to others; empty: it can."""
    both = service.spec.disaggregation
    if both is None or both.data_plane in ("auto", "tcp"):
        return ""
    if ranks.each == 1 or (both.data_plane == "nccl" and ranks.gpus):
        return ""
    return f"with {ranks.each} ranks {KV_OF_RANKS}"


def _many_ports(ranks: Ranks, service: InferenceService) -> str:
    """Return why a gateway cannot reach all endpoints of an engine; empty: it can."""
    if service.spec.router.inference_pool is None or ranks.endpoints <= PORTS_OF_A_POOL:
        return ""
    return f"with {ranks.endpoints} data ranks {LESS_THAN_RANKS}"


def _apart(ranks: Ranks) -> str:
    """Return why experts cannot be whole on these ranks; empty: they can, or need not."""
    if not ranks.expert or ranks.apart > 1:
        return ""
    return (
        "gives all experts to one rank: raise parallelism.tensor or parallelism.data, or leave out parallelism.expert"
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is written; None: it follows."""

    parallelism: Parallelism
    nodes: int | None
    gpus: int | None
    """None: a GPU for each rank."""
    most: int
    """GPUs that a node has."""

    @property
    def written(self) -> int:
        """Ranks by what is written of them."""
        return (self.parallelism.tensor or 1) * self.slices

    @property
    def slices(self) -> int:
        """Stages of all copies."""
        return (self.parallelism.pipeline or 1) * (self.parallelism.data or 1)


def _asked(service: InferenceService, profile: InferenceProfile | None, note: Note) -> _Asked:
    """Return what is written. Who names a class of GPU wants GPUs; a profile's ranks count where the spec has none."""
    spec, resources = service.spec, service.spec.resources
    given, own = spec.parallelism, profile.spec if profile else None
    most = own.gpus_per_node or MAX_RANKS if own else MAX_RANKS
    profiled = own.resources.gpus if own else None
    if own and not given.counted and resources.gpus is None and spec.nodes is None:
        before, given = dict(given), given.over(own.parallelism)
        taken = ", ".join(f"{name} {str(value).lower()}" for name, value in given if value != before[name])
        if taken:
            note("parallelism", taken, f"from profile {profile.name if profile else ''}")
    if resources.gpus is not None:
        return _Asked(given, spec.nodes, resources.gpus, most)
    named = resources.gpu_type or (own.gpu_type if own else "")
    if not (profiled != 0 if named else profiled):
        note("resources.gpus", 0, f"from profile {profile.name}" if profile and profiled == 0 else "the default")
        return _Asked(given, spec.nodes, 0, most)
    asked = _Asked(given, spec.nodes, None, most)
    if given.tensor is None and profiled and profiled * (spec.nodes or 1) % asked.slices == 0:
        note("resources.gpus", profiled, f"from profile {profile.name if profile else ''}")
        return _Asked(given, spec.nodes, profiled, most)
    if asked.written == 1 and spec.nodes in (None, 1) and given.tensor is None:
        note("resources.gpus", 1, f"as gpuType is {named}" if named else "as there is one rank")
        return _Asked(given, spec.nodes, 1, most)
    return asked


def _on_cpu(asked: _Asked, note: Note) -> Ranks | str:
    given, nodes = asked.parallelism, asked.nodes or 1
    pipeline = given.pipeline or (_stages(asked, nodes, note) if given.tensor is None else 1)
    return Ranks(given.tensor or 1, pipeline, given.data or 1, nodes)


def _on_gpus(asked: _Asked, note: Note) -> Ranks | str:
    given = asked.parallelism
    gpus, nodes = asked.gpus, asked.nodes
    if gpus is None:
        ranks = asked.written if given.tensor or given.pipeline else asked.written * (nodes or 1)
        nodes = nodes or -(-ranks // asked.most)
        if ranks % nodes:
            return f"makes {ranks} ranks, which {nodes} nodes cannot have in equal parts: change either"
        gpus = ranks // nodes
        reason = "is one rank" if ranks == 1 else f"are {ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
        note("resources.gpus", gpus, f"as there {reason}")
    if given.tensor is not None:
        return _by_ranks(asked, gpus, nodes, note)
    nodes = nodes or 1
    pipeline = given.pipeline or _stages(asked, nodes, note)
    slices = pipeline * (given.data or 1)
    if gpus * nodes % slices:
        return f"makes {slices} stages and copies, which {gpus * nodes} GPUs do not divide among: change either"
    tensor = gpus * nodes // slices
    if tensor > 1:
        note(
            "parallelism.tensor",
            tensor,
            f"as there are {gpus} GPUs" + (f" on each of {nodes} nodes" if nodes > 1 else ""),
        )
    return Ranks(tensor, pipeline, given.data or 1, nodes, gpus)


def _by_ranks(asked: _Asked, gpus: int, nodes: int | None, note: Note) -> Ranks | str:
    """Return as many nodes as the ranks need."""
    given, ranks = asked.parallelism, asked.written
    if ranks % gpus or (nodes is not None and ranks != gpus * nodes):
        where = f" on each of {nodes} nodes" if nodes and nodes > 1 else ""
        return f"takes {ranks} GPUs, and resources.gpus is {gpus}{where}: make them equal, or leave gpus out"
    if nodes is None and ranks > gpus:
        note("nodes", ranks // gpus, f"as {ranks} ranks take {gpus} GPUs of each")
    return Ranks(given.tensor or 1, given.pipeline or 1, given.data or 1, ranks // gpus, gpus)


def _stages(asked: _Asked, nodes: int, note: Note) -> int:
    """Return a stage for each node of a copy: what stages send each other is little beside the sums of a layer's
    ranks."""
    stages = max(1, nodes // (asked.parallelism.data or 1))
    if stages > 1:
        note(
            "parallelism.pipeline",
            stages,
            f"as there are {stages} nodes" + (" for each copy" if stages < nodes else ""),
        )
    return stages


def _wrong(ranks: Ranks) -> str:
    if ranks.total % ranks.nodes:
        return f"makes {ranks.total} ranks, which {ranks.nodes} nodes cannot have in equal parts: change either"
    if ranks.nodes > 1 and ranks.data > 1 and not ranks.together:
        return f"with {ranks.nodes} nodes {ONE_COPY}"
    if ranks.data % ranks.nodes and ranks.nodes % ranks.data:
        return (
            f"has {ranks.data} copies of the model on {ranks.nodes} nodes: give each copy as many nodes, or each node "
            "as many copies"
        )
    if ranks.per_node > MAX_RANKS:
        return (
            f"makes {ranks.per_node} ranks on one node, which has {MAX_RANKS} at most: lower them, or give spec.nodes"
        )
    if ranks.nodes > MAX_NODES:
        return f"takes {ranks.nodes} nodes, and an engine has {MAX_NODES} at most: lower it, or raise resources.gpus"
    return ""
