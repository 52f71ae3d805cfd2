"""Which part did not fit, and the flag that helps."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.out_of_memory import Stage, naming_the_remedy


@pytest.mark.parametrize(
    ("stage", "when", "flag"),
    [
        ("weights", "while weights were loaded", "--quantization fp8"),
        ("profile", "while the largest step was measured", "--max-num-batched-tokens"),
        ("graphs", "while CUDA graphs were captured", "--cuda-graph-sizes"),
        ("kv_pool", "while the KV cache was allocated", "--gpu-memory-utilization"),
        ("warm_up", "in the first step", "--max-num-batched-tokens"),
    ],
)
def test_each_stage_names_itself_and_its_flag(stage: Stage, when: str, flag: str) -> None:
    with pytest.raises(ConfigError) as error, naming_the_remedy(stage):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    said = str(error.value)
    assert said.startswith(f"the device ran out of memory {when}: ")
    assert flag in said
    assert "\n" not in said


def test_a_full_host_names_the_flag_too() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"), naming_the_remedy("kv_pool"):
        raise MemoryError("Unable to allocate 405. GiB")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="of another kind"), naming_the_remedy("weights"):
        raise RuntimeError("of another kind")
