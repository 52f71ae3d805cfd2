"""What a step takes of a GPU's memory besides weights and pages, measured before the KV cache gets the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagefleet_engine.worker.graphs.estimate import estimate_graph_bytes
from pagefleet_engine.worker.model_runner import RunnerLimits
from pagefleet_engine.worker.out_of_memory import naming_the_remedy
from pagefleet_engine.worker.rehearsal import HUNGRIEST_SAMPLING, blocks_needed, fullest_step, rehearse
from pagefleet_engine.worker.runner_factory import RunnerFactory


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of the device."""

    activations: int
    """The request table and the input buffers, and the most that one step holds at once."""
    graphs: int
    """All CUDA graphs together, estimated."""


def measure_step_memory(factory: RunnerFactory, limits: RunnerLimits, device: torch.device) -> StepMemory:
    """Run the largest step and capture sample graphs with a pool that is just large enough, and let all go again.

    Raises:
        ConfigError: the device's memory does not suffice; names the flag to give.
    """
    row_lens = fullest_step(limits)
    with naming_the_remedy("profile"):
        num_blocks = blocks_needed(row_lens, limits)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        built = factory.make(limits, num_blocks)
        rehearse(built.runner, row_lens, limits, HUNGRIEST_SAMPLING)
        torch.cuda.synchronize(device)
        activations = torch.cuda.max_memory_allocated(device) - before - num_blocks * factory.bytes_per_block
    graphs = 0
    if built.graphs is not None:
        with torch.inference_mode():
            graphs = estimate_graph_bytes(built.graphs, built.state.inputs)
    del built
    torch.cuda.empty_cache()
    return StepMemory(activations, graphs)
