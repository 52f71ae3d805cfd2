"""How much of a forward pass runs as CUDA graphs."""

from __future__ import annotations

from enum import Enum

from pagefleet_engine.errors import ConfigError


class GraphMode(Enum):
    """What the configuration asks for. What a single step runs as is one of NONE, PIECEWISE and FULL.

    A full graph holds the whole forward pass. Piecewise graphs hold what lies between two attentions; attention itself
    runs outside, so that its launch may follow the batch.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @property
    def for_decode(self) -> GraphMode:
        """How a step runs in which every row has one token."""
        if self in (GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE):
            return GraphMode.FULL
        return self

    @property
    def for_mixed(self) -> GraphMode:
        """How any other step runs."""
        match self:
            case GraphMode.FULL_DECODE_ONLY:
                return GraphMode.NONE
            case GraphMode.FULL_AND_PIECEWISE:
                return GraphMode.PIECEWISE
            case _:
                return self


def resolve_graph_mode(setting: str, device_type: str) -> GraphMode:
    """The mode that a setting of `cuda_graphs` means on a device ("cuda", "cpu").

    Raises:
        ConfigError: no such mode, or a mode with graphs on a device that has none.
    """
    has_graphs = device_type == "cuda"
    if setting == "auto":
        return GraphMode.FULL_AND_PIECEWISE if has_graphs else GraphMode.NONE
    try:
        mode = GraphMode(setting)
    except ValueError:
        known = ", ".join(["auto", *(mode.value for mode in GraphMode)])
        raise ConfigError(f"cuda_graphs is {setting!r}: give one of {known}") from None
    if mode is not GraphMode.NONE and not has_graphs:
        raise ConfigError(f"cuda_graphs is {setting}, and the device is {device_type}: leave --cuda-graphs out")
    return mode
