"""The metadata of a GGUF file's architecture: a wrong value becomes one line that names file, field and remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Protocol

from pagefleet_protocol.model_config.fields import ModelConfigError
from pagefleet_protocol.model_config.gguf_types import GgufKind


class Tensor(Protocol):
    """See HeaderTensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GgufKind: ...


class GgufModel(Protocol):
    """What the headers of a model's files say; see GgufHeader."""

    @property
    def source(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class GgufFields:
    """The metadata of the model's architecture, checked."""

    def __init__(self, model: GgufModel) -> None:
        self.source = model.source
        self._values = model.metadata
        self.architecture = self._values.get("general.architecture")

    def _found(self, name: str) -> Any:
        return self._values.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._found(name)
        if isinstance(value, memoryview) and len(value) and len(set(value)) == 1:
            value = value[0]  # one for each layer
        value = default if value is None else value
        if type(value) is not int or not low <= value < 1 << 31:
            raise self.refusal(name, "is missing" if value is None else f"is {_shown(value)}")
        return value

    def has(self, name: str) -> bool:
        return self._found(name) is not None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._found(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise self.refusal(name, "is missing or no number")
        return float(value)

    def numbers(self, name: str, length: int) -> list[Any]:
        """An array of so many numbers or flags."""
        value = self._found(name)
        if not isinstance(value, memoryview) or len(value) != length:
            raise self.refusal(name, f"is no list of {length}")
        return value.tolist()

    def flag(self, name: str, default: bool) -> bool:
        value = self._found(name)
        return value if isinstance(value, bool) else default

    def text(self, name: str) -> str:
        return str(self._found(name) or "")

    def refusal(self, name: str, what: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {self.architecture}.{name} {what[:80]}: convert the model anew")


def _shown(value: Any) -> str:
    return reprlib.repr(value[:8].tolist() if isinstance(value, memoryview) else value)
