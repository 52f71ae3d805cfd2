"""What one engine tells Prometheus, in a registry of its own.

The core's gauges and totals are read when somebody scrapes; everything else is counted where it happens. Every series
has the label `model_name`; no label takes a value that a client can invent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from pagefleet_protocol import metric_names as names
from pagefleet_protocol.version import VERSION
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from pagefleet_engine.core.outputs import Waits
from pagefleet_engine.core.prefix_lookups import MISS_REASONS
from pagefleet_engine.engine_core.messages import CoreStats
from pagefleet_engine.gpu_size import EnergyMeter
from pagefleet_engine.vllm_metrics import VllmNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "pagefleet_engine_"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
_PARTS_S = (0.005, 0.025, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_CHOICES = (1, 2, 5, 10, 20, 50, 128)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class EngineMetrics:
    """All series of one engine: those of the engine itself, and what this process counts, of perhaps several.

    Args:
        model_name: value of the label on every series.
        core_stats: returns the core's latest gauges and totals; None, before there are any, counts as zeros.
        startup_seconds: phase of the core's start -> seconds.
        max_num_seqs: requests that run at once; 0 where nobody knows.
    """

    def __init__(
        self,
        model_name: str,
        core_stats: Callable[[], CoreStats | None],
        startup_seconds: Mapping[str, float] | None = None,
        max_num_seqs: int = 0,
    ) -> None:
        self._registry = CollectorRegistry()
        self._of_engine = CollectorRegistry()
        self._vllm_names = False
        self._model = model_name
        self._of_engine.register(_CoreCollector(model_name, core_stats))
        self._info()
        self._startup(startup_seconds or {})
        most = Gauge(names.ENGINE_REQUESTS_MAX, "Requests that run at once.", ("model_name",), registry=self._of_engine)
        most.labels(self._model).set(max_num_seqs)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of one request.", _BETWEEN_TOKENS_S
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From a request's arrival to its last token.", _WHOLE_S
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length.", _TOKENS)
        self.requests = RequestHistograms(self._histogram)
        self.prompt_tokens = self._counter(names.ENGINE_PROMPT_TOKENS, "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter(names.ENGINE_GENERATION_TOKENS, "Tokens generated.")
        self.resumed_requests = self._counter(
            _PREFIX + "resumed_requests", "Streams of other engines that were continued here."
        )
        self._finished = self._labelled_counter("requests_finished", "Requests ended, by reason.", "finish_reason")
        self.ignored_fields = self._counter(_PREFIX + "ignored_fields", "Body fields that nobody knows.")
        self._http = Counter(
            _PREFIX + "http_requests",
            "HTTP requests, by route and status.",
            ("model_name", "route", "status"),
            registry=self._registry,
        )

    def cache_config(self, settings: Mapping[str, object]) -> None:
        """Tell how the KV cache was made: a label for each setting."""
        labels = ("model_name", *settings)
        info = Gauge(_PREFIX + "cache_config_info", "Always 1.", labels, registry=self._of_engine)
        info.labels(self._model, *map(str, settings.values())).set(1)

    def finished(self, reason: str) -> None:
        """Count the end of one choice: `stop`, `length`, `abort` or `error`."""
        self._finished.labels(self._model, reason).inc()

    def http_request(self, route: str, status: int) -> None:
        """Count one answered HTTP request; `route` is a pattern of the route table, never a client's path."""
        self._http.labels(self._model, route, str(status)).inc()

    def include(self, stats: Callable[[], Mapping[str, float]], *, of_engine: bool = False) -> None:
        """Add what others tell whenever somebody asks, as `listed_series` reads it.

        Args:
            stats: returns the series.
            of_engine: whether every process of the engine tells the same.
        """
        (self._of_engine if of_engine else self._registry).register(_ListedCollector(self._model, stats))

    def render(self) -> bytes:
        """Return all in the text format of Prometheus."""
        return self.counted_here() + self.of_engine()

    def counted_here(self) -> bytes:
        """Return what this process counts; over all processes of the engine it adds up."""
        return self._text(self._registry)

    def of_engine(self) -> bytes:
        """Return what is the same whichever process tells it."""
        return self._text(self._of_engine)

    def add_vllm_names(self) -> None:
        """Tell, besides, what vLLM tells too under vLLM's names."""
        self._vllm_names = True

    def _text(self, registry: CollectorRegistry) -> bytes:
        own = generate_latest(registry)
        if not self._vllm_names:
            return own
        renamed = CollectorRegistry()
        renamed.register(VllmNames(registry.collect))
        return own + generate_latest(renamed)

    def _info(self) -> None:
        info = Gauge(_PREFIX + "info", "Always 1.", ("model_name", "version"), registry=self._of_engine)
        info.labels(self._model, VERSION).set(1)

    def _startup(self, seconds: Mapping[str, float]) -> None:
        text = "What the engine's start spent its time on."
        phases = Gauge(names.ENGINE_STARTUP_SECONDS, text, ("model_name", "phase"), registry=self._of_engine)
        for phase, value in seconds.items():
            phases.labels(self._model, phase).set(value)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model_name", label), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(_PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)
        return family.labels(self._model)


