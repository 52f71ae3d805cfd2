"""`--compile`: the same results, compiled once for all layers and all steps, kept on disk, clear where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.quantization_scheme import Quantization
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.model import Model
from pagefleet_engine.worker import runner_factory
from pagefleet_engine.worker.compile import compile_model, fingerprint
from pagefleet_engine.worker.recorded_forward import RecordedForward
from torch import Tensor

from tests.fakes.architectures import llama_arch
from tests.fakes.dense_attention import DenseSequence, DenseStep
from tests.fakes.graph_steps import small_model
from tests.fakes.native_kernels import native_libraries
from tests.fakes.small_model import write_small_model

CPU = torch.device("cpu")
MAX_TOKENS = 40

# torch warns about parts of itself when the compiler is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counters() -> Any:
    import torch._dynamo.utils

    return torch._dynamo.utils.counters


def compiled_code() -> int:
    """Graphs that torch compiled in this process."""
    return int(counters()["stats"]["unique_graphs"])


def make(family: str, **changes: Any) -> Model:
    return small_model(family, traceable=True, **changes)


def hidden(model: Model, num_tokens: int) -> Tensor:
    """Of one sequence that is new, and one that has context."""
    ids = torch.arange(num_tokens) % 7
    known = DenseSequence()
    model.forward(torch.arange(5), torch.arange(5), DenseStep([(known, 5)]))
    split = num_tokens // 2
    positions = torch.cat((torch.arange(split), torch.arange(5, 5 + num_tokens - split)))
    rows = [(DenseSequence(), split), (known, num_tokens - split)]
    return model.forward(ids, positions, DenseStep([row for row in rows if row[1]]))


# Their norms stand elsewhere than Llama's, whose layers the whole engine compiles below.
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "head_dim": 16,
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("family", ["olmo2", pytest.param("gemma3_text", marks=pytest.mark.nightly)])
@torch.inference_mode()
def test_results_are_the_same_and_nothing_is_compiled_while_serving(family: str, tmp_path: Path) -> None:
    sizes = [1, 2, 3, 8, 13, 16, 17, MAX_TOKENS]
    plain = make(family, **FAMILIES[family])
    expected = {size: hidden(plain, size) for size in sizes}
    model = compile_model(plain, tmp_path, torch.float32, CPU)
    start = compiled_code()
    model.warm_up(MAX_TOKENS)
    before = compiled_code()
    assert 0 < before - start <= 6  # what lies before and after attention; with a fixed size, a free one, and 1
    layers: Any = model._model
    for size in sizes:
        torch.testing.assert_close(hidden(model, size), expected[size], atol=2e-5, rtol=2e-5)
        with torch.compiler.set_stance("fail_on_recompile"):  # as it is, a step that needs more is run uncompiled
            hidden(layers, size)
    assert compiled_code() == before


@pytest.mark.usefixtures("_fresh_compiler")
@torch.inference_mode()
def test_a_second_start_finds_what_the_first_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_by_torch, folder = tmp_path / "torch", tmp_path / "ours"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(chosen_by_torch))  # torch itself sets it when it is imported
    hits = []
    for _ in range(2):
        import torch._dynamo

        torch._dynamo.reset()
        counters().clear()
        model = compile_model(make("llama"), folder, torch.float32, CPU)
        model.warm_up(MAX_TOKENS)
        hits.append((counters()["inductor"]["fxgraph_cache_miss"], counters()["inductor"]["fxgraph_cache_hit"]))
    assert hits[0][0] > 0
    assert hits[1] == (0, hits[0][0] + hits[0][1])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(chosen_by_torch)
    assert not any(path.is_file() for path in chosen_by_torch.rglob("*"))
    folders = list(folder.iterdir())
    assert [folder.name for folder in folders] == [fingerprint(model.arch, torch.float32, CPU)]
    assert folders[0].stat().st_mode & 0o077 == 0, "others must not put code there"


@pytest.mark.usefixtures("_fresh_compiler")
def test_an_engine_that_compiles_answers_as_one_that_does_not(tmp_path: Path) -> None:
    """And records no steps: what torch.compile fuses cannot be noted."""
    folder = write_small_model(tmp_path / "model")
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64, "num_threads": 1}
    prompts: list[Any] = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 9, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for compiles in (False, True):
        start = compiled_code()
        with (
            mock.patch.object(runner_factory, "RecordedForward", wraps=RecordedForward) as recorded,
            LLM(
                model=str(folder), skip_tokenizer_init=True, compile=compiles, cache_dir=str(tmp_path), **settings
            ) as llm,
        ):
            ready = compiled_code()
            results = llm.generate(prompts, params, use_tqdm=False)
        assert recorded.called == (not compiles and bool(native_libraries()))
        answers.append([result.outputs[0].token_ids for result in results])
        assert (ready > start) == compiles
        assert compiled_code() == ready
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("_fresh_compiler")
@torch.inference_mode()
def test_a_step_that_was_not_foreseen_runs_uncompiled(tmp_path: Path) -> None:
    plain = make("llama")
    expected = hidden(plain, 9)
    model = compile_model(plain, tmp_path, torch.float32, CPU)
    model.warm_up(1)
    before = compiled_code()
    torch.testing.assert_close(hidden(model, 9), expected, atol=2e-5, rtol=2e-5)
    assert compiled_code() == before


@pytest.mark.usefixtures("_fresh_compiler")
@torch.inference_mode()
def test_without_a_compiler_the_message_says_what_to_do(tmp_path: Path) -> None:
    import torch._inductor.config

    model = compile_model(make("llama"), tmp_path, torch.float32, CPU)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"install a C\+\+ compiler \(g\+\+\), or leave --compile out"),
    ):
        model.warm_up(4)


@torch.inference_mode()
def test_before_and_beside_the_warm_up_nothing_is_compiled(tmp_path: Path) -> None:
    plain = make("llama")
    expected = hidden(plain, 3)
    before = compiled_code()
    model = compile_model(plain, tmp_path, torch.float32, CPU)
    torch.testing.assert_close(hidden(model, 3), expected)
    assert compiled_code() == before
    assert [name for name, _ in model.weights()] == [name for name, _ in plain.weights()]
    logits = model.logits(expected)
    assert torch.equal(logits, plain.logits(expected))


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    model: Any = make("llama")
    model.arch = replace(model.arch, quantization=Quantization(rules=()))
    with pytest.raises(ConfigError, match=r"quantized.*leave --compile out"):
        compile_model(model, tmp_path, torch.float32, CPU)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*give another --cache-dir"):
        compile_model(make("llama"), tmp_path / "file", torch.float32, CPU)


def test_compiled_code_is_another_for_another_shape_or_type() -> None:
    arch = llama_arch()
    names = {
        fingerprint(arch, torch.float32, CPU),
        fingerprint(arch, torch.bfloat16, CPU),
        fingerprint(llama_arch(hidden_size=128), torch.float32, CPU),
    }
    assert len(names) == 3
    assert fingerprint(llama_arch(), torch.float32, CPU) in names


def test_layers_of_another_frame_are_refused(tmp_path: Path) -> None:
    model = make("gemma3n_text", sliding_window=8, num_kv_shared_layers=0)
    with pytest.raises(ConfigError, match=r"the layers of gemma3n_text are not traced .* leave --compile out"):
        compile_model(model, tmp_path, torch.float32, CPU)


def test_a_traceable_layer_is_made_of_plain_matrices() -> None:
    from pagefleet_engine.layers.linear import Linear
    from pagefleet_engine.layers.linear_kernel import PlainLinear

    layer = Linear(8, (4,), False, Placement(torch.float32, CPU, use_kernels=False, traceable=True))
    ((_, slot),) = layer.weights()
    slot.fill(0, torch.ones(4, 8))
    assert isinstance(layer._kernel, PlainLinear)
