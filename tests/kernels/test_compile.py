"""Every kernel compiles for real GPUs, within their shared memory; no GPU is needed for that, only Linux and Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

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
SHARED_KIB = {90: 227, 80: 99}
HEADS = [
    pytest.param(90, ("128:bfloat16",), id="sm_90"),
    pytest.param(90, ("256:bfloat16",), marks=pytest.mark.nightly, id="sm_90 wide heads"),
    pytest.param(80, ("80:float16", "256:bfloat16", "128:float32"), marks=pytest.mark.nightly, id="sm_80"),
]


@pytest.mark.timeout(1800)  # half a minute of computing for each head: a busy machine takes its time
@pytest.mark.parametrize(("capability", "heads"), HEADS)
def test_kernels_compile_within_shared_memory(capability: int, heads: tuple[str, ...], tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("compile_kernels.py"))
    done = subprocess.run(
        [sys.executable, "-c", START, script, str(capability), *heads],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["shared_bytes"] <= SHARED_KIB[capability] * 1024, report
    attention = [report for report in reports if report["kernel"] == "paged_attention_kernel"]
    for name in heads:
        head_dim = int(name.split(":")[0])
        assert {report["tensor_cores"] for report in attention if report["head_dim"] == head_dim} == {
            "float32" not in name
        }
