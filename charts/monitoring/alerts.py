"""What somebody is told of, and where it says what to do: the chapter of docs/troubleshooting.md of the alert's name.

Objectives are the chart's values, which its template puts in the places of OBJECTIVE, TTFT_SECONDS and ITL_SECONDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_OF = "namespace, pagefleet_dev_service"
"""What tells InferenceServices apart."""
_REQUESTS = 'pagefleet_router_requests_total{route=~"/v1/.+"}'
_FAILED = 'pagefleet_router_requests_total{route=~"/v1/.+",status=~"5.."}'


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert."""

    name: str
    severity: Literal["critical", "warning"]
    lasts: str
    """How long it has to be so before anybody is told."""
    query: str
    summary: str
    """One sentence, in which {{ $labels.x }} and {{ $value }} stand for what was found."""
    chapter: str = ""
    """Of docs/troubleshooting.md, where it is not the alert's name."""


def _burns(long: str, short: str, factor: float) -> str:
    """Return that the error budget is used up `factor` times too fast, over a long window, and still now."""
    shares = (
        f"sum by ({_OF}) (rate({_FAILED}[{window}])) / sum by ({_OF}) (rate({_REQUESTS}[{window}]))"
        for window in (long, short)
    )
    return " and ".join(f"{one} > {factor} * (1 - OBJECTIVE)" for one in shares)


def _slow(histogram: str, limit: str) -> str:
    return f"histogram_quantile(0.95, sum by (le, {_OF}) (rate({histogram}_bucket[10m]))) > {limit}"


_SERVICE = "{{ $labels.namespace }}/{{ $labels.pagefleet_dev_service }}"
_SCALED = "{{ $labels.namespace }}/{{ $labels.service }}"

ALERTS = (
    Alert(
        "PagefleetServiceNotReady",
        "critical",
        "10m",
        # What somebody asked for is no fault.
        'sum by (reason) (pagefleet_operator_services{ready="False",reason!~"ScaledToZero|Paused"}) > 0',
        "{{ $value }} InferenceServices answer nobody: {{ $labels.reason }}",
        "{{ $labels.reason | toLower }}",
    ),
    Alert(
        "PagefleetErrorsFast",
        "critical",
        "2m",
        _burns("1h", "5m", 14.4),
        f"{_SERVICE}: {{{{ $value | humanizePercentage }}}} of requests fail: a month's budget is gone in two days",
        "pagefleeterrors",
    ),
    Alert(
        "PagefleetErrorsSlow",
        "warning",
        "15m",
        _burns("6h", "30m", 6),
        f"{_SERVICE}: {{{{ $value | humanizePercentage }}}} of requests fail: a month's budget is gone in five days",
        "pagefleeterrors",
    ),
    Alert(
        "PagefleetFirstTokenSlow",
        "warning",
        "10m",
        _slow("pagefleet_router_time_to_first_token_seconds", "TTFT_SECONDS"),
        f"{_SERVICE}: one of twenty first tokens takes more than {{{{ $value | humanizeDuration }}}}",
    ),
    Alert(
        "PagefleetTokensSlow",
        "warning",
        "10m",
        _slow("pagefleet_router_inter_token_seconds", "ITL_SECONDS"),
        f"{_SERVICE}: one of twenty streams has more than {{{{ $value | humanizeDuration }}}} between tokens",
    ),
    Alert(
        "PagefleetRequestsRefused",
        "warning",
        "10m",
        f"sum by ({_OF}) (rate(pagefleet_router_admission_refusals_total[5m]))"
        f" / sum by ({_OF}) (rate(pagefleet_router_arrivals_total[5m])) > 0.05",
        f"{_SERVICE}: {{{{ $value | humanizePercentage }}}} of the requests are refused at the door",
    ),
    Alert(
        "PagefleetNoEngine",
        "critical",
        "5m",
        f'max by ({_OF}) (pagefleet_router_endpoints{{state="ready"}}) == 0'
        f" and sum by ({_OF}) (pagefleet_router_requests_held) > 0",
        f"{_SERVICE}: requests wait and no engine serves",
    ),
    Alert(
        "PagefleetEngineFails",
        "warning",
        "5m",
        f'max by ({_OF}) (pagefleet_router_endpoints{{state="ejected"}}) > 0',
        f"{_SERVICE}: {{{{ $value }}}} engines fail, and get no requests",
    ),
    Alert(
        "PagefleetPreemptions",
        "warning",
        "15m",
        f"sum by ({_OF}, instance) (rate(pagefleet_engine_preemptions_total[5m])) > 0.1",
        f"{_SERVICE}: {{{{ $labels.instance }}}} puts requests back for want of KV cache",
    ),
    Alert(
        "PagefleetOutOfMemory",
        "warning",
        "0m",
        f"sum by ({_OF}, instance) (increase(pagefleet_engine_out_of_memory_steps_total[15m])) > 0",
        f"{_SERVICE}: {{{{ $labels.instance }}}} has no device memory for its steps",
    ),
    Alert(
        "PagefleetNotANumber",
        "critical",
        "0m",
        f"sum by ({_OF}, instance) (increase(pagefleet_engine_nan_requests_total[15m])) > 0",
        f"{_SERVICE}: the model's output at {{{{ $labels.instance }}}} is not a number",
    ),
    Alert(
        "PagefleetTransfersFail",
        "warning",
        "10m",
        f"sum by ({_OF}) (rate(pagefleet_engine_kv_transfer_failures_total[5m]))"
        f' / sum by ({_OF}) (rate(pagefleet_router_pd_requests_total{{choice="remote"}}[5m])) > 0.1',
        f"{_SERVICE}: {{{{ $value | humanizePercentage }}}} of the KV transfers come to nothing",
        "kvlinkdown",
    ),
    Alert(
        "PagefleetScalingBlind",
        "warning",
        "5m",
        "max by (namespace, service) (pagefleet_operator_scaling_signal_age_seconds) > 60",
        f"{_SCALED}: a router says nothing to the autoscaler, so no engine goes",
        "signalsmissing",
    ),
    Alert(
        "PagefleetScalingAtMaximum",
        "warning",
        "30m",
        'rate(pagefleet_operator_scaling_decisions_total{reason="AtMaximum"}[5m]) > 0',
        "The demand asks for more engines than autoscaling.max; status.scaling tells of which service",
        "atmaximum",
    ),
    Alert(
        "PagefleetCanaryBack",
        "warning",
        "0m",
        'max by (namespace, service) (pagefleet_operator_canary_percent{phase="RolledBack"}) >= 0',
        f"{_SCALED}: a new revision was tried out and went back; status.canary says why",
        "canaryfailed",
    ),
    Alert(
        "PagefleetNoOperator",
        "critical",
        "5m",
        "(sum(pagefleet_operator_leader) or vector(0)) < 1",
        "No operator works: everything serves on, and nothing is changed, scaled or made again",
    ),
    Alert(
        "PagefleetOperatorBehind",
        "warning",
        "10m",
        "max(pagefleet_operator_queue_oldest_seconds) > 60 or max(pagefleet_operator_watch_lag_seconds) > 60",
        "The operator is {{ $value | humanizeDuration }} behind",
    ),
)


def rules() -> dict[str, Any]:
    """Return Prometheus' rule file."""
    return {"groups": [{"name": "pagefleet", "rules": [_rule(one) for one in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    chapter = alert.chapter or alert.name.lower()
    return {
        "alert": alert.name,
        "expr": alert.query,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"RUNBOOKS#{chapter}"},
    }
