"""Time on a device: how long a call or a kernel takes, and the machine's own limits of copies and products.

What a kernel needs at least follows from its shapes: the larger of the two times is the floor that no engine gets under
(Williams, Waterman and Patterson, "Roofline", CACM 2009). A step's floor is the sum over its kernels, as they run one
after the other: products with weights on one side, attention on the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagefleet_engine.loader.load import resolve_dtype
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.parameters import count_parameters

_REPEATS = 5
_CALLS = 10
_PAUSE_CYCLES = 20_000_000  # some ten milliseconds, in which the host queues the calls


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one device."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    matmul_flops_per_s: float
    """Of torch: in bfloat16, on a processor without it in float32."""

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The floor of a kernel that moves so many bytes and does so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's step cannot avoid."""

    weight_bytes: float
    """Read in every step: all matrices but those of experts, and the head, not the embedding's rows."""
    kv_bytes_per_token: float
    flops_per_token: float
    """Of the layers' matrices; attention comes on top."""
    head_flops: float
    """Of each row whose logits are wanted."""
    attention_flops_per_pair: float
    """Per query and key of a prompt, over all layers."""
    decode_flops_per_pair: float
    """The same where each request computes one token: over latents, which keys and values are not made from then."""
    expert_bytes: float = 0.0
    """Of all experts that tokens choose from."""
    expert_share: float = 0.0
    """What a token uses of them."""

    @classmethod
    def of(
        cls,
        arch: ModelArch,
        weight_bytes_per_element: float = 2.0,
        kv_bytes_per_element: float = 2.0,
        expert_bytes_per_element: float | None = None,
        head_bytes_per_element: float = 2.0,
    ) -> ModelCost:
        """From the model's shape; layers with a window count as if they had none. Experts' elements take what others do
        unless told otherwise."""
        count, pair, latent = count_parameters(arch), 2.0 * arch.num_layers * arch.num_heads, arch.latent
        compared = arch.head_dim + arch.value_dim if latent is None else latent.spec.dim + latent.rank
        head = count.embedding
        return cls(
            weight_bytes=count.layers * weight_bytes_per_element + head * head_bytes_per_element,
            expert_bytes=count.experts * (expert_bytes_per_element or weight_bytes_per_element),
            expert_share=count.used_experts / count.experts if count.experts else 0.0,
            kv_bytes_per_token=arch.num_layers * arch.kv.numbers * kv_bytes_per_element,
            flops_per_token=2.0 * (count.layers + count.used_experts),
            head_flops=2.0 * head,
            attention_flops_per_pair=pair * (arch.head_dim + arch.value_dim),
            decode_flops_per_pair=pair * compared,
        )

    def decode_seconds(self, roofline: Roofline, batch_size: int, context: float) -> float:
        """Floor of one step that gives each of `batch_size` requests a token, who choose experts as if by chance."""
        pairs = batch_size * context
        read = self.weight_bytes + self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** batch_size)
        products = roofline.seconds(read, batch_size * (self.flops_per_token + self.head_flops))
        return products + roofline.seconds(pairs * self.kv_bytes_per_token, pairs * self.decode_flops_per_pair)

    def batch_seconds(self, roofline: Roofline, input_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """Floor of an offline job: all prompts, then steps in which every request that is not done gets a token."""
        total = sum(self.prefill_seconds(roofline, length) for length in input_lens)
        for step in range(1, max(output_lens, default=0)):
            contexts = [n + step for n, wanted in zip(input_lens, output_lens, strict=True) if wanted > step]
            total += self.decode_seconds(roofline, len(contexts), sum(contexts) / len(contexts))
        return total

    def prefill_seconds(self, roofline: Roofline, num_tokens: int) -> float:
        """Floor of a prompt, by its operations: prompts of a step share the weights that it reads."""
        return (
            num_tokens
            * (self.flops_per_token + num_tokens / 2 * self.attention_flops_per_pair)
            / roofline.matmul_flops_per_s
        )


def measure_roofline(device: torch.device) -> Roofline:
    """Takes about a second, and gives the device its memory back."""
    roofline = Roofline(_copy_rate(device), _matmul_rate(device))
    if device.type == "cuda":  # torch keeps what is freed, and an engine would count it as taken
        torch.cuda.empty_cache()
    return roofline


def _copy_rate(device: torch.device) -> float:
    num_bytes = 2**30 if device.type == "cuda" else 2**28
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device) -> float:
    side = 8192 if device.type == "cuda" else 1536
    # In a type that a processor has no products for these take most of a minute.
    a, b = torch.randn(2, side, side, device=device).to(resolve_dtype("auto", "bfloat16", device))
    return 2 * side**3 / median_seconds(lambda: a @ b, device)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median time of a call after two to warm up; on a GPU by events, so that the launch does not count."""
    times = []
    for index in range(repeats + 2):
        seconds = event_seconds(run) if device.type == "cuda" else _wall_seconds(run)
        if index >= 2:
            times.append(seconds)
    return statistics.median(times)


def _wall_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def event_seconds(run: Callable[[], object]) -> float:
    """Seconds between two events around a call, on the current GPU; waits for the second."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def kernel_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call; one that waits for the device is charged for that."""
    if device.type != "cuda":
        return median_seconds(run, device)

    def calls() -> None:
        for _ in range(_CALLS):
            run()

    calls()
    times = []
    for _ in range(_REPEATS):
        torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        times.append(event_seconds(calls))
    return statistics.median(times) / _CALLS


def device_errors(device: torch.device) -> tuple[type[Exception], ...]:
    """What a kernel raises that this GPU cannot run; nothing on a CPU, where all of them run."""
    if device.type != "cuda":
        return ()
    from triton.errors import TritonError  # noqa: PLC0415 absent where there is no GPU

    return (RuntimeError, TritonError)