def energy_series(meter: EnergyMeter) -> Mapping[str, float]:
    """Return what a device's meter says, for `EngineMetrics.include`."""
    joules = meter.joules()
    return {} if joules is None else {_PREFIX + "energy_joules_total": joules}


def rank_series(ranks: Sequence[CoreStats | None]) -> Mapping[str, float]:
    """Return the gauges of each data rank, for `EngineMetrics.include`; a rank without figures has zeros.

    They have names of their own: the engine's are the sums, and whoever adds up over labels must not count twice.
    """
    series: dict[str, float] = {}
    for rank, told in enumerate(ranks):
        stats = told or CoreStats(0, 0, 0.0, 0, 0, 0, 0)
        series |= {
            f'{_PREFIX}rank_requests_running{{rank="{rank}"}}': stats.requests_running,
            f'{_PREFIX}rank_requests_waiting{{rank="{rank}"}}': stats.requests_waiting,
            f'{_PREFIX}rank_kv_usage_ratio{{rank="{rank}"}}': stats.kv_usage,
        }
    return series


class RequestHistograms:
    """What is known of an output when it ends, or of a request when it begins.

    Args:
        make: makes a histogram of a name, a text and buckets.
    """

    def __init__(self, make: Callable[[str, str, tuple[float, ...]], Histogram]) -> None:
        self._generated = make("request_generation_tokens", "Length of an output.", _TOKENS)
        self._computed = make("request_computed_prompt_tokens", "Prompt tokens that were not cached.", _TOKENS)
        self._queue = make("request_queue_seconds", "From the core's queue to the first step.", _PARTS_S)
        self._prefill = make("request_prefill_seconds", "From the first step to the first token.", _PARTS_S)
        self._decode = make("request_decode_seconds", "From the first token to the last.", _PARTS_S)
        self._inference = make("request_inference_seconds", "From the first step to the last token.", _PARTS_S)
        self._per_token = make("request_time_per_output_token_seconds", "Decode time per token.", _BETWEEN_TOKENS_S)
        self._choices = make("request_params_n", "Outputs asked for per prompt.", _CHOICES)
        self._max_tokens = make("request_params_max_tokens", "Longest output asked for.", _TOKENS)

    def begins(self, n: int, max_tokens: int | None) -> None:
        """Note the parameters of a request; `max_tokens` None: no limit of its own."""
        self._choices.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, num_prompt_tokens: int, num_cached_tokens: int, waits: Waits | None, now: float) -> None:
        """Note an output's first token, with what the core says of its wait."""
        self._computed.observe(num_prompt_tokens - num_cached_tokens)
        if waits is not None:
            self._queue.observe(waits.scheduled_at - waits.queued_at)
            self._prefill.observe(max(0.0, now - waits.scheduled_at))

    def ended(self, num_tokens: int, first_at: float, last_at: float, waits: Waits | None) -> None:
        """Note an output's end; times are in monotonic seconds."""
        self._generated.observe(num_tokens)
        self._decode.observe(last_at - first_at)
        if num_tokens > 1:
            self._per_token.observe((last_at - first_at) / (num_tokens - 1))
        if waits is not None:
            self._inference.observe(max(0.0, last_at - waits.scheduled_at))


