"""Names of what spans say: those of OpenTelemetry's conventions where they have one, else under `pagefleet.`."""

METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"
MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

REQUEST_ID = "pagefleet.request_id"
CACHED_TOKENS = "pagefleet.cached_tokens"
"""Prompt tokens that an engine had: as the router expected it, or as the engine found."""

# Of routers.
POLICY = "pagefleet.policy"
PREFILL_BY = "pagefleet.prefill"
"""Who computed the prompt: `none` (an engine for both), `local` (the decode engine) or `remote` (a prefill engine)."""
QUEUE_S = "pagefleet.queue_seconds"
"""Until the request was let in."""
RETRIES = "pagefleet.retries"
ENGINE = "pagefleet.engine_id"
"""Of an attempt the engine that was asked, of a request the last one."""
FAILURE = "pagefleet.failure"
"""Why an attempt gave no good answer; the words of `pagefleet_router_upstream_failures_total`."""

# Of both legs of a P/D transfer, in router and engine.
LEG = "pagefleet.leg"
"""`prefill` or `decode`; absent where one engine does all."""
TRANSFER_ID = "pagefleet.transfer_id"

# Of engines.
FIRST_TOKEN_S = "pagefleet.first_token_seconds"  # noqa: S105
"""From a request's arrival to its first token, over all choices."""
KV_WAIT_S = "pagefleet.kv_wait_seconds"
"""That a request was held back for K/V that was on its way from elsewhere."""

RESUMED_TOKENS = "pagefleet.resumed_tokens"
"""Tokens of another engine that a continued stream goes on from."""

# Events of engines.
QUEUED = "queued"
"""The prompt is ready and goes to the engine core."""
FIRST_TOKEN = "first token"  # noqa: S105
