"""Flags of engines and routers, in a cluster and on this machine alike.

Where a process listens, where a router finds its engines, folders and devices are for whoever starts the process.
"""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import PairRole
from pagefleet_protocol.kv_offload import KvOffload
from pagefleet_protocol.quantities import quantity

from pagefleet_operator.plan.ranks import Ranks
from pagefleet_operator.plan.resolve import Resolved
from pagefleet_operator.plan.roles import is_disaggregated, refuses_without_kv

_NO_CACHING = "--no-enable-prefix-caching"
_NODES_COME_WITHIN_S = 1800
"""Less than a startup probe gives a leader, which so gets to name those that never came."""
_SEND_TYPES = {"PutAsync": "put_async", "Put": "put", "Get": "get"}


def engine_args(
    service: InferenceService, resolved: Resolved, location: str, role: PairRole | None = None
) -> tuple[str, ...]:
    """Return what follows `pagefleet serve`.

    Args:
        location: of the model where the engine runs: a folder, or builtin://tiny.
        role: the engine's part of a disaggregated service.
    """
    length = resolved.max_model_len
    return (
        location,
        *("--served-model-name", ",".join((service.model_name, *service.spec.model.aliases))),
        *("--dtype", resolved.dtype),
        *(("--quantization", resolved.quantization) if resolved.quantization else ()),
        *(("--max-model-len", str(length)) if length is not None else ()),
        *_rank_args(resolved.ranks),
        *("--drain-timeout", str(service.spec.rollout.drain_seconds)),
        *_connector_args(service, resolved, role),
        *offload_args(resolved.kv_offload),
        *(_kv_args(service, role) if role else ()),
        *_trace_args(service),
        *resolved.args,
    )


def _rank_args(ranks: Ranks) -> tuple[str, ...]:
    """Return how many ranks an engine has; which node a process is, and where the first one, is for who starts it."""
    counts = {
        "--tensor-parallel-size": ranks.tensor,
        "--pipeline-parallel-size": ranks.pipeline,
        DATA_FLAG: ranks.data,
        "--nnodes": ranks.nodes,
    }
    waits = ("--rank-wait-timeout", str(_NODES_COME_WITHIN_S)) if ranks.nodes > 1 else ()
    # Routers know each cache by itself, and go on with the others where one is lost.
    apart = ("--data-parallel-multi-port-external-lb",) if ranks.endpoints > 1 else ()
    whole = ("--enable-expert-parallel",) if ranks.expert else ()
    sizes = (word for flag, count in counts.items() if count > 1 for word in (flag, str(count)))
    return (*sizes, *apart, *whole, *waits)


def node_args(node: str, leader: str, port: int) -> tuple[str, ...]:
    """Return which of its engine's nodes a process is: `0` is the leader, which serves; others wait for it.

    Args:
        node: its number.
        leader: host name or address of node 0.
        port: where the leader listens to the others.
    """
    follows = ("--headless",) if node != "0" else ()
    return ("--node-rank", node, "--master-addr", leader, "--master-port", str(port), *follows)


def _connector_args(service: InferenceService, resolved: Resolved, role: PairRole | None) -> tuple[str, ...]:
    """Return which connectors an engine has: a peer's K/V comes first, as it is all of a prompt's."""
    both = service.spec.disaggregation if role else None
    names = (*((both.connector,) if both else ()), *((CONNECTOR,) if resolved.kv_offload else ()))
    return ("--kv-connector", ",".join(names)) if names else ()


def _kv_args(service: InferenceService, role: PairRole) -> tuple[str, ...]:
    """Return how an engine passes K/V; where it listens and whom it asks is for whoever starts it."""
    both = service.spec.disaggregation
    assert both is not None, "only such services have parts"
    return (
        *("--kv-role", role),
        *("--kv-data-plane", both.data_plane),
        *("--kv-send-type", _SEND_TYPES[both.send_type]),
    )


