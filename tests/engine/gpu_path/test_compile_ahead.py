"""Before anything is computed the forward pass's kernels are compiled, in every form that loading comes to need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM
from pagefleet_engine.worker import rehearsal

from tests.engine.gpu_path.conftest import LIMITS
from tests.fakes.cuda.device import fake_gpu
from tests.fakes.cuda.kernels import Form

FORWARD = "pagefleet_engine.models.decoder.DecoderModel.forward"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"quantization": "fp8", "cuda_graphs": "full_decode_only"}),
        ("gemma3_text", {"cascade_attention": True}),
    ],
    ids=["llama in fp8", "gemma3 with shared prefixes"],
)
def test_all_that_a_forward_pass_launches_is_compiled_ahead(
    family: str, settings: dict[str, Any], make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: set[Form] = set()
    with fake_gpu() as gpu:

        @contextmanager
        def side_by_side(num_threads: int) -> Iterator[bool]:
            yield True
            ahead.update(gpu.launches.forms)

        monkeypatch.setattr(rehearsal, "compile_side_by_side", side_by_side)
        LLM(str(make_checkpoint(family, dtype="bfloat16")), device="cuda", **(LIMITS | settings)).shutdown()
        needed = {form for form, callers in gpu.launches.forms.items() if FORWARD in callers}
    assert any(form.kernel == "paged_attention_kernel" for form in ahead)
    assert [form.difference(ahead) for form in needed - ahead] == []
