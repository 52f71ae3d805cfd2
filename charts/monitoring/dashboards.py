"""What the dashboards show. docs/metrics.md says what each metric means."""

from __future__ import annotations

from charts.monitoring.grafana import RANGE, Dashboard, Panel, mean, quantile, quantiles, rate, share, top, total

E, R, O, P = "pagefleet_engine_", "pagefleet_router_", "pagefleet_operator_", "pagefleet_router_pd_"  # noqa: E741
KV = f"{E}kv_transfer_"

FLEET = Dashboard(
    "fleet",
    "Fleet",
    (
        Panel("Requests", "reqps", {"{{status}}": rate(f'{R}requests_total{{route=~"/v1/.+"}}', "status")}),
        Panel(
            "Time to first token",
            "s",
            quantiles(f"{R}time_to_first_token_seconds"),
            "From a request's arrival at the router, its wait included.",
        ),
        Panel("Time between tokens", "s", quantiles(f"{R}inter_token_seconds")),
        Panel(
            "Tokens",
            "short",
            {"generated": rate(f"{E}generation_tokens_total"), "prompts": rate(f"{E}prompt_tokens_total")},
            "In a second.",
        ),
        Panel(
            "Requests at engines",
            "short",
            {"running": top(f"{R}fleet_requests_running"), "waiting": top(f"{R}fleet_requests_waiting")},
            "Waiting for minutes means too few engines.",
        ),
        Panel("Engines", "short", {"{{state}}": top(f"{R}endpoints", "state")}),
        Panel("KV cache in use", "percentunit", {"mean of the engines": top(f"{R}fleet_kv_usage_ratio")}),
        Panel(
            "Prompt tokens found in prefix caches",
            "percentunit",
            {"found": share(f"{E}prefix_cache_hits_tokens_total", f"{E}prefix_cache_queries_tokens_total")},
        ),
        Panel(
            "Services",
            "short",
            {"{{ready}} {{reason}}": total(f"{O}services", "ready", "reason")},
            "InferenceServices of the whole operator by their condition Ready: docs/troubleshooting.md, by reason.",
        ),
    ),
)

ENGINE = Dashboard(
    "engine",
    "Engine",
    (
        Panel(
            "Requests",
            "short",
            {
                "running {{instance}}": total(f"{E}requests_running", "instance"),
                "waiting {{instance}}": total(f"{E}requests_waiting", "instance"),
                "at most {{instance}}": total(f"{E}requests_max", "instance"),
            },
        ),
        Panel("KV cache in use", "percentunit", {"{{instance}}": top(f"{E}kv_usage_ratio", "instance")}),
        Panel(
            "Preemptions",
            "ops",
            {"{{instance}}": rate(f"{E}preemptions_total", "instance")},
            "Requests put back for want of blocks: the KV cache is too small.",
        ),
        Panel(
            "Tokens generated in a second", "short", {"{{instance}}": rate(f"{E}generation_tokens_total", "instance")}
        ),
        Panel("Prompt tokens in a second", "short", {"{{instance}}": rate(f"{E}prompt_tokens_total", "instance")}),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            {
                "{{instance}}": share(
                    f"{E}prefix_cache_hits_tokens_total", f"{E}prefix_cache_queries_tokens_total", "instance"
                )
            },
        ),
        Panel("Time to first token", "s", quantiles(f"{E}time_to_first_token_seconds")),
        Panel("Time between outputs", "s", quantiles(f"{E}inter_token_latency_seconds")),
        Panel("Whole requests", "s", quantiles(f"{E}request_duration_seconds")),
        Panel("Steps", "ops", {"{{instance}}": rate(f"{E}steps_total", "instance")}),
        Panel(
            "Device idle between steps",
            "percentunit",
            {"{{instance}}": rate(f"{E}gpu_idle_seconds_total", "instance")},
            "Share of the time that the device waited for the host.",
        ),
        Panel("Ends of requests", "reqps", {"{{finish_reason}}": rate(f"{E}requests_finished_total", "finish_reason")}),
        Panel(
            "Faults",
            "ops",
            {
                "no memory": rate(f"{E}out_of_memory_steps_total"),
                "not a number": rate(f"{E}nan_requests_total"),
                "no message": rate(f"{E}messages_dropped_total"),
            },
        ),
        Panel(
            "Forms",
            "ops",
            {
                "asked for": rate(f"{E}form_requests_total"),
                "compiled": rate(f"{E}grammars_compiled_total"),
                "waiting": total(f"{E}grammars_waiting"),
            },
            "Structured output.",
        ),
        Panel(
            "Where a request's time goes, 95 of 100",
            "s",
            {
                "queue": quantile(0.95, f"{E}request_queue_seconds"),
                "prefill": quantile(0.95, f"{E}request_prefill_seconds"),
                "decode": quantile(0.95, f"{E}request_decode_seconds"),
            },
        ),
        Panel("Tokens of a step", "short", quantiles(f"{E}iteration_tokens")),
        Panel(
            "Prompt tokens not found, by why",
            "short",
            {"{{reason}}": rate(f"{E}prefix_cache_missed_tokens_total", "reason")},
        ),
        Panel("What the start took", "s", {"{{phase}}": top(f"{E}startup_seconds", "phase")}),
    ),
)

