"""Names of the Prometheus metrics that another component reads, and the prefix of all others.

The router polls these from an engine's /metrics to know its load.
"""

ENGINE_REQUESTS_RUNNING = "pagefleet_engine_requests_running"
ENGINE_REQUESTS_WAITING = "pagefleet_engine_requests_waiting"
ENGINE_KV_USAGE_RATIO = "pagefleet_engine_kv_usage_ratio"
ENGINE_PREFIX_CACHE_QUERIES_TOKENS = "pagefleet_engine_prefix_cache_queries_tokens_total"
ENGINE_PREFIX_CACHE_HITS_TOKENS = "pagefleet_engine_prefix_cache_hits_tokens_total"
