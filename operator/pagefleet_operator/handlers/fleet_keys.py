"""Makes the Secret with the fleet key of a service, once."""

from __future__ import annotations

import secrets

from pagefleet_protocol.inference_service import InferenceService

from pagefleet_operator.apply.cluster import Cluster
from pagefleet_operator.apply.kinds import SECRET
from pagefleet_operator.errors import Conflict, Refused
from pagefleet_operator.plan.objects.fleet_key import fleet_key_secret
from pagefleet_operator.plan.observed import ApplyFailure

_NUM_BYTES = 32


async def make_fleet_key(cluster: Cluster, service: InferenceService) -> tuple[ApplyFailure, ...]:
    """Create the Secret; one that exists stays as it is. Returns the failure, if the API server refused.

    Raises:
        Throttled, Unavailable, NotLeading: it has to wait.
    """
    body = fleet_key_secret(service, secrets.token_hex(_NUM_BYTES).encode())
    try:
        await cluster.create(SECRET, service.metadata.namespace, body)
    except Conflict:
        return ()
    except Refused as error:
        return (ApplyFailure("Secret", body["metadata"]["name"], error.status, error.reason, error.message),)
    return ()