ROUTER = Dashboard(
    "router",
    "Router",
    (
        Panel("Requests", "reqps", {"{{route}} {{status}}": rate(f"{R}requests_total", "route", "status")}),
        Panel("Until an engine's answer begins", "s", quantiles(f"{R}upstream_first_byte_seconds")),
        Panel("Whole requests, 95 of 100", "s", {"{{route}}": quantile(0.95, f"{R}request_seconds", "route")}),
        Panel(
            "Open",
            "short",
            {"requests": total(f"{R}requests_in_flight"), "connections": total(f"{R}client_connections")},
        ),
        Panel(
            "Waiting",
            "short",
            {
                "for room {{model}}": total(f"{R}requests_queued", "model"),
                "for a first engine {{model}}": total(f"{R}requests_held", "model"),
            },
        ),
        Panel("Wait of those let in, 95 of 100", "s", {"p95": quantile(0.95, f"{R}admission_wait_seconds")}),
        Panel("Refused at the door", "reqps", {"{{code}}": rate(f"{R}admission_refusals_total", "code")}),
        Panel("Attempts that failed", "ops", {"{{reason}}": rate(f"{R}upstream_failures_total", "reason")}),
        Panel(
            "Tried again",
            "ops",
            {"{{reason}}": rate(f"{R}retries_total", "reason"), "not allowed": rate(f"{R}retries_denied_total")},
        ),
        Panel(
            "Streams that lost their engine",
            "ops",
            {"went on {{model}}": rate(f"{R}streams_continued_total", "model"), "cut": rate(f"{R}streams_cut_total")},
        ),
        Panel(
            "Engines",
            "short",
            {
                "{{state}}": top(f"{R}endpoints", "state"),
                "ejected in 5 minutes": f"sum(increase({R}ejections_total[5m]))",
            },
        ),
        Panel("Requests at each engine", "short", {"{{engine}}": total(f"{R}engine_requests_in_flight", "engine")}),
        Panel(
            "Prompt tokens that the chosen engine had",
            "percentunit",
            {"had": share(f"{R}prefix_hits_tokens_total", f"{R}prefix_queries_tokens_total")},
        ),
        Panel(
            "Prompts",
            "ops",
            {"tokenized": rate(f"{R}prompts_tokenized_total"), "too late": rate(f"{R}prompts_late_total")},
        ),
        Panel(
            "KV events",
            "ops",
            {"messages": rate(f"{R}kv_events_total"), "gaps": rate(f"{R}kv_event_gaps_total")},
            "Gaps are asked for again.",
        ),
    ),
)