class _CoreCollector(Collector):
    """Turns the core's latest figures into series at scrape time."""

    def __init__(self, model_name: str, stats: Callable[[], CoreStats | None]) -> None:
        self._model = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats() or CoreStats(0, 0, 0.0, 0, 0, 0, 0)
        yield self._gauge(names.ENGINE_REQUESTS_RUNNING, "Requests in the running batch.", stats.requests_running)
        yield self._gauge(names.ENGINE_REQUESTS_WAITING, "Requests in the queue.", stats.requests_waiting)
        yield self._gauge(names.ENGINE_KV_USAGE_RATIO, "Share of KV blocks held by requests.", stats.kv_usage)
        yield self._total(
            names.ENGINE_PREFIX_CACHE_QUERIES_TOKENS,
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries_tokens,
        )
        yield self._total(
            names.ENGINE_PREFIX_CACHE_HITS_TOKENS,
            "Prompt tokens found in the prefix cache.",
            stats.prefix_cache_hits_tokens,
        )
        missed = CounterMetricFamily(
            _PREFIX + "prefix_cache_missed_tokens", "Prompt tokens not found there.", labels=("model_name", "reason")
        )
        for reason, tokens in zip(MISS_REASONS, stats.prefix_misses_tokens, strict=False):
            missed.add_metric((self._model, reason), tokens)
        yield missed
        yield self._step_sizes(stats)
        yield self._total(_PREFIX + "preemptions_total", "Requests put back for want of blocks.", stats.preemptions)
        yield self._total(_PREFIX + "steps_total", "Forward passes.", stats.steps)
        dropped = "Bytes on the core's socket that were no message."
        yield self._total(_PREFIX + "messages_dropped_total", dropped, stats.messages_dropped)
        idle = "Time that the device waited for the host between two steps."
        yield self._total(names.ENGINE_GPU_IDLE_SECONDS, idle, stats.gpu_idle_seconds)
        nan = "Requests ended because the model's output for them was not a number."
        yield self._total(names.ENGINE_NAN_REQUESTS, nan, stats.nan_requests)
        memory = "Steps for which the device had no memory; their requests ended with an error."
        yield self._total(names.ENGINE_OUT_OF_MEMORY_STEPS, memory, stats.out_of_memory_steps)
        yield self._total(_PREFIX + "kv_events_total", "Batches of KV events published.", stats.kv_events)
        garbage = "Messages and connections on the ports of KV events that were refused."
        yield self._total(_PREFIX + "kv_events_dropped_total", garbage, stats.kv_events_dropped)
        yield from listed_series(self._model, {**stats.kv_transfer, **stats.forms, **stats.experts})

    def _step_sizes(self, stats: CoreStats) -> Metric:
        family = HistogramMetricFamily(_PREFIX + "iteration_tokens", "Tokens of a step.", labels=("model_name",))
        steps = list(itertools.accumulate(stats.step_sizes))
        buckets = [(f"{2.0**power}", float(count)) for power, count in enumerate(steps)]
        family.add_metric((self._model,), [*buckets, ("+Inf", float(stats.steps))], stats.step_tokens)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name.removesuffix("_total"), text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family


class _ListedCollector(Collector):
    def __init__(self, model_name: str, stats: Callable[[], Mapping[str, float]]) -> None:
        self._model = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        return listed_series(self._model, self._stats())


_NAME = re.compile(r'([a-z_][a-z0-9_]*)(?:\{([a-z_]+)="([^"\\\n]*)"\})?')
_TEXT = "docs/metrics.md says what it is."


def listed_series(model_name: str, stats: Mapping[str, float]) -> Iterator[Metric]:
    """Yield a family for each name: `..._total` counts, `..._sum` with `..._count` is a summary, others are gauges.

    A name may have one label, as in `..._bytes{tier="host"}`; all have `model_name`.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for full_name, value in stats.items():
        found = _NAME.fullmatch(full_name)
        assert found is not None, f"{full_name} is no name of a series"
        name, label, label_value = found.groups()
        if name.endswith("_count"):
            continue  # told with its sum
        if name.endswith("_sum"):
            count = stats[name.removesuffix("_sum") + "_count"]
            summary = SummaryMetricFamily(name.removesuffix("_sum"), _TEXT, labels=("model_name",))
            summary.add_metric((model_name,), int(count), value)
            yield summary
            continue
        family = families.get(name)
        if family is None:
            family = families[name] = _family(name, label)
        family.add_metric((model_name,) if label is None else (model_name, label_value), value)
    yield from families.values()


def _family(name: str, label: str | None) -> CounterMetricFamily | GaugeMetricFamily:
    labels = ("model_name",) if label is None else ("model_name", label)
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), _TEXT, labels=labels)
    return GaugeMetricFamily(name, _TEXT, labels=labels)
