"""Logits processors from another package."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pagefleet_engine.worker.logits_processors import EditedRows, EnteringRequest
from torch import Tensor

NAME = "no processor"


class Only:
    """`only_token` is the one that comes, once `only_from` tokens are out."""

    argument_names = ("only_token", "only_from")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size

    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        if not isinstance(arguments.get("only_token"), int):
            raise ValueError("only_token takes a token id")

    def enter(self, request: EnteringRequest) -> tuple[int, int] | None:
        arguments = request.arguments
        return (arguments["only_token"], arguments.get("only_from", 0)) if "only_token" in arguments else None

    def edit(self, logits_RV: Tensor, rows: EditedRows) -> None:
        for row, (token, begins) in enumerate(rows.states):
            if rows.lens[row] - rows.prompt_lens[row] >= begins:
                logit = logits_RV[row, token].clone()
                logits_RV[row].fill_(float("-inf"))
                logits_RV[row, token] = logit


class NoRepeat:
    """Without a request's doing: no token comes that is one of the last two; none of it is known to the host."""

    argument_names = ()

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._made_for = vocab_size, device.type

    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        raise AssertionError("it reads no argument")

    def enter(self, request: EnteringRequest) -> bool:
        return True

    def edit(self, logits_RV: Tensor, rows: EditedRows) -> None:
        assert self._made_for == (logits_RV.shape[1], logits_RV.device.type)
        assert logits_RV.dtype == torch.float32
        last_RN = rows.last_tokens(2)
        floor_RN = torch.where(last_RN < 0, logits_RV.gather(1, last_RN.clamp(min=0)), -torch.inf)
        logits_RV.scatter_(1, last_RN.clamp(min=0), floor_RN)


class Faulty:
    """`fail`: where it raises, which is check, enter or edit."""

    argument_names = ("fail",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        _fail(arguments, "check")

    def enter(self, request: EnteringRequest) -> Mapping[str, Any] | None:
        _fail(request.arguments, "enter")
        return request.arguments if "fail" in request.arguments else None

    def edit(self, logits_RV: Tensor, rows: EditedRows) -> None:
        logits_RV.fill_(float("nan"))
        for arguments in rows.states:
            _fail(arguments, "edit")


class Unmade(Faulty):
    """Cannot be made."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        raise OSError("no such table")


def _fail(arguments: Mapping[str, Any], place: str) -> None:
    if arguments.get("fail") == place:
        raise KeyError(place)


class Asleep:
    """With `sleep` a step never ends."""

    argument_names = ("sleep",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        pass

    def enter(self, request: EnteringRequest) -> object | None:
        return True if request.arguments.get("sleep") else None

    def edit(self, logits_RV: Tensor, rows: EditedRows) -> None:
        threading.Event().wait()


class Slow(Asleep):
    """A step takes a while, until the file `slow_until` is there: so nothing ends while a test looks at it."""

    argument_names = ("slow_until",)

    def enter(self, request: EnteringRequest) -> Path | None:
        return Path(request.arguments["slow_until"]) if "slow_until" in request.arguments else None

    def edit(self, logits_RV: Tensor, rows: EditedRows) -> None:
        if not rows.states[0].exists():
            time.sleep(0.1)
