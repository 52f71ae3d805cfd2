"""Names of the Prometheus metrics that somebody else reads: the router for an engine's load, dashboards and alerts."""

ENGINE_REQUESTS_RUNNING = "pagefleet_engine_requests_running"
ENGINE_REQUESTS_WAITING = "pagefleet_engine_requests_waiting"
ENGINE_KV_USAGE_RATIO = "pagefleet_engine_kv_usage_ratio"
ENGINE_PROMPT_TOKENS = "pagefleet_engine_prompt_tokens_total"
ENGINE_GENERATION_TOKENS = "pagefleet_engine_generation_tokens_total"
ENGINE_FIRST_TOKEN_SECONDS = "pagefleet_engine_time_to_first_token_seconds"  # noqa: S105
"""Histogram, from a request's arrival at the engine to its first token."""
ENGINE_PREFIX_CACHE_QUERIES_TOKENS = "pagefleet_engine_prefix_cache_queries_tokens_total"
ENGINE_PREFIX_CACHE_HITS_TOKENS = "pagefleet_engine_prefix_cache_hits_tokens_total"
ENGINE_GPU_IDLE_SECONDS = "pagefleet_engine_gpu_idle_seconds_total"
ENGINE_NAN_REQUESTS = "pagefleet_engine_nan_requests_total"
ENGINE_OUT_OF_MEMORY_STEPS = "pagefleet_engine_out_of_memory_steps_total"
ENGINE_STARTUP_SECONDS = "pagefleet_engine_startup_seconds"
ENGINE_KV_RECEIVED_BYTES = "pagefleet_engine_kv_transfer_received_bytes_total"
ENGINE_KV_EXPOSED_SECONDS = "pagefleet_engine_kv_transfer_exposed_seconds_total"
ENGINE_KV_HIDDEN_SECONDS = "pagefleet_engine_kv_transfer_hidden_seconds_total"
ENGINE_REQUESTS_MAX = "pagefleet_engine_requests_max"
"""Requests that run at once."""

# Of all engines that a router sees. Two routers of one fleet see the same engines: take one's word, do not add them up.
ROUTER_FLEET_ENGINES = "pagefleet_router_fleet_engines"
ROUTER_FLEET_REQUESTS_RUNNING = "pagefleet_router_fleet_requests_running"
ROUTER_FLEET_REQUESTS_WAITING = "pagefleet_router_fleet_requests_waiting"
ROUTER_FLEET_KV_USAGE_RATIO = "pagefleet_router_fleet_kv_usage_ratio"
ROUTER_FLEET_GENERATED_TOKENS = "pagefleet_router_fleet_generated_tokens_total"

# What each router counts for itself, labelled with the model: add them up over the routers of a fleet.
ROUTER_ARRIVALS = "pagefleet_router_arrivals_total"
"""Requests for a model, whatever became of them: none for a while means idle."""
ROUTER_HELD = "pagefleet_router_requests_held"
"""Requests that wait because the model has no engine."""
ROUTER_QUEUED = "pagefleet_router_requests_queued"
"""Requests that wait because its engines have no room."""
ROUTER_QUEUED_TOKENS = "pagefleet_router_queued_tokens"
"""Prompt tokens of the held and queued requests."""
ROUTER_PREFILL_TOKENS = "pagefleet_router_prefill_tokens_in_flight"
"""Uncached prompt tokens at the engines whose answer has not begun."""
ROUTER_PROMPT_TOKENS = "pagefleet_router_uncached_prompt_tokens_total"
"""Uncached prompt tokens of the requests sent to engines, as the router predicted them."""
ROUTER_FIRST_TOKEN_SECONDS = "pagefleet_router_time_to_first_token_seconds"  # noqa: S105
"""Histogram, from a request's arrival at the router, its wait there included, to the first byte of a stream."""
ROUTER_TOKEN_SECONDS = "pagefleet_router_inter_token_seconds"  # noqa: S105
"""Histogram of streams: mean time between two of their reads."""

# What attempts became while a revision is tried out, by revision (`stable`: the others): add them up over the routers.
ROUTER_REVISION_REQUESTS = "pagefleet_router_revision_requests_total"
"""By outcome: answered, refused (4xx) or failed."""
ROUTER_REVISION_FIRST_TOKEN = "pagefleet_router_revision_first_token_seconds"  # noqa: S105
"""Histogram of streams, from the attempt's beginning to its first byte."""
ROUTER_REVISION_TOKEN = "pagefleet_router_revision_inter_token_seconds"  # noqa: S105
"""Histogram of streams: mean time between two of their reads."""
STABLE = "stable"
"""Stands for all revisions but the one that is tried out."""

# How prompts are read, over all models: add them up over the routers of a fleet.
ROUTER_PROMPTS_TOKENIZED = "pagefleet_router_prompts_tokenized_total"
"""Prompts that went on with their tokens or blocks."""
ROUTER_PROMPTS_LATE = "pagefleet_router_prompts_late_total"
"""Prompts that went on without: they took too long, or too many waited."""
ROUTER_SEGMENTS_REUSED = "pagefleet_router_prompt_segments_reused_total"
"""Parts of prompts whose tokens were remembered."""

ROUTER_PICKS = "pagefleet_router_picks_total"
"""Requests of gateways that ask where they go, by outcome."""
ROUTER_PICK_SECONDS = "pagefleet_router_pick_seconds"
"""From such a request's body to the choice, the wait for an engine with room apart."""

ROUTER_TRACE_SPANS = "pagefleet_router_trace_spans_total"
ENGINE_TRACE_SPANS = "pagefleet_engine_trace_spans_total"
"""Spans that a collector of traces has taken, or has not."""

# Of the engines of a model that are made for one part, by model and role (prefill, decode, both), as a router sees
# them: take one router's word, but add up the tokens, which each counts for itself.
ROUTER_ROLE_ENGINES = "pagefleet_router_role_engines"
ROUTER_ROLE_REQUESTS = "pagefleet_router_role_requests"
ROUTER_ROLE_WAITING = "pagefleet_router_role_requests_waiting"
ROUTER_ROLE_PREFILL_TOKENS = "pagefleet_router_role_prefill_tokens_in_flight"
ROUTER_ROLE_KV_USAGE = "pagefleet_router_role_kv_usage_ratio"

# What a router has learned of engines: take the mean over routers.
ROUTER_PREFILL_RATE = "pagefleet_router_prefill_tokens_per_second"
"""Uncached prompt tokens that one engine computes in a second, by model."""
ROUTER_TRANSFER_RATE = "pagefleet_router_pd_transfer_bytes_per_second"
"""Bytes of K/V that reach one decode engine in a second while blocks come, by engine."""
ROUTER_DECODE_RATE = "pagefleet_router_decode_tokens_per_second"
"""Tokens that one engine generates in a second under load, by model."""
