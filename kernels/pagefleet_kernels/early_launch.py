"""Kernels that start while the one before them still ends, and wait for it where they first read what it wrote.

NVIDIA's programmatic dependent launch, from sm_90 on: it hides the start of a kernel, and whatever of its loads do not
depend on the one before. A kernel that is launched so calls `wait_for_inputs` in every program, before it reads what
another kernel wrote and before it writes: then each waits for all before it.
"""

from __future__ import annotations

from typing import Any

import torch

from pagefleet_kernels._triton import INTERPRETED, jit, tl
from pagefleet_kernels.dispatch import architecture

_FIRST_CAPABILITY = 90


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a launch on `device`, with the constant EARLY for `wait_for_inputs`."""
    capability = architecture(device).removeprefix("sm_")
    is_nvidia = torch.version.hip is None and not INTERPRETED
    is_early = is_nvidia and capability.isdecimal() and int(capability) >= _FIRST_CAPABILITY
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


@jit()
def wait_for_inputs(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, then wait until all before this one have ended and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
