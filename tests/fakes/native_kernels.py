"""The compiled kernels of the CPU, for tests that do without them where there was no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from pagefleet_engine.attention.native_backend import NativeBackend
from pagefleet_engine.core.kv_groups import KVGroups
from pagefleet_engine.models import sparse_mlp
from pagefleet_kernels.errors import BackendUnavailableError
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.native.library import Library, load_library


def native_libraries() -> list[Library]:
    """One for each instruction set that this processor has; none where they were not compiled."""
    try:
        return load_library()
    except BackendUnavailableError:
        return []


def native_library() -> Library:
    """The best one; skips the test where there is none."""
    libraries = native_libraries()
    if not libraries:
        pytest.skip("the kernels of the CPU were not compiled")
    return libraries[0]


def native_backend(pool: torch.Tensor, layout: KVLayout, groups: KVGroups) -> NativeBackend:
    """Skips as `native_library` does."""
    return NativeBackend(pool, layout, groups, native_library())


@contextmanager
def experts_one_by_one() -> Iterator[None]:
    """Models that are loaded meanwhile have no compiled layers of experts: each expert is products of its own."""
    with mock.patch.object(sparse_mlp, "native_experts", return_value=None) as made:
        yield
        assert made.called
