"""The fields of the configuration dataclasses as flags, YAML keys, environment variables and keywords.

There is one list of settings, the dataclasses in `config`; their docstrings are the help texts.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError

from pagefleet_engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from pagefleet_engine.errors import ConfigError

ENGINE_GROUPS = (ModelConfig, CacheConfig, SchedulerConfig, ExecutionConfig, KVTransferConfig)
ALL_GROUPS = (*ENGINE_GROUPS, ServerConfig)

_SIZED = frozenset(
    {
        "kv_cache_memory",
        "max_body_bytes",
        "kv_buffer_size",
        "kv_overflow_size",
        "kv_offload_memory",
        "kv_offload_disk",
    }
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SPELLINGS = {
    "dtype": {
        "half": "float16",
        "float": "float32",
        **{f"torch.{name}": name for name in ("float16", "bfloat16", "float32")},
    }
}
"""Other spellings of vLLM and torch for a setting's choices."""
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One field of one group."""

    name: str
    group: type
    kind: type
    """bool, int, float or str."""
    choices: tuple[str, ...]
    optional: bool
    default: Any
    """`dataclasses.MISSING` for the one that must be given."""
    help: str

    def parse(self, value: object) -> Any:
        """Return a value for the field from text, or from what YAML makes of it.

        Raises:
            ConfigError: it is of another type.
        """
        if value is None or (self.optional and isinstance(value, str) and value.lower() in {"none", "null"}):
            if self.optional:
                return None
            raise ConfigError(f"{self.name} has no value: give {self._wanted()}")
        text = str(value).strip()
        text = _SPELLINGS.get(self.name, {}).get(text, text)
        parsed = self._of_text(text)
        if parsed is None or isinstance(value, bool) != (self.kind is bool and isinstance(value, bool)):
            raise ConfigError(f"{self.name} is {text[:80]!r}: give {self._wanted()}")
        return parsed

    def _of_text(self, text: str) -> Any:
        if self.choices:
            return text if text in self.choices else None
        if self.kind is bool:
            return text.lower() in _TRUE if text.lower() in _TRUE | _FALSE else None
        if self.name in _SIZED:
            match = _SIZE.fullmatch(text)
            return int(float(match[1]) * _FACTORS[match[2].upper()]) if match else None
        if self.kind is str:
            return text
        try:
            return self.kind(text)
        except ValueError:
            return None

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.name in _SIZED:
            return "bytes, or a size such as 512M or 4G"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by name, in the order of the dataclasses. Names are unique over the groups."""
    found: dict[str, Setting] = {}
    docs = _docstrings()
    for group in ALL_GROUPS:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            kind, choices, optional = _read_type(hints[field.name])
            text = docs[group.__name__, field.name]
            found[field.name] = Setting(field.name, group, kind, choices, optional, field.default, text)
    return found


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build an EngineConfig from a flat mapping of its fields.

    Raises:
        ConfigError: a value is of the wrong type or out of its range.
        KeyError: a name is no setting of the engine.
    """
    parts: dict[type, dict[str, Any]] = {group: {} for group in ENGINE_GROUPS}
    for name, value in values.items():
        setting = settings()[name]
        parts[setting.group][name] = setting.parse(value)
    if "model" not in values:
        raise ConfigError("no model is given: name a folder in Hugging Face layout, or builtin://tiny")
    _fit_sizes(parts[SchedulerConfig])
    try:
        kv_transfer = KVTransferConfig(**parts[KVTransferConfig])
    except KVConfigError as error:
        raise ConfigError(str(error)) from error
    return EngineConfig(
        model=ModelConfig(**parts[ModelConfig]),
        cache=CacheConfig(**parts[CacheConfig]),
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        execution=ExecutionConfig(**parts[ExecutionConfig]),
        kv_transfer=kv_transfer,
    )


def _fit_sizes(scheduler: dict[str, Any]) -> None:
    """Where only one of seats and tokens per step is given, let the other's default give way to it."""
    seats, tokens = scheduler.get("max_num_seqs"), scheduler.get("max_num_batched_tokens")
    default = SchedulerConfig()
    if seats is None and tokens is not None and tokens > 0:
        scheduler["max_num_seqs"] = min(default.max_num_seqs, tokens)
    elif tokens is None and seats is not None:
        scheduler["max_num_batched_tokens"] = max(default.max_num_batched_tokens, seats)


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """Build a ServerConfig from a flat mapping of its fields.

    Raises:
        ConfigError: a value is of the wrong type or out of its range.
    """
    return ServerConfig(**{name: settings()[name].parse(value) for name, value in values.items()})


def close_matches(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean a or b?` for a name that is nearly one of `known`, else nothing."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _read_type(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """Take a field's type apart: its plain type, its choices, whether it may be None."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        optional, hint = True, inner[0]
    if typing.get_origin(hint) is Literal:
        return str, tuple(typing.get_args(hint)), optional
    return hint, (), optional


@functools.cache
def _docstrings() -> Mapping[tuple[str, str], str]:
    """Return the text under each field of a group, which Python does not keep: read from the source."""
    found = {}
    for group in ALL_GROUPS:
        node = ast.parse(inspect.getsource(group)).body[0]
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[node.name, field.target.id] = " ".join(str(text.value.value).split())
    return found
