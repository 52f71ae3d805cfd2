"""Which implementation runs: the Triton kernel or its torch twin. Decided by the caller or by the tensors' device."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from pagefleet_kernels import _triton
from pagefleet_kernels.errors import BackendUnavailableError

Backend = Literal["triton", "torch"]


def choose_backend(device: torch.device, backend: Backend | None = None) -> Backend:
    """Name the implementation for tensors on `device`.

    None asks for the default: Triton on CUDA (and ROCm) where Triton is installed, the twin everywhere else.
    Raises BackendUnavailableError if "triton" is asked for where it cannot run.
    """
    if backend is None:
        return "triton" if device.type == "cuda" and _triton.IMPORTED else "torch"
    if backend == "torch":
        return backend
    if backend != "triton":
        raise BackendUnavailableError(f"there is no kernel backend {backend!r}: choose 'triton' or 'torch'")
    if not _triton.IMPORTED:
        raise BackendUnavailableError(
            "the Triton kernels cannot run here: they need the `triton` package and either a GPU build of torch "
            "or TRITON_INTERPRET=1 set before Python starts; use backend='torch'"
        )
    if device.type != "cuda" and not _triton.INTERPRETED:
        raise BackendUnavailableError(
            f"the Triton kernels cannot run on device '{device.type}': use backend='torch', or set TRITON_INTERPRET=1 "
            "before Python starts to run them in Triton's interpreter"
        )
    return backend


@cache
def architecture(device: torch.device) -> str:
    """Key of `device` in the launch tables: "sm_90" and the like, "interpreter" where there is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
