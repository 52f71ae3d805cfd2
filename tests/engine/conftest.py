"""Checkpoints and surroundings that the engine's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.slow_requests import PLUGIN


@pytest.fixture
def same_threads_after() -> Iterator[None]:
    """A worker that a test makes sets how many threads torch computes with."""
    import torch  # tests of the core load in milliseconds

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(same_threads_after: None) -> None:
    """Ranks of a test share the machine."""
    import torch  # as above

    torch.set_num_threads(1)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and those that it starts find the logits processors of `plugin`."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_checkpoint("qwen3", dtype="bfloat16", shard_size="50KB", **config)`: made once, read only."""
    made: dict[str, Path] = {}

    def make(arch_name: str, *, dtype: str = "float32", shard_size: str = "1GB", **overrides: Any) -> Path:
        key = json.dumps([arch_name, dtype, shard_size, overrides], sort_keys=True)
        if key not in made:
            from tests.fakes.checkpoints import save_checkpoint  # transformers; tests of the core load in milliseconds

            folder = tmp_path_factory.mktemp(arch_name)
            save_checkpoint(folder, arch_name, dtype, shard_size, overrides)
            made[key] = folder
        return made[key]

    return make