DISAGGREGATION = Dashboard(
    "disaggregation",
    "Prefill and decode",
    (
        Panel(
            "Who computes prompts",
            "reqps",
            {"{{choice}}": rate(f"{P}requests_total", "choice")},
            "remote: a prefill engine; local: the decode engine; none: an engine for both.",
        ),
        Panel("Engines", "short", {"{{role}}": top(f"{R}role_engines", "role")}),
        Panel("Requests", "short", {"{{role}}": total(f"{R}role_requests", "role")}),
        Panel("Waiting", "short", {"{{role}}": top(f"{R}role_requests_waiting", "role")}),
        Panel(
            "Prompt tokens not yet computed", "short", {"{{role}}": total(f"{R}role_prefill_tokens_in_flight", "role")}
        ),
        Panel("KV cache in use", "percentunit", {"{{role}}": top(f"{R}role_kv_usage_ratio", "role")}),
        Panel(
            "K/V passed on",
            "Bps",
            {"received {{instance}}": rate(f"{KV}received_bytes_total", "instance")},
        ),
        Panel("A transfer, mean", "s", {"mean": mean(f"{KV}seconds")}),
        Panel(
            "What transfers cost",
            "percentunit",
            {"exposed": rate(f"{KV}exposed_seconds_total"), "hidden": rate(f"{KV}hidden_seconds_total")},
            "Seconds a second: exposed is time that requests waited; hidden passed while prompts were computed.",
        ),
        Panel("Handover, 95 of 100", "s", {"p95": quantile(0.95, f"{P}handover_seconds")}),
        Panel(
            "Came to nothing",
            "ops",
            {
                "transfers": rate(f"{KV}failures_total"),
                "leases": rate(f"{KV}lease_expiries_total"),
                "refusals": rate(f"{KV}nacks_total"),
                "prompts computed again": rate(f"{P}recomputed_total"),
            },
        ),
        Panel("Prefill engines known", "short", {"{{state}}": total(f"{KV}peers", "state")}),
        Panel(
            "Blocks kept for decode engines",
            "short",
            {"in the pool": total(f"{KV}pinned_blocks"), "in host memory": total(f"{KV}spilled_blocks")},
        ),
        Panel("Transfers that waited for room", "ops", {"stalls": rate(f"{KV}credit_stalls_total")}),
        Panel("Prompt tokens computed as K/V did not come", "short", {"tokens": rate(f"{KV}recomputed_tokens_total")}),
    ),
)

AUTOSCALING = Dashboard(
    "autoscaling",
    "Autoscaling",
    (
        Panel(
            "Engines",
            "short",
            {
                "wanted {{namespace}}/{{service}} {{role}}": top(
                    f"{O}scaling_desired_engines", "namespace", "service", "role"
                ),
                "there {{namespace}}/{{service}} {{role}}": top(
                    f"{O}scaling_current_engines", "namespace", "service", "role"
                ),
            },
        ),
        Panel(
            "Decisions",
            "ops",
            {"{{reason}}": rate(f"{O}scaling_decisions_total", "reason")},
            "docs/autoscaling.md explains the reasons.",
        ),
        Panel(
            "Age of what routers said",
            "s",
            {"{{namespace}}/{{service}}": top(f"{O}scaling_signal_age_seconds", "namespace", "service")},
        ),
        Panel("Requests that arrive", "reqps", {"{{model}}": rate(f"{R}arrivals_total", "model")}),
        Panel(
            "Prompt tokens to compute",
            "short",
            {"{{model}}": rate(f"{R}uncached_prompt_tokens_total", "model")},
            "In a second, without what caches had.",
        ),
        Panel(
            "What an engine does",
            "short",
            {
                "prompt tokens/s {{model}}": f"avg by (model) ({R}prefill_tokens_per_second)",
                "tokens/s {{model}}": f"avg by (model) ({R}decode_tokens_per_second)",
            },
            "Learned by the routers.",
        ),
        Panel(
            "Requests that wait",
            "short",
            {
                "for room {{model}}": total(f"{R}requests_queued", "model"),
                "for a first engine {{model}}": total(f"{R}requests_held", "model"),
                "at engines": top(f"{R}fleet_requests_waiting"),
            },
        ),
        Panel("Prompt tokens that wait", "short", {"{{model}}": total(f"{R}queued_tokens", "model")}),
        Panel("KV cache in use", "percentunit", {"mean of the engines": top(f"{R}fleet_kv_usage_ratio")}),
    ),
)

