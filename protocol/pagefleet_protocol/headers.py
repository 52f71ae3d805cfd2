"""Names of the HTTP headers that cross between clients, router and engines. All lower case, as ASGI has them."""

REQUEST_ID = "x-request-id"
ENGINE_ID = "x-pagefleet-engine"
"""Set by the router on answers: the id of the engine that served the request."""

RETRY_AFTER = "retry-after"
