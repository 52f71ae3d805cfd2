"""Sums through memory that GPUs share, eagerly and in graphs: of two processes on one GPU, or on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PATIENCE_S = 50
SCRIPT = Path(__file__).with_name("peer_ranks.py")


def run_ranks(folder: Path, devices: Sequence[int]) -> list[dict[str, float]]:
    """What a process for each rank told."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(index), str(len(devices)), str(device)],
            env=os.environ | {"TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, device in enumerate(devices)
    ]
    try:
        told = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(devices), told
        return [json.loads(one) for one in told]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(120)
def test_two_processes_on_one_gpu_add_up(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, [0, 0])
    assert [one["reached"] for one in told] == [True, True]
    assert told[0]["waited_s"] >= 1


@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_add_up_or_say_that_they_do_not_reach_each_other(tmp_path: Path) -> None:
    told = run_ranks(tmp_path, [0, 1])
    assert told[0]["reached"] == told[1]["reached"]
    if torch.cuda.can_device_access_peer(0, 1):
        assert told[0]["reached"]
