"""What a step takes of a GPU's memory besides weights and pages, measured before the KV cache gets the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.model_runner import RunnerLimits
from pagefleet_engine.worker.out_of_memory import naming_the_remedy
from pagefleet_engine.worker.rehearsal import HUNGRIEST, blocks_needed, fullest_step, rehearse
from pagefleet_engine.worker.runner_factory import RunnerFactory
from pagefleet_engine.worker.step_inputs import StepInputBuilder


def estimate_graph_bytes(forward: GraphForward, inputs: StepInputBuilder) -> int:
    """Bytes of the device that `forward.capture(inputs)` will take.

    The largest graph of each mode and the one after it are captured and let go. All graphs share one pool, which the
    first fills: each of the others takes about what the second does, mostly the driver's own memory for its nodes.
    The KV pool may be of any size: what a graph does with it needs no memory.

    Raises:
        ConfigError: as `GraphForward.capture`.
    """
    total = 0
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
        keys = [key for key in forward.keys if key[0] is mode]
        first = forward.capture(inputs, keys[:1]).memory
        second = forward.capture(inputs, keys[1:2]).memory
        total += max(first, 0) + max(second, 0) * max(len(keys) - 1, 0)
    forward.discard()
    return total


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of the device."""

    activations: int
    """The request table and the input buffers, and the most that one step holds at once."""
    graphs: int
    """All CUDA graphs together, estimated."""


def measure_step_memory(
    factory: RunnerFactory, limits: RunnerLimits, device: torch.device, times: StartupTimes
) -> StepMemory:
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
        with times.phase("kernels"):
            factory.compile_kernels(built, limits)
        rehearse(built.runner, row_lens, limits, HUNGRIEST)
        torch.cuda.synchronize(device)
        activations = torch.cuda.max_memory_allocated(device) - before - num_blocks * factory.bytes_per_block
    graphs = 0
    if built.graphs is not None:
        with torch.inference_mode():
            graphs = estimate_graph_bytes(built.graphs, built.state.inputs)
    del built
    torch.cuda.empty_cache()
    return StepMemory(activations, graphs)
