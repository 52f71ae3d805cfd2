"""Names of the HTTP headers that cross between clients, router and engines. All lower case, as ASGI has them."""

OWN_PREFIX = "x-pagefleet-"
"""A router forwards no header of a client that begins so."""

REQUEST_ID = "x-request-id"
ENGINE_ID = "x-pagefleet-engine"
"""Set by the router on answers: the id of the engine that served the request."""
ROLE = "x-pagefleet-role"
"""`router` on a router's own answers: whoever looks for engines must not take it for one, least of all itself."""
INCARNATION = "x-pagefleet-incarnation"
"""Set by engines on every answer, probes included: 32 hexadecimal digits drawn at their start."""
MODEL = "x-pagefleet-model"
"""Set by engines on every answer, probes included: the name of the served model, percent-encoded outside ASCII."""
FAULT = "x-pagefleet-fault"
"""Set by engines on an answer of 500 that is this request's own doing, as far as they know: `request`."""

EXPLAIN = "x-pagefleet-explain"
"""`1` from a client asks, where the router allows it, for the score of each engine; the answer has them as JSON."""
SESSION = "x-pagefleet-session"
"""From a client: requests with the same value prefer the same engine."""
PRIORITY = "x-pagefleet-priority"
"""From a client: an integer, larger is more urgent, below zero is shed first. To an engine, from a router that asks for
keys: the highest that the body's own `priority` may come to."""

RETRY_AFTER = "retry-after"
