"""Flags of engines and routers, in a cluster and on this machine alike.

Where a process listens, where a router finds its engines, and devices are for whoever starts the process.
"""

from __future__ import annotations

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.plan.resolved import Resolved


def engine_args(service: InferenceService, resolved: Resolved, location: str) -> tuple[str, ...]:
    """Return what follows `pagefleet serve`.

    Args:
        service: what is wanted.
        resolved: the settings in force.
        location: of the model where the engine runs: a folder, or builtin://tiny.
    """
    length = resolved.max_model_len
    return (
        location,
        *("--served-model-name", ",".join((service.model_name, *service.spec.model.aliases))),
        *("--dtype", resolved.dtype),
        *(("--quantization", resolved.quantization) if resolved.quantization else ()),
        *(("--max-model-len", str(length)) if length is not None else ()),
        *("--drain-timeout", str(service.spec.rollout.drain_seconds)),
        *resolved.args,
    )


def router_args(service: InferenceService) -> tuple[str, ...]:
    """Return what follows `pagefleet route` and the flag that says where its engines are."""
    aliases = service.spec.model.aliases
    return (
        *("--model-name", service.model_name),
        *(word for alias in aliases for word in ("--model-alias", alias)),
        *("--policy", service.spec.router.policy),
        *("--drain-timeout", str(service.spec.rollout.drain_seconds)),
    )
