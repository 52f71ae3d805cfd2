"""Runs workloads through an engine in this process and times them as a whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.bench.roofline import ModelCost, Roofline, measure_roofline
from pagefleet_engine.bench.workloads import Workload
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.layers.quantization.packed_contents import packed_bytes
from pagefleet_engine.layers.quantization_scheme import CodedScheme, PackedScheme, QuantizationScheme
from pagefleet_engine.loader.load import resolve_dtype
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.parameters import count_parameters
from pagefleet_engine.worker.native import native_library

if TYPE_CHECKING:
    from pagefleet_engine.config import DType
    from pagefleet_engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and the least that its steps can take on this machine."""

    arch: ModelArch
    cost: ModelCost
    roofline: Roofline

    @classmethod
    def of(cls, model: str, options: dict[str, object]) -> Subject:
        """Measure the machine for a model folder; run it before the engine takes the memory."""
        device = torch.device("cuda" if torch.cuda.is_available() and options.get("device") != "cpu" else "cpu")
        overrides = options.get("hf_overrides")
        arch = read_arch(resolve_model_folder(model), str(overrides) if overrides else None)
        size = _size(arch, options, device)
        kv_bytes = size if options.get("kv_cache_dtype", "auto") == "auto" else 1.0
        weight_bytes, expert_bytes = _stored_bytes(arch, bool(options.get("quantization")), size)
        cost = ModelCost.of(arch, weight_bytes, kv_bytes, expert_bytes, size)
        return cls(arch, cost, measure_roofline(device))

    @property
    def parameters(self) -> dict[str, float]:
        """How many the model has, and a token uses, in billions."""
        count = count_parameters(self.arch)
        return {"total_billions": count.total / 1e9, "active_billions": count.active / 1e9}


def _size(arch: ModelArch, options: dict[str, object], device: torch.device) -> float:
    """Bytes of a number in the type that a worker would compute in."""
    native = native_library(device, enabled=options.get("native_kernels") is not False)
    compiled = native is not None and arch.latent is None and not options.get("compile")
    asked = cast("DType", options.get("dtype", "auto"))
    return float(resolve_dtype(asked, arch.dtype, device, compiled_kernels=compiled).itemsize)


def _stored_bytes(arch: ModelArch, on_load: bool, size: float) -> tuple[float, float]:
    """Of a matrix's element, and of one of an expert's, as kernels read them; `size`: of one in the model's type."""
    schemes = [] if arch.quantization is None else [rule.scheme for rule in arch.quantization.rules]
    packed = [scheme for scheme in schemes if isinstance(scheme, PackedScheme)]
    if packed:  # the last rule is of most layers
        one = packed_bytes(packed[-1])
        return one, one
    if any(isinstance(scheme, CodedScheme) for scheme in schemes):
        return 9 / 16, 9 / 16  # with a scale of 8 bits for 16
    if any(isinstance(scheme, QuantizationScheme) and scheme.number == "mxfp4" for scheme in schemes):
        return size, 17 / 32  # with a scale for 32
    one = 1.0 if on_load or schemes else size
    return one, one


def run_once(llm: LLM, workload: Workload, output_lens: Sequence[int] | None = None) -> float:
    """Seconds to complete the workload, greedily and to the full lengths."""
    lens = workload.output_lens if output_lens is None else output_lens
    sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lens]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    found = [len(output.outputs[0].token_ids) for output in outputs]
    assert found == list(lens), f"asked for {lens} tokens, got {found}"
    return seconds