def router_args(service: InferenceService, drain_s: int) -> tuple[str, ...]:
    """Return what follows `pagefleet route` and the flag that says where its engines are.

    `drain_s` is what open requests get once it is to end.
    """
    aliases, router = service.spec.model.aliases, service.spec.router
    queue, both = router.queue, service.spec.disaggregation
    return (
        *("--model-name", service.model_name),
        *(word for alias in aliases for word in ("--model-alias", alias)),
        *("--policy", router.policy),
        *(("--workers", str(router.workers)) if router.workers > 1 else ()),
        *(("--session-header", router.session_header.lower()) if router.session_header else ()),
        *(("--explain",) if router.explain else ()),
        *(() if router.console else ("--no-console",)),
        *(() if router.kv_events else ("--no-kv-events",)),
        *(("--queue-size", str(queue.max)) if queue.max is not None else ()),
        *(("--queue-timeout", str(queue.timeout)) if queue.timeout is not None else ()),
        *("--cold-start-timeout", str(queue.cold_start_timeout)),
        *(("--pd-threshold", str(both.threshold)) if both and both.threshold is not None else ()),
        # Not the default: routers need not start again where a service becomes a disaggregated one.
        *(("--pd-fallback", "fail") if refuses_without_kv(service) else ()),
        *_trace_args(service),
        *("--drain-timeout", str(drain_s)),
    )


def _trace_args(service: InferenceService) -> tuple[str, ...]:
    """Return who is told of requests."""
    endpoint, sample = service.spec.monitoring.traces_endpoint, service.spec.monitoring.traces_sample
    if endpoint is None:
        return ()
    return (
        *("--otlp-traces-endpoint", endpoint),
        *(("--otlp-traces-sample", f"{sample:g}") if sample is not None else ()),
    )


def shares_kv_events(service: InferenceService, resolved: Resolved) -> bool:
    """Return whether engines tell routers what they have cached."""
    flags = {arg.partition("=")[0] for arg in resolved.args}
    return service.spec.router.kv_events and _NO_CACHING not in flags


def needs_key(service: InferenceService, resolved: Resolved) -> bool:
    """Return whether engines and routers, or an engine's nodes, have to know each other."""
    return shares_kv_events(service, resolved) or is_disaggregated(service) or resolved.nodes > 1


CONNECTOR = "offload"
DATA_FLAG = "--data-parallel-size"
STATE_FLAG = "--data-parallel-supervisor-port"
"""Of engines of several data ranks: where whoever starts them asks how all are."""
DIRECTORY_FLAG = "--kv-offload-dir"
"""Given by whoever starts an engine that has a disk: each has a folder of its own."""
_FILLED = (9, 10)
"""Of a volume. A pod whose volume is over its size is evicted, and file systems keep some of it for themselves."""
_UNITS = ("Ti", "Gi", "Mi", "Ki")


def offload_args(offload: KvOffload | None) -> tuple[str, ...]:
    """Return the flags of an engine that keeps what its pool gives up, apart from the connector's name and folder."""
    if offload is None:
        return ()
    filled, whole = _FILLED
    return (
        *("--kv-offload-memory", str(num_bytes(offload.memory))),
        *("--kv-offload-policy", offload.eviction),
        *(("--kv-offload-disk", str(num_bytes(offload.disk.size) * filled // whole)) if offload.disk else ()),
    )


def has_disk(resolved: Resolved) -> bool:
    """Return whether each engine needs a folder of its own."""
    return resolved.kv_offload is not None and resolved.kv_offload.disk is not None


def memory_request(resolved: Resolved) -> str | None:
    """Return the memory that is kept for an engine: its own, and what it may fill with K/V; None: nobody said."""
    if resolved.kv_offload is None:
        return resolved.memory
    offload = resolved.kv_offload.memory
    return offload if resolved.memory is None else _text(num_bytes(resolved.memory) + num_bytes(offload))


def num_bytes(size: str) -> int:
    """Return the bytes of a quantity, a part of one as none."""
    return int(quantity(size))


def _text(size: int) -> str:
    """Write bytes as people do, where that is exact."""
    for power, unit in zip(range(len(_UNITS), 0, -1), _UNITS, strict=True):
        if size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
