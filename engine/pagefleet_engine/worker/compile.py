"""torch.compile for what stands between the attentions of a decoder (`--compile`).

A layer is compiled with breaks where it meets the KV cache: one graph up to there, one after. Weights are inputs of
these graphs, so that all layers share them. All compilation happens in `warm_up`; a step that would need another is
computed without. Needs a model whose `Placement` is traceable; layers with quantized matrices cannot be traced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, Pages
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.embedding import LMHead
from pagefleet_engine.layers.norm import Residual
from pagefleet_engine.layers.rotary import Rotation
from pagefleet_engine.layers.weight import Weight
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.decoder_layer import DecoderLayer
from pagefleet_engine.models.model import Model
from pagefleet_engine.worker.profile_cache import device_facts

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_model(model: Model, folder: Path, dtype: torch.dtype, device: torch.device) -> CompiledModel:
    """Wrap the layers of a loaded model; `warm_up` then compiles them. What is compiled is kept under `folder`.

    Raises:
        ConfigError: the model cannot be compiled, or the folder not be made.
    """
    if model.arch.quantization is not None:
        raise ConfigError("the model's matrices are quantized, which torch.compile cannot trace: leave --compile out")
    if model.arch.latent is not None:
        raise ConfigError(
            "the model attends over latents, which torch.compile does not trace here: leave --compile out"
        )
    if model.arch.experts is not None:
        raise ConfigError(
            "the model's experts are chosen as it runs, which torch.compile cannot trace: leave --compile out"
        )
    if not isinstance(model, DecoderModel):
        raise ConfigError(
            f"the layers of {model.arch.model_type} are not traced for torch.compile here: leave --compile out"
        )
    own = folder / fingerprint(model.arch, dtype, device)
    try:
        # What torch keeps here is code that the next start runs: nobody else may write it.
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{own} cannot be made ({error.strerror}): give another --cache-dir") from error
    compiled: Any = torch.compile(_run_layer)
    model.replace_layers(lambda layer: CompiledLayer(layer, compiled))
    return CompiledModel(model, own)


def fingerprint(arch: ModelArch, dtype: torch.dtype, device: torch.device) -> str:
    """32 hex digits of all that compiled code depends on: the model's shape, its type, torch, and the device."""
    facts = {
        "arch": dataclasses.asdict(arch),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "device": device_facts(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class CompiledModel:
    """Implements `Model` around one whose layers are compiled."""

    def __init__(self, model: DecoderModel, folder: Path) -> None:
        self._model = model
        self._folder = folder

    @property
    def arch(self) -> ModelArch:
        """See Model."""
        return self._model.arch

    @property
    def divided_head(self) -> LMHead | None:
        """See Model."""
        return self._model.divided_head

    def excerpt(self) -> CompiledModel:
        """See Model."""
        return CompiledModel(self._model.excerpt(), self._folder)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See Model."""
        return self._model.weights()

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """See Model."""
        return self._model.logits(hidden_SD)

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """See Model. Compiles nothing: for whatever `warm_up` did not foresee, layers run as they are."""
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._model.forward(entering, positions_T, step)

    def warm_up(self, max_num_tokens: int) -> float:
        """Compile for steps of 1 to `max_num_tokens` tokens, or find it compiled; returns the seconds it took.

        Raises:
            ConfigError: there is no compiler, or the model cannot be compiled.
        """
        started = time.monotonic()
        device = next(self._model.weights())[1].device
        with _kept_in(self._folder), _whole_pieces(), _explained():
            for num_tokens in _sizes(max_num_tokens):
                positions_T = torch.arange(num_tokens, device=device)
                self._model.forward(torch.zeros_like(positions_T), positions_T, _NoAttention())
        return time.monotonic() - started


class CompiledLayer:
    """Implements `DecoderLayer` by compiled code that all layers share."""

    __slots__ = ("_compiled", "_layer")

    def __init__(self, layer: DecoderLayer, compiled: Any) -> None:
        self._layer = layer
        self._compiled = compiled

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See DecoderLayer."""
        return self._layer.weights()

    def __call__(self, stream: Residual, rotation: Rotation, step: AttentionStep) -> Residual:
        """See DecoderLayer."""
        return self._compiled(self._layer, stream[0], rotation, OpaqueStep(step)), None


class OpaqueStep:
    """Implements `AttentionStep`: tracing stops here, and sees the same class whatever attends."""

    __slots__ = ("_step",)

    def __init__(self, step: AttentionStep) -> None:
        self._step = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""
        self._step.write(spec, k_TKH, v_TKH)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep."""
        return self._step.pages(spec)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        return self._step.attend(spec, q_TNH)


class _NoAttention:
    """Implements `AttentionStep` for passes that only compile: nothing is kept, and every result is zero."""

    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        """See AttentionStep."""

    def pages(self, spec: AttentionSpec) -> Pages:
        """See AttentionStep."""
        raise AssertionError("a traceable model leaves writing to `write`")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """See AttentionStep."""
        return torch.zeros_like(q_TNH, memory_format=torch.contiguous_format)


def _run_layer(layer: DecoderLayer, hidden_TD: Tensor, rotation: Rotation, step: AttentionStep) -> Tensor:
    return layer((hidden_TD, None), rotation, step)[0]  # nothing is pending: matrices are plain


def _sizes(max_num_tokens: int) -> list[int]:
    """Steps whose compilation serves all: torch takes the first size as fixed, the second as free, and 1 as special.

    The second is odd, so that no code relies on a divisor.
    """
    second = min(13, max_num_tokens - 1)
    return list(dict.fromkeys(size for size in (max_num_tokens, second, 1) if size >= 1))


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Let torch look for compiled code in `folder`, and leave it there: its own choice is open to every user."""
    before = os.environ.get(_CACHE_VARIABLE)
    os.environ[_CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[_CACHE_VARIABLE]
        if before is not None:
            os.environ[_CACHE_VARIABLE] = before


@contextmanager
def _whole_pieces() -> Iterator[None]:
    """Break functions that call each other at the same place, rather than each call apart; start no processes."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415  # these take a second, which only --compile pays
    import torch._inductor.config as inductor  # noqa: PLC0415

    options: dict[str, Any] = {"nested_graph_breaks": True} if hasattr(dynamo, "nested_graph_breaks") else {}
    with dynamo.patch(options), inductor.patch(compile_threads=1):
        yield


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where compiling fails."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"torch.compile does not work here ({reason}): install a C++ compiler (g++), or leave --compile out"
        ) from error
