"""The engine's own figures once more, under the names and labels of vLLM 0.32, for dashboards that were made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector

_OWN = "pagefleet_engine_"
VLLM_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "kv_usage_ratio": "kv_cache_usage_perc",
        "prefix_cache_queries_tokens": "prefix_cache_queries",
        "prefix_cache_hits_tokens": "prefix_cache_hits",
        "preemptions": "num_preemptions",
        "nan_requests": "corrupted_requests",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "requests_finished": "request_success",
        "request_prompt_tokens": "request_prompt_tokens",
        "request_generation_tokens": "request_generation_tokens",
        "request_computed_prompt_tokens": "request_prefill_kv_computed_tokens",
        "request_params_n": "request_params_n",
        "request_params_max_tokens": "request_params_max_tokens",
        "iteration_tokens": "iteration_tokens_total",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
        "request_duration_seconds": "e2e_request_latency_seconds",
        "request_queue_seconds": "request_queue_time_seconds",
        "request_prefill_seconds": "request_prefill_time_seconds",
        "request_decode_seconds": "request_decode_time_seconds",
        "request_inference_seconds": "request_inference_time_seconds",
        "cache_config_info": "cache_config_info",
    }
)
"""Of each family here, behind `pagefleet_engine_`, the one there, behind `vllm:`."""
_LABELS = {"finish_reason": "finished_reason", "num_blocks": "num_gpu_blocks", "kv_cache_dtype": "cache_dtype"}
_ENGINE = ("engine", "0")
"""vLLM numbers the engines of one server; here a server has one."""


class VllmNames(Collector):
    """Families of a registry under vLLM's names.

    Args:
        own: returns the families as they are called here.
    """

    def __init__(self, own: Callable[[], Iterable[Metric]]) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        """Return those that vLLM has too."""
        for family in self._own():
            name = VLLM_NAMES.get(family.name.removeprefix(_OWN))
            if name is not None:
                yield _renamed(family, f"vllm:{name}")


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()} | dict([_ENGINE])
        if name == "vllm:cache_config_info":  # it has no model there
            del labels["model_name"]
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(name + suffix, labels, sample.value, sample.timestamp, sample.exemplar))
    return renamed
