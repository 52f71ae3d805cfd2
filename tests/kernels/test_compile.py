"""Every kernel compiles for real GPUs, within their shared memory; no GPU is needed for that, only Linux and Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

KERNELS = {
    "_bad_words_kernel",
    "_block_maxima_kernel",
    "_collect_kernel",
    "_draw_kernel",
    "_flag_nonfinite_kernel",
    "_gated_activation_kernel",
    "_join_blocks_kernel",
    "_listed_kernel",
    "_measure_kernel",
    "_penalties_kernel",
    "_prepare_heads_kernel",
    "_prepare_step_kernel",
    "_quantize_kernel",
    "_rms_norm_kernel",
    "_scaled_matmul_kernel",
    "_scatter_writes_kernel",
    "_scrub_slots_kernel",
    "_write_kv_kernel",
    "merge_parts_kernel",
    "paged_attention_kernel",
}


# a CPU build of torch keeps the kernels from importing Triton, so this one says that it is none
START = """
import runpy, sys, torch
torch.version.cuda = "13.0"
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Attention of these heads. sm_90: Hopper's own table; sm_80: the default one, which must fit its smallest relatives.
HEADS = {90: ("128:bfloat16", "256:bfloat16"), 80: ("80:float16", "256:bfloat16", "128:float32")}
SHARED_KIB = {90: 227, 80: 99}

Compiled = Mapping[int, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """What compiling for each capability said; they take a core each, at the same time."""
    script = str(Path(__file__).with_name("compile_kernels.py"))

    def run(capability: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", START, script, str(capability), *HEADS[capability]],
            env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor() as pool:
        yield {capability: pool.submit(run, capability) for capability in HEADS}


@pytest.mark.parametrize("capability", HEADS)
def test_kernels_compile_within_shared_memory(capability: int, compiled: Compiled) -> None:
    done = compiled[capability].result()
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["shared_bytes"] <= SHARED_KIB[capability] * 1024, report
    attention = [report for report in reports if report["kernel"] == "paged_attention_kernel"]
    for name in HEADS[capability]:
        head_dim = int(name.split(":")[0])
        assert {report["tensor_cores"] for report in attention if report["head_dim"] == head_dim} == {
            "float32" not in name
        }
