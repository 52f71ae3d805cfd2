"""Whether a worker on a CPU computes with compiled kernels."""

from __future__ import annotations

import logging

import torch
from pagefleet_kernels.errors import BackendUnavailableError
from pagefleet_kernels.native.library import Library, load_library

_log = logging.getLogger(__name__)


def native_library(device: torch.device, *, enabled: bool) -> Library | None:
    """The kernels for the best instruction set of this processor; None: torch computes, and the log says why."""
    if device.type != "cpu":
        return None
    try:
        if not enabled:
            raise BackendUnavailableError("--no-native-kernels")
        library = load_library()[0]
    except BackendUnavailableError as error:
        _log.info("torch computes in the place of compiled kernels: %s", error)
        return None
    _log.info("compiled kernels: %s", library.instruction_set)
    return library