_TRIED, _ENDS = f"{R}revision_", f"{R}revision_requests_total"

CANARY = Dashboard(
    "canary",
    "Canary",
    (
        Panel(
            "Requests for the new revision",
            "percent",
            {"{{namespace}}/{{service}} {{phase}}": top(f"{O}canary_percent", "namespace", "service", "phase")},
            "RolledBack: it went back; status.canary of the service says why.",
        ),
        Panel(
            "Attempts",
            "reqps",
            {"{{revision}} {{outcome}}": rate(_ENDS, "revision", "outcome")},
            "While a revision is tried out; stable is all others.",
        ),
        Panel("Answered", "percentunit", {"{{revision}}": share(f'{_ENDS}{{outcome="answered"}}', _ENDS, "revision")}),
        Panel("First tokens, mean", "s", {"{{revision}}": mean(f"{_TRIED}first_token_seconds", "revision")}),
        Panel("Between tokens, mean", "s", {"{{revision}}": mean(f"{_TRIED}inter_token_seconds", "revision")}),
        Panel(
            "First tokens, 95 of 100", "s", {"{{revision}}": quantile(0.95, f"{_TRIED}first_token_seconds", "revision")}
        ),
    ),
)

_REQUESTS = f'{R}requests_total{{route=~"/v1/.+"}}'
_FAILED = f'{R}requests_total{{route=~"/v1/.+",status=~"5.."}}'
_FIRST, _TOKEN = f"{R}time_to_first_token_seconds", f"{R}inter_token_seconds"


def _failed(window: str) -> str:
    return f"(sum(rate({_FAILED}[{window}])) or vector(0)) / sum(rate({_REQUESTS}[{window}]))"


def _burnt(window: str) -> str:
    return f"{_failed(window)} / (1 - $objective)"


SLO = Dashboard(
    "slo",
    "Service level objectives",
    (
        Panel(
            "Answered without a fault of ours",
            "percentunit",
            {"in this time": f"1 - {_failed(RANGE)}", "now": f"1 - {_failed('5m')}"},
        ),
        Panel(
            "Error budget burnt",
            "short",
            {"5 minutes": _burnt("5m"), "1 hour": _burnt("1h"), "6 hours": _burnt("6h")},
            "1 uses the budget up by the end of its period; at 14.4 a month's is gone in two days.",
        ),
        Panel(
            "Failed", "reqps", {"{{status}}": rate(f'{R}requests_total{{route=~"/v1/.+",status=~"[45].."}}', "status")}
        ),
        Panel(
            "First token in time",
            "percentunit",
            {"in this time": share(f'{_FIRST}_bucket{{le=~"$ttft"}}', f"{_FIRST}_count", over=RANGE)},
        ),
        Panel("Time to first token", "s", quantiles(_FIRST)),
        Panel(
            "Refused", "percentunit", {"of what arrives": share(f"{R}admission_refusals_total", f"{R}arrivals_total")}
        ),
        Panel(
            "Streams with tokens in time",
            "percentunit",
            {"in this time": share(f'{_TOKEN}_bucket{{le=~"$itl"}}', f"{_TOKEN}_count", over=RANGE)},
        ),
        Panel("Time between tokens", "s", quantiles(_TOKEN)),
        Panel(
            "Time to first token by model, 95 of 100",
            "s",
            {"{{model}}": quantile(0.95, _FIRST, "model")},
        ),
    ),
    {
        "objective": {"99.9 %": "0.999", "99.5 %": "0.995", "99 %": "0.99"},
        # Prometheus 3 writes 1.0 where version 2 has 1.
        "ttft": {"2.5 s": "2.5", "0.5 s": "0.5", "1 s": "1|1.0", "5 s": "5|5.0", "10 s": "10|10.0"},
        "itl": {"0.1 s": "0.1", "0.025 s": "0.025", "0.05 s": "0.05", "0.25 s": "0.25"},
    },
)

DASHBOARDS = (FLEET, ENGINE, ROUTER, DISAGGREGATION, AUTOSCALING, CANARY, SLO)
