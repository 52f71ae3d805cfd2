"""What an engine is told, as an object and as flags of a script: vLLM's way to start `LLMEngine` and `AsyncLLM`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pagefleet_protocol.settings.program import add_flag

from pagefleet_engine.settings import ENGINE_SETTINGS, SERVE, vllm_options


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override] # the base has overloads for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, with flags in their one spelling."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(argument) for argument in given], namespace)


class EngineArgs:
    """Keywords of `LLM(...)`.

    Args:
        model: as `LLM` takes it.
        keywords: as `LLM` takes them; None is the default of each.

    Attributes:
        keywords: those that were given.
    """

    def __init__(self, model: str, **keywords: Any) -> None:
        given = {"model": model, **keywords}
        self.keywords: Mapping[str, Any] = {name: value for name, value in given.items() if value is not None}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each keyword; what is not given is None."""
        group = parser.add_argument_group("engine")
        for name, setting in ENGINE_SETTINGS.items():
            add_flag(group, setting, name)
        names = [name for name in vllm_options() if name in ENGINE_SETTINGS or name not in SERVE.settings]
        for name in names:
            option = vllm_options()[name]
            flags = [*([] if name in ENGINE_SETTINGS else [f"--{name.replace('_', '-')}"]), *option.flags]
            if not flags:
                continue
            if option.takes == "switch":
                group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
            else:
                several = "+" if option.takes == "words" else None
                group.add_argument(*flags, dest=name, nargs=several, help=argparse.SUPPRESS)
        parser.set_defaults(**dict.fromkeys([*ENGINE_SETTINGS, *names]))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take what flags of `add_cli_args` gave; other attributes are the script's own."""
        known = {name: value for name, value in vars(args).items() if name in ENGINE_SETTINGS or name in vllm_options()}
        return cls(**known)


AsyncEngineArgs = EngineArgs


def _dashed(argument: str) -> str:
    flag, equals, text = argument.partition("=")
    return flag.replace("_", "-") + equals + text if flag.startswith("--") else argument
