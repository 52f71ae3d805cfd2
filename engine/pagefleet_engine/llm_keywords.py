"""Keywords of `LLM`: the engine's settings by their names, and vLLM's, as vllm_options.toml has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_protocol.spelling import near_words

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.settings import ENGINE_SETTINGS, SERVE, vllm_options

_log = logging.getLogger(__name__)


def known_settings(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that keywords mean; those that change nothing here are logged and left out.

    Raises:
        TypeError: a keyword is unknown, or asks for what this engine does not do.
        ConfigError: a value is wrong.
    """
    values: dict[str, Any] = {}
    neutral: list[str] = []
    for name, value in keywords.items():
        if value is None and (name in ENGINE_SETTINGS or name in vllm_options()):  # vLLM's default of most of them
            continue
        if name == "logits_processors" and isinstance(value, list | tuple):
            _check_names(value)
        if name in ENGINE_SETTINGS:
            values |= _meaning(name, value, neutral)
        elif name in vllm_options() and name not in SERVE.settings:
            meant = _meaning(name, value, neutral)
            own = {found: one for found, one in meant.items() if found in ENGINE_SETTINGS}
            neutral += [name] if meant and not own else []  # it is about a server
            values |= own
        else:
            near = near_words(name, ENGINE_SETTINGS)
            raise TypeError(f"LLM() has no setting {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    if int(values.get("nnodes", 1)) > 1:
        raise ConfigError(
            "nnodes is for `pagefleet serve`, whose other nodes run --headless: here give "
            'distributed_executor_backend="ray", or ranks on this machine alone'
        )
    if values.get("data_parallel_multi_port_external_lb"):
        raise ConfigError(
            "data_parallel_multi_port_external_lb is for `pagefleet serve`: here data_parallel_size is enough"
        )
    if neutral:
        _log.info("LLM(): nothing changes by %s: ignored", ", ".join(neutral))
    return values


def _meaning(name: str, value: object, neutral: list[str]) -> Mapping[str, Any]:
    try:
        return SERVE.meaning(name, value, name, neutral)
    except ValueError as error:
        if name in ENGINE_SETTINGS:
            raise ConfigError(str(error)) from None
        raise TypeError(f"LLM(): {error}") from None


def _check_names(processors: Sequence[object]) -> None:
    if not all(isinstance(name, str) for name in processors):
        raise TypeError("LLM(logits_processors=...) takes names of installed plug-ins, not classes or functions")
