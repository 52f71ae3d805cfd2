"""Names of the Prometheus metrics that somebody else reads: the router for an engine's load, dashboards and alerts."""

ENGINE_REQUESTS_RUNNING = "pagefleet_engine_requests_running"
ENGINE_REQUESTS_WAITING = "pagefleet_engine_requests_waiting"
ENGINE_KV_USAGE_RATIO = "pagefleet_engine_kv_usage_ratio"
ENGINE_GENERATION_TOKENS = "pagefleet_engine_generation_tokens_total"
ENGINE_PREFIX_CACHE_QUERIES_TOKENS = "pagefleet_engine_prefix_cache_queries_tokens_total"
ENGINE_PREFIX_CACHE_HITS_TOKENS = "pagefleet_engine_prefix_cache_hits_tokens_total"
ENGINE_GPU_IDLE_SECONDS = "pagefleet_engine_gpu_idle_seconds_total"
ENGINE_NAN_REQUESTS = "pagefleet_engine_nan_requests_total"
ENGINE_OUT_OF_MEMORY_STEPS = "pagefleet_engine_out_of_memory_steps_total"
ENGINE_STARTUP_SECONDS = "pagefleet_engine_startup_seconds"

# Of all engines that a router sees. Two routers of one fleet see the same engines: take one's word, do not add them up.
ROUTER_FLEET_ENGINES = "pagefleet_router_fleet_engines"
ROUTER_FLEET_REQUESTS_RUNNING = "pagefleet_router_fleet_requests_running"
ROUTER_FLEET_REQUESTS_WAITING = "pagefleet_router_fleet_requests_waiting"
ROUTER_FLEET_KV_USAGE_RATIO = "pagefleet_router_fleet_kv_usage_ratio"
ROUTER_FLEET_GENERATED_TOKENS = "pagefleet_router_fleet_generated_tokens_total"
