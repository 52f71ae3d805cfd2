"""Every kernel compiles for real GPUs, within their shared memory; no GPU is needed for that, only Linux and Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

KERNELS = {
    "_activation_kernel",
    "_few_rows_kernel",
    "_bad_words_kernel",
    "_block_maxima_kernel",
    "_coded_matmul_kernel",
    "_collect_kernel",
    "_combine_kernel",
    "_count_kernel",
    "_draw_kernel",
    "_flag_nonfinite_kernel",
    "_grouped_coded_kernel",
    "_grouped_kernel",
    "_grouped_mxfp4_kernel",
    "_grouped_packed_kernel",
    "_latent_attention_kernel",
    "_join_blocks_kernel",
    "_listed_kernel",
    "_mask_kernel",
    "_merge_rounded_kernel",
    "_measure_kernel",
    "_one_row_kernel",
    "_order_inputs_kernel",
    "_packed_matmul_kernel",
    "_penalties_kernel",
    "_place_kernel",
    "_prepare_heads_kernel",
    "_prepare_latents_kernel",
    "_prepare_step_kernel",
    "_quantize_kernel",
    "_quantize_with_zeros_kernel",
    "_norm_kernel",
    "_scaled_matmul_kernel",
    "_scatter_writes_kernel",
    "_scrub_slots_kernel",
    "_sum_ranks_kernel",
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


# sm_90: Hopper's own table; sm_80: the default one, which must fit its smallest relatives.
SHARED_KIB = {90: 227, 80: 99}
LARGE = (
    *(f"groups:{head_dim}" for head_dim in (64, 80, 96, 128, 192, 256)),
    *(
        "attention:80:float16",
        "attention:80:bfloat16",
        "attention:128:float32",
        "attention:128:bfloat16",
        "attention:256:bfloat16",
    ),
    *("latents", "products", "experts", "others"),
)
FEW_BYTES, FEW_REGISTERS = 64, 168
"""Of a thread: with no more registers than that the assembler keeps the device fuller by putting down a few values.
Three programs of four warps have room beside each other with 168."""
MULTIPLY = {
    "_coded_matmul_kernel",
    "_grouped_coded_kernel",
    "_grouped_kernel",
    "_grouped_mxfp4_kernel",
    "_grouped_packed_kernel",
    "_latent_attention_kernel",
    "_packed_matmul_kernel",
    "paged_attention_kernel",
    "_scaled_matmul_kernel",
}

Report = Mapping[str, Any]


def compiled(capability: int, sets: Sequence[str], cache: Path) -> list[Report]:
    """What compiling the sets gave, kernel by kernel."""
    script = str(Path(__file__).with_name("compile_kernels.py"))
    done = subprocess.run(
        [sys.executable, "-c", START, script, str(capability), *sets],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: Sequence[Report], capability: int) -> None:
    """Nothing is spilled, everything fits, and what multiplies does it on tensor cores, in Hopper's wide instructions
    where tiles are as tall as those; float32 stays exact."""
    for report in reports:
        assert report["shared_bytes"] <= SHARED_KIB[capability] * 1024, report
        assert report["spilled_bytes"] <= (FEW_BYTES if report["registers"] <= FEW_REGISTERS else 0), report
        if report["kernel"] in MULTIPLY:
            wide = capability == 90 and report["form"]["BLOCK_M"] >= 64
            expected = "" if "*fp32" in report["operands"] else "wgmma" if wide else "mma"
            assert report["tensor_cores"] == expected, report


@pytest.mark.timeout(1800)  # half a minute of computing: a busy machine takes its time
def test_kernels_compile_into_registers_and_shared_memory(tmp_path: Path) -> None:
    sets = ["attention:128:bfloat16", "latents", "products", "experts", "others"]
    reports = compiled(90, ["--first", *sets], tmp_path)
    assert {report["kernel"] for report in reports} == KERNELS
    check(reports, 90)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("name", LARGE)
def test_every_form_compiles_into_registers_and_shared_memory(capability: int, name: str, tmp_path: Path) -> None:
    reports = compiled(capability, [name], tmp_path)
    assert len(reports) > 6
    check(reports, capability)
